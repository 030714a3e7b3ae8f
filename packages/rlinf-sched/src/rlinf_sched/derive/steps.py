"""Times of the steps of data-parallel workers: a forward pass over whole groups, and generation in whole batches.

Times are arithmetic at a public utilisation, as in `training` and `generation`, and what launching the layers of a
transformers model takes beside it, which is most of a small model's step (benchmarks/sched/gpu_steps.py compares them
with steps on a GPU).
"""

import math
from dataclasses import replace

from rlinf_sched.derive.datasheets import Gpu
from rlinf_sched.derive.generation import (
    BANDWIDTH_UTILISATION,
    CAPTURED_LAYER_S,
    flops_per_s,
    read_s,
    with_waits,
)
from rlinf_sched.derive.memory import JobShape, RankMemory, forward_memory, kv_bytes
from rlinf_sched.derive.parallel import exchange_s
from rlinf_sched.derive.shapes import ModelShape
from rlinf_sched.derive.training import powers_up_to, utilisation
from rlinf_sched.profile import InstanceProfile, StageProfile, TimePoint

LAYER_CALL_S = 1e-3
"""Seconds that a trainer or a reference takes to launch one layer's forward pass, beside its arithmetic: 0.8 to 1.35 ms
in padded passes of Qwen2.5-0.5B and -1.5B on an H100, FSDP2's hooks included (benchmarks/sched/gpu_steps.py). A
backward pass launches twice as much. Compiled layers launch fewer kernels and are counted alike: no GPU has timed them,
and the host's own share is no less, on a CPU 1.09 ms in place of 0.86 ms of a tiny layer (docs/calibration.md)."""


def read_profile(
    model: ModelShape,
    gpu: Gpu,
    job: JobShape,
    *,
    expert_parallel: int = 1,
    num_stages: int = 1,
) -> StageProfile:
    """The profile of ranks that compute log-probabilities, each with a whole model: on GPUs in as few packed passes as
    the budget of tokens allows, on CPUs and where passes are padded one group at a time.

    Args:
        job: in the numbers that they compute in (`dtype_bytes`).
        expert_parallel, num_stages: as `forward_s` and `launch_s`.
    """
    memory = forward_memory(model, job)
    item_s = forward_s(model, gpu, job, expert_parallel)
    one_launch_s = launch_s(model, job, num_stages)
    shares = job.on_gpu and job.max_tokens_per_micro_batch is not None
    alone = replace(job, micro_batch_groups=1)

    def seconds(num_items: int) -> float:
        passes = num_passes(job, num_items) if shares else num_items * num_passes(alone, 1)
        return num_items * item_s + passes * one_launch_s

    instance = InstanceProfile(
        points=tuple(TimePoint(num_items=n, seconds=seconds(n)) for n in powers_up_to(job.num_groups)),
        state_bytes=memory.state,
        work_bytes=memory.work(),
    )
    return StageProfile(
        instances=(instance,),
        costs=job.lengths.total_costs,
        weights_bytes=memory.weights,
        source=f"derived: forward pass of {model.name} on {gpu.name}, {describe_numbers(model, job)}",
    )


def batch_profile(model: ModelShape, gpu: Gpu, job: JobShape, memory: RankMemory) -> StageProfile:
    """The profile of ranks that generate whole batches: a batch runs in captured steps until its longest answer ends,
    all of its rows at every token.

    Args:
        memory: what a rank holds.
    """
    lengths = job.lengths
    most = max(1, min(job.num_groups, job.max_sequences // lengths.group_size))
    job = job.served
    rate = flops_per_s(model, gpu, job.dtype_bytes)
    prefill_s = read_s(model, gpu, lengths, job.dtype_bytes)

    def inside_s(rows: float) -> float:
        read = job.served_weights_bytes(model) + rows * lengths.mean_context_tokens * kv_bytes(model, job)
        busy_s = max(
            read / (BANDWIDTH_UTILISATION * gpu.memory_bytes_per_s),
            rows * model.forward_flops(lengths.mean_context_tokens) / rate,
        )
        return lengths.longest_sampled_tokens * (busy_s + model.num_layers * CAPTURED_LAYER_S)

    points = []
    for n in powers_up_to(most):
        rows = n * lengths.group_size
        seconds = n * prefill_s + with_waits(lambda share, rows=rows: inside_s(rows * share), lengths)
        points.append(TimePoint(num_items=n, seconds=seconds))
    instance = InstanceProfile(
        points=tuple(points), max_items=most, state_bytes=memory.state, item_work_bytes=memory.work(1)
    )
    return StageProfile(
        instances=(instance,),
        batching="longest",
        costs=lengths.longest_costs,
        weights_bytes=memory.weights,
        source=f"derived: captured decoding of {model.name} in static batches on {gpu.name}, "
        f"{describe_numbers(model, job)}",
    )


def forward_s(model: ModelShape, gpu: Gpu, job: JobShape, expert_parallel: int = 1) -> float:
    """Device-seconds of a forward pass over one group, whose prompt is computed once, in numbers of `job.dtype_bytes`;
    including the exchange between experts that are distributed over `expert_parallel` ranks."""
    num_tokens = job.lengths.packed_group_tokens
    flops = num_tokens * model.forward_flops(job.lengths.mean_context_tokens)
    exchanged_s = num_tokens * exchange_s(model, gpu, expert_parallel, passes=2)
    return flops / flops_per_s(model, gpu, job.dtype_bytes) + exchanged_s


def num_passes(job: JobShape, num_groups: float) -> int:
    """Passes in which so many groups are computed together: as many as the budget of tokens asks for, or of
    `micro_batch_groups` groups where they are padded."""
    if job.max_tokens_per_micro_batch is None:
        return max(1, math.ceil(num_groups / job.micro_batch_groups))
    return max(1, math.ceil(num_groups * job.lengths.packed_group_tokens / job.max_tokens_per_micro_batch))


def launch_s(model: ModelShape, job: JobShape, num_stages: int = 1) -> float:
    """Seconds of a rank to launch the forward pass of one micro-batch, whose layers are cut into `num_stages`: once
    where tokens are packed, else once for the prompts and once for the completions."""
    num_calls = 2 if job.max_tokens_per_micro_batch is None else 1
    return num_calls * model.num_layers / num_stages * LAYER_CALL_S


def proportional(item_s: float, most: int) -> tuple[TimePoint, ...]:
    """Times of 1, 2, 4, ..., `most` items that take `item_s` each."""
    return tuple(TimePoint(num_items=n, seconds=n * item_s) for n in powers_up_to(most))


def describe_numbers(model: ModelShape, job: JobShape) -> str:
    """The compute dtype, and the fraction of its peak rate, for a profile's source."""
    dtype = {2: "bfloat16", 4: "float32"}.get(job.dtype_bytes, f"{job.dtype_bytes} bytes a number")
    return f"{dtype}, at {utilisation(model):.0%} of its rate"
