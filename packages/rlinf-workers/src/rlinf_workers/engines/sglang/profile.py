"""Estimated times of SGLang for the groups of a step."""

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
)
from rlinf_workers.engines.sglang.memory import kv_tokens
from rlinf_workers.engines.sglang.options import SGLangOptions


def sglang_profile(model: ModelShape, gpu: Gpu, job: JobShape, memory: RankMemory) -> StageProfile:
    """An engine on the devices of a rank, with as many running groups as its KV pool holds."""
    lengths, size, dtype_bytes = job.lengths, job.tensor_parallel, job.served.dtype_bytes
    num_tokens = kv_tokens(model, job)
    if num_tokens < job.longest_tokens:
        raise ProfileError(
            f"the KV pool of an engine of {size} x {gpu.name} holds {max(0, num_tokens):,} tokens, and the longest "
            f"sequence has {job.longest_tokens:,}; use more devices for an engine, or shorter sequences"
        )
    limit = SGLangOptions.of(job.engine_options).max_running_requests or job.num_groups * lengths.group_size
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
        source=f"derived: SGLang with {model.name} on {size} x {gpu.name}, {describe_numbers(model, job.served)}",
    )
