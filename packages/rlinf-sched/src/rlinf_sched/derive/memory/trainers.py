"""How the parts of each training backend are counted. A backend that ships has one line in `TRAINERS`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rlinf_sched.derive.megatron import MegatronOptions
from rlinf_sched.derive.memory.activations import update_bytes, warm_start_bytes
from rlinf_sched.derive.memory.job import JobShape
from rlinf_sched.derive.memory.megatron import compute_bytes, megatron_memory
from rlinf_sched.derive.memory.rank import NUM_MOMENTS, RankMemory
from rlinf_sched.derive.shapes import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """How a training backend is counted."""

    memory: Callable[[ModelShape, JobShape, int], RankMemory]
    """What one of so many ranks of the actor holds."""
    copies_sent: Callable[[JobShape, int], int]
    """Copies of the weights that each of so many ranks sends and receives in an update."""
    frozen_bytes: Callable[[JobShape], int] = lambda job: job.dtype_bytes
    """Bytes of each number that the backend computes in, and of a model that it holds frozen, the reference."""
    span: Callable[[JobShape], int] = lambda job: 1
    """Ranks that hold one copy of the model together, each on a device of its own."""


def trainer_of(job: JobShape) -> Trainer:
    """The line of the job's backend; one of the user's own is counted as if it were `replicated`."""
    return TRAINERS.get(job.backend, TRAINERS["replicated"])


def trainer_memory(model: ModelShape, job: JobShape, num_ranks: int) -> RankMemory:
    """The memory of one of `num_ranks` ranks that train."""
    whole = trainer_of(job).memory(model, job, num_ranks)
    if job.adapter is None:
        return whole
    return job.adapter.added_to(whole, model, job.dtype_bytes * model.num_parameters, job.num_models)


# -- replicated --------------------------------------------------------------------------------------------------------


def _replicated_memory(model: ModelShape, job: JobShape, num_ranks: int) -> RankMemory:
    """The whole model, a gradient buffer for each of the rank's shards, and both moments."""
    copy = job.num_models * job.dtype_bytes * model.num_parameters
    return RankMemory(
        weights=copy,
        gradients=-(-job.num_shards // num_ranks) * copy,
        optimizer=NUM_MOMENTS * copy,
        activations=max(update_bytes(model, job), warm_start_bytes(model, job)),
        step=copy // job.num_models if job.on_gpu else 2 * _largest_bytes(model, job),
        host_copy=-(-(1 + NUM_MOMENTS) * copy // num_ranks),
    )


def _largest_bytes(model: ModelShape, job: JobShape) -> int:
    """Bytes of the largest tensor of the model: the embeddings, or all experts of a layer."""
    experts = 2 * model.num_experts * model.hidden_size * model.expert_intermediate_size
    widest = max(model.vocab_size * model.hidden_size, model.intermediate_size * model.hidden_size, experts)
    return job.dtype_bytes * widest


# -- fsdp2 -------------------------------------------------------------------------------------------------------------


def _fsdp2_memory(model: ModelShape, job: JobShape, num_ranks: int) -> RankMemory:
    """A part of weights, one gradient and moments, and what a pass has gathered.

    What is in no layer is gathered for the whole pass. Of the layers, one is in use, the next is on its way, and a
    gradient is sent in the dtype of the weights. The norm squares a gradient in float64.
    """
    copy = job.dtype_bytes * model.num_parameters
    part = job.num_models * -(-copy // num_ranks)
    computed = replace(job, dtype_bytes=_fsdp2_compute_bytes(job))
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    rest = embeddings + model.hidden_size + model.vision_parameters
    layer = -(-(model.num_parameters - rest) // model.num_layers)
    recomputes = bool(job.backend_options.get("recompute"))
    update = update_bytes(model, computed, recomputes=recomputes)
    sent = 0 if num_ranks == 1 or job.sole_adapter else job.dtype_bytes * layer
    return RankMemory(
        weights=part,
        gradients=part,
        optimizer=NUM_MOMENTS * part,
        activations=max(update, warm_start_bytes(model, computed, recomputes=recomputes)),
        gathered=computed.dtype_bytes * (rest + 2 * layer) + sent,
        step=-(-2 * 8 * _largest_bytes(model, job) // (job.dtype_bytes * num_ranks)),
        host_start=copy if job.adapter else 2 * _largest_bytes(model, job),  # what is read, or made, whole
        host_copy=(1 + NUM_MOMENTS) * part + (0 if num_ranks == 1 else 2 * _largest_bytes(model, job)),  # gathered
    )


def _fsdp2_compute_bytes(job: JobShape) -> int:
    return 2 if job.backend_options.get("compute_dtype") == "bfloat16" else job.dtype_bytes


def _num_passes(job: JobShape, num_ranks: int) -> int:
    """Micro-batches of an update on a rank."""
    groups = -(-job.num_groups // (num_ranks * job.num_updates))
    if job.max_tokens_per_micro_batch is None:
        return max(1, -(-groups // job.micro_batch_groups))
    return max(1, math.ceil(groups * job.lengths.packed_group_tokens / job.max_tokens_per_micro_batch))


TRAINERS: Mapping[str, Trainer] = {
    "replicated": Trainer(memory=_replicated_memory, copies_sent=lambda job, num_ranks: 2),
    "fsdp2": Trainer(
        memory=_fsdp2_memory,
        copies_sent=lambda job, num_ranks: 3 * _num_passes(job, num_ranks),  # gathered twice and reduced in each pass
        frozen_bytes=_fsdp2_compute_bytes,
    ),
    "megatron": Trainer(
        memory=megatron_memory,
        copies_sent=lambda job, num_ranks: 2,
        frozen_bytes=compute_bytes,
        span=lambda job: MegatronOptions.of(job.backend_options).ranks_per_replica,
    ),
}
"""Name of the backend (`actor.backend`) -> how it is counted."""
