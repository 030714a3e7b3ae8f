"""Estimated times of a server for the groups of a step, of which it runs as many as its KV cache holds, and the sizes
that both servers have."""

from __future__ import annotations

from rlinf_sched import InstanceProfile, ProfileError, StageProfile
from rlinf_sched.derive import (
    Gpu,
    JobShape,
    ModelShape,
    RankMemory,
    continuous_points,
    describe_numbers,
    group_cache_tokens,
    kv_bytes,
)

CPU_SHARE = 0.25
"""Maximum share of a CPU slot's memory for the KV cache, if the recipe sets no size."""


def weights_bytes(model: ModelShape, job: JobShape) -> int:
    """Bytes of the weights on one device of an engine; norms, which are replicated, are counted as if sharded."""
    return -(-job.served_weights_bytes(model) // job.tensor_parallel)


def kv_token_bytes(model: ModelShape, job: JobShape) -> int:
    """Bytes of one token's keys and values on one device of an engine."""
    return kv_bytes(model, job.served) // job.tensor_parallel


def cpu_sequences(job: JobShape) -> int:
    """Completions that an engine on CPU slots may have at once."""
    return min(job.num_groups * job.lengths.group_size, job.max_sequences)


def served_profile(
    title: str,
    model: ModelShape,
    gpu: Gpu,
    job: JobShape,
    memory: RankMemory,
    *,
    num_tokens: int,
    max_running: int | None = None,
) -> StageProfile:
    """An engine on the devices of a rank, with as many running groups as its KV pool holds.

    Args:
        title: the server's name.
        num_tokens: capacity of its KV cache.
        max_running: its limit of running completions; None: all that there are.
    """
    lengths, size, dtype_bytes = job.lengths, job.tensor_parallel, job.served.dtype_bytes
    if num_tokens < job.longest_tokens:
        raise ProfileError(
            f"the KV pool of an engine of {size} x {gpu.name} holds {max(0, num_tokens):,} tokens, and the longest "
            f"sequence has {job.longest_tokens:,}; use more devices for an engine, or shorter sequences"
        )
    limit = max_running or job.num_groups * lengths.group_size
    running = min(num_tokens / group_cache_tokens(lengths), limit / lengths.group_size)
    most = max(1, min(job.num_groups, int(running)))
    instance = InstanceProfile(
        num_devices=size,
        points=continuous_points(model, gpu, lengths, most=most, num_devices=size, dtype_bytes=dtype_bytes),
        max_items=most,
        state_bytes=memory.state,
        work_bytes=memory.work(),
        onload_s=0.0,
        offload_s=0.0,  # the pool is released and reallocated, and the next weights come with the sync
    )
    return StageProfile(
        instances=(instance,),
        batching="continuous",
        costs=lengths.longest_costs,
        weights_bytes=job.served_weights_bytes(model),
        source=f"derived: {title} with {model.name} on {size} x {gpu.name}, {describe_numbers(model, job.served)}",
    )
