"""Memory of a rank with a sharded model."""

from __future__ import annotations

from rlinf_sched.derive import NUM_MOMENTS, JobShape, ModelShape, RankMemory, sft_warm_up_bytes, update_bytes
from rlinf_workers.trainers.counts import largest_tensor_bytes

NORM_BYTES = 8
"""Bytes of each squared gradient in the norm, which is float64."""


def fsdp2_memory(model: ModelShape, job: JobShape, computed: JobShape, num_ranks: int) -> RankMemory:
    """Shards of weights, one gradient and moments, plus the gathered parameters of a pass.

    Parameters outside of layers are gathered for the whole pass. One layer is in use while the next one is gathered,
    and a gradient is sent in the dtype of the weights. The norm squares a gradient in float64.
    """
    copy = job.dtype_bytes * model.num_parameters
    shard = job.num_models * -(-copy // num_ranks)
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    rest = embeddings + model.hidden_size + model.vision_parameters
    layer = -(-(model.num_parameters - rest) // model.num_layers)
    recomputes = bool(job.trainer_options.get("recompute"))
    update = update_bytes(model, computed, recomputes=recomputes)
    sent = 0 if num_ranks == 1 or job.sole_adapter else job.dtype_bytes * layer
    largest = largest_tensor_bytes(model, job)
    return RankMemory(
        weights=shard,
        gradients=shard,
        optimizer=NUM_MOMENTS * shard,
        activations=max(update, sft_warm_up_bytes(model, computed, recomputes=recomputes)),
        gathered=computed.dtype_bytes * (rest + 2 * layer) + sent,
        step=-(-2 * NORM_BYTES * largest // (job.dtype_bytes * num_ranks)),
        host_start=copy if job.adapter else 2 * largest,  # whole tensors that are read or initialized
        host_copy=(1 + NUM_MOMENTS) * shard + (0 if num_ranks == 1 else 2 * largest),  # gathered
    )
