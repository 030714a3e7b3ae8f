"""Memory and times of training backends: estimates from model shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_sched import InstanceProfile, StageProfile
from rlinf_sched.derive import (
    NUM_MOMENTS,
    Gpu,
    InstanceLayout,
    JobShape,
    ModelShape,
    RankMemory,
    bubble_s,
    describe_numbers,
    forward_s,
    launch_s,
    num_passes,
    proportional,
    ring_bytes_per_s,
    sft_warm_up_bytes,
    update_bytes,
)

if TYPE_CHECKING:
    from rlinf_workers.trainers.spec import TrainerSpec


def whole_copy_memory(model: ModelShape, job: JobShape, num_ranks: int) -> RankMemory:
    """Memory of one of `num_ranks` ranks that hold whole models: a gradient buffer per shard, and both moments."""
    copy = job.num_models * job.dtype_bytes * model.num_parameters
    return RankMemory(
        weights=copy,
        gradients=-(-job.num_shards // max(1, num_ranks // job.sequence_ranks)) * copy,
        optimizer=NUM_MOMENTS * copy,
        activations=max(update_bytes(model, job), sft_warm_up_bytes(model, job)),
        step=2 * largest_tensor_bytes(model, job),
        host_copy=-(-(1 + NUM_MOMENTS) * copy // num_ranks),
    )


def train_profile(spec: TrainerSpec, model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
    """As `TrainerSpec.train_profile`."""
    span, computed = spec.num_ranks_of_replica(job), spec.computed(job)
    sharing = spec.sequence_ranks(job.trainer_options)
    expert_parallel, num_stages = spec.cut(job)
    copy = job.dtype_bytes * model.num_parameters
    pass_s = forward_s(model, gpu, computed, expert_parallel) / span
    launched_s = launch_s(model, job, num_stages)
    if job.max_tokens_per_micro_batch is not None:
        pass_s += exchange_s(model, gpu, computed, sharing) / (span // sharing)  # of a rank's heads and layers
    forwards = spec.num_passes(job) * job.num_models
    groups_of_shard = job.num_groups / (job.num_shards * job.num_updates)
    launched_s *= num_passes(job, groups_of_shard) / groups_of_shard
    item_s = forwards * (pass_s + launched_s) * spec.stage_imbalance(model, job)
    layout = InstanceLayout(width=span // num_stages, num_stages=num_stages, num_chunks=spec.num_chunks(job))
    idle_s = bubble_s(layout, _groups_per_micro_batch(job) * item_s)
    instances = []
    for num_ranks in (count for count in range(1, job.num_shards + 1) if job.num_shards % count == 0):
        memory = spec.rank_memory(model, job, num_ranks * span)
        sent = job.num_models * spec.copies_sent(job, num_ranks) * copy if num_ranks * sharing > 1 else 0
        link = ring_bytes_per_s(gpu, span // sharing, num_ranks * sharing)
        moved = (3 + 2 * NUM_MOMENTS) * memory.optimizer / NUM_MOMENTS  # all except the gradient are read and written
        instances.append(
            InstanceProfile(
                num_devices=span,
                num_ranks=num_ranks,
                points=proportional(item_s, job.num_groups),
                step_s=job.num_updates * (sent / link + moved / gpu.memory_bytes_per_s + idle_s),
                state_bytes=memory.state,
                work_bytes=memory.work(),
            )
        )
    return StageProfile(
        instances=tuple(instances),
        costs=job.lengths.total_costs,
        weights_bytes=copy,
        source=f"derived: {spec.name} AdamW training of {model.name} on {gpu.name}, "
        f"{describe_numbers(model, computed)}",
    )


def _groups_per_micro_batch(job: JobShape) -> float:
    if job.max_tokens_per_micro_batch is None:
        return min(job.micro_batch_groups, job.num_groups)
    return job.max_tokens_per_micro_batch / job.lengths.packed_group_tokens


def exchange_s(model: ModelShape, gpu: Gpu, job: JobShape, num_ranks: int) -> float:
    """Seconds of a pass over a group in which the ranks that share its tokens exchange queries, keys, values and
    results of attention."""
    if num_ranks == 1:
        return 0.0
    numbers = 2 * model.head_dim * (model.num_heads + max(model.num_kv_heads, num_ranks))
    tokens = job.lengths.packed_group_tokens / num_ranks
    sent = model.num_layers * tokens * numbers * job.dtype_bytes * (num_ranks - 1) / num_ranks
    return sent / ring_bytes_per_s(gpu, 1, num_ranks)


def largest_tensor_bytes(model: ModelShape, job: JobShape) -> int:
    """Bytes of the largest tensor of the model: the embeddings, or all experts of a layer."""
    experts = 2 * model.num_experts * model.hidden_size * model.expert_intermediate_size
    widest = max(model.vocab_size * model.hidden_size, model.intermediate_size * model.hidden_size, experts)
    return job.dtype_bytes * widest
