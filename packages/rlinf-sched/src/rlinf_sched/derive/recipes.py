"""Profiles of the workers that `rlinf train` starts: data-parallel AdamW under a training backend, and generation by a
transformers model in captured steps with a static batch, or by SGLang.

Memory is counted in `memory`. Times are arithmetic at a public utilisation, as in `training` and `generation`, and what
launching the layers of a transformers model takes beside it, which is most of a small model's step
(benchmarks/sched/gpu_steps.py compares them with steps on a GPU).
"""

import math
from dataclasses import replace

from rlinf_sched.derive.datasheets import Gpu
from rlinf_sched.derive.generation import (
    BANDWIDTH_UTILISATION,
    CAPTURED_LAYER_S,
    continuous_points,
    flops_per_s,
    group_cache_tokens,
)
from rlinf_sched.derive.memory import JobShape, forward_memory, generator_memory, trainer_memory, trainer_of
from rlinf_sched.derive.memory.activations import kv_bytes
from rlinf_sched.derive.memory.rank import NUM_MOMENTS
from rlinf_sched.derive.memory.sglang import kv_tokens, longest_tokens
from rlinf_sched.derive.parallel import exchange_s, ring_bytes_per_s
from rlinf_sched.derive.profiles import rule_profile
from rlinf_sched.derive.sglang import SGLangOptions
from rlinf_sched.derive.shapes import ModelShape
from rlinf_sched.derive.training import powers_up_to, utilisation
from rlinf_sched.errors import ProfileError
from rlinf_sched.flow_graph import FlowGraph, Stage
from rlinf_sched.profile import InstanceProfile, Profiles, StageProfile, TimePoint

LAYER_CALL_S = 1e-3
"""Seconds that a trainer or a reference takes to launch one layer's forward pass, beside its arithmetic: 0.8 to 1.35 ms
in Qwen2.5-0.5B and -1.5B on an H100, FSDP2's hooks included; up to 2.2 ms in packed micro-batches
(benchmarks/sched/gpu_steps.py). A backward pass launches twice as much."""


def recipe_profiles(
    flow: FlowGraph, model: ModelShape, gpu: Gpu, job: JobShape, reference: ModelShape | None = None
) -> Profiles:
    """Profiles of the stages of a reasoning flow.

    Args:
        reference: shape of the reference's own model; None: the reference has the policy's.
    """
    models = {stage.name: reference if stage.role == "reference" and reference else model for stage in flow.stages}
    return Profiles(stages={stage.name: _stage_profile(stage, models[stage.name], gpu, job) for stage in flow.stages})


def _stage_profile(stage: Stage, model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
    if not stage.needs_device:
        return rule_profile(job.lengths.group_size, job.num_groups)
    if stage.trains:
        return _train_profile(model, gpu, job)
    if stage.role == "rollout":
        return (_sglang_profile if job.engine == "sglang" else _generate_profile)(model, gpu, job)
    return _forward_profile(model, gpu, job)


def _train_profile(model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
    """One choice for each number of replicas, which decides how many gradient buffers a rank has. An instance is a
    replica, whose ranks share its work out."""
    span, computed = trainer_of(job).span(job), replace(job, dtype_bytes=trainer_of(job).frozen_bytes(job))
    copy = job.dtype_bytes * model.num_parameters
    pass_s = _forward_s(model, gpu, job) / span + _launch_s(model, job)
    num_passes = 4 if job.backend_options.get("recompute") else 3  # a backward pass is two
    item_s = num_passes * job.num_models * pass_s
    instances = []
    for num_ranks in (count for count in range(1, job.num_shards + 1) if job.num_shards % count == 0):
        memory = trainer_memory(model, job, num_ranks * span)
        sent = job.num_models * trainer_of(job).copies_sent(job, num_ranks) * copy if num_ranks > 1 else 0
        link = ring_bytes_per_s(gpu, span, num_ranks)
        moved = (3 + 2 * NUM_MOMENTS) * memory.optimizer / NUM_MOMENTS  # all but the gradient is read and written
        instances.append(
            InstanceProfile(
                num_devices=span,
                num_ranks=num_ranks,
                points=_proportional(item_s, job.num_groups),
                step_s=job.num_updates * (sent / link + moved / gpu.memory_bytes_per_s),
                state_bytes=memory.state,
                work_bytes=memory.work(),
            )
        )
    return StageProfile(
        instances=tuple(instances),
        costs=job.lengths.total_costs,
        weights_bytes=copy,
        source=f"derived: {job.backend} AdamW training of {model.name} on {gpu.name}, {_how(model, computed)}",
    )


def _forward_profile(model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
    memory, computed = forward_memory(model, job), replace(job, dtype_bytes=trainer_of(job).frozen_bytes(job))
    item_s = _forward_s(model, gpu, job) + _launch_s(model, job, most_groups=1)
    instance = InstanceProfile(
        points=_proportional(item_s, job.num_groups),
        state_bytes=memory.state,
        work_bytes=memory.work(),
    )
    return StageProfile(
        instances=(instance,),
        costs=job.lengths.total_costs,
        weights_bytes=memory.weights,
        source=f"derived: forward pass of {model.name} on {gpu.name}, {_how(model, computed)}",
    )


def _generate_profile(model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
    """A batch runs in captured steps until its longest answer ends, all of its rows at every token."""
    lengths, memory = job.lengths, generator_memory(model, job)
    most = max(1, min(job.num_groups, job.max_sequences // lengths.group_size))
    job = job.served
    rate = flops_per_s(model, gpu, job.dtype_bytes)
    points = []
    for n in powers_up_to(most):
        rows = n * lengths.group_size
        read = job.dtype_bytes * model.num_parameters + rows * lengths.mean_context_tokens * kv_bytes(model, job)
        busy_s = max(
            read / (BANDWIDTH_UTILISATION * gpu.memory_bytes_per_s),
            rows * model.forward_flops(lengths.mean_context_tokens) / rate,
        )
        token_s = busy_s + model.num_layers * CAPTURED_LAYER_S
        prefill_s = n * lengths.prompt_tokens * model.forward_flops(lengths.prompt_tokens / 2) / rate
        points.append(TimePoint(num_items=n, seconds=lengths.longest_of_group_tokens * token_s + prefill_s))
    instance = InstanceProfile(
        points=tuple(points), max_items=most, state_bytes=memory.state, item_work_bytes=memory.work(1)
    )
    return StageProfile(
        instances=(instance,),
        batching="longest",
        costs=lengths.longest_costs,
        weights_bytes=memory.weights,
        source=f"derived: captured decoding of {model.name} in static batches on {gpu.name}, {_how(model, job)}",
    )


def _sglang_profile(model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
    """An engine over the devices of a rank; as many groups run as its KV pool holds."""
    lengths, size, dtype_bytes = job.lengths, job.tensor_parallel, job.served.dtype_bytes
    memory, most = generator_memory(model, job), kv_tokens(model, job)
    if most < longest_tokens(job):
        raise ProfileError(
            f"the KV pool of an engine of {size} x {gpu.name} holds {max(0, most):,} tokens, and the longest sequence "
            f"has {longest_tokens(job):,}; use more devices for an engine, or shorter sequences"
        )
    asked = SGLangOptions.of(job.engine_options).max_running_requests or job.num_groups * lengths.group_size
    running = min(most / group_cache_tokens(lengths), asked / lengths.group_size)
    most = max(1, min(job.num_groups, int(running)))
    instance = InstanceProfile(
        num_devices=size,
        points=continuous_points(model, gpu, lengths, most=most, num_devices=size, dtype_bytes=dtype_bytes),
        max_items=most,
        state_bytes=memory.state,
        work_bytes=memory.work(),
        onload_s=0.0,
        offload_s=0.0,  # the pool is given back and taken anew, and the next weights come with the sync
    )
    return StageProfile(
        instances=(instance,),
        batching="continuous",
        costs=lengths.longest_costs,
        weights_bytes=dtype_bytes * model.num_parameters,
        source=f"derived: SGLang with {model.name} on {size} x {gpu.name}, {_how(model, job.served)}",
    )


def _forward_s(model: ModelShape, gpu: Gpu, job: JobShape) -> float:
    """Device-seconds of a forward pass over one group, whose prompt is computed once, in the numbers that the backend
    computes in; with the exchange between experts that are dealt out over ranks."""
    num_tokens = job.lengths.packed_group_tokens
    flops = num_tokens * model.forward_flops(job.lengths.mean_context_tokens)
    exchanged_s = num_tokens * exchange_s(model, gpu, job.backend_options.get("expert_parallel", 1), passes=2)
    return flops / flops_per_s(model, gpu, trainer_of(job).frozen_bytes(job)) + exchanged_s


def _launch_s(model: ModelShape, job: JobShape, most_groups: float = math.inf) -> float:
    """Seconds of a rank to launch its layers' forward passes over one group of a micro-batch, which has `most_groups`
    at most: once where tokens are packed, else once for the prompts and once for the completions."""
    num_calls, num_groups = 2.0, float(job.micro_batch_groups)
    if job.max_tokens_per_micro_batch is not None:
        num_calls, num_groups = 1.0, job.max_tokens_per_micro_batch / job.lengths.packed_group_tokens
    num_layers = model.num_layers / job.backend_options.get("pipeline_parallel", 1)
    return num_calls / min(num_groups, most_groups) * num_layers * LAYER_CALL_S


def _proportional(item_s: float, most: int) -> tuple[TimePoint, ...]:
    return tuple(TimePoint(num_items=n, seconds=n * item_s) for n in powers_up_to(most))


def _how(model: ModelShape, job: JobShape) -> str:
    dtype = {2: "bfloat16", 4: "float32"}.get(job.dtype_bytes, f"{job.dtype_bytes} bytes a number")
    return f"{dtype}, at {utilisation(model):.0%} of its rate"
