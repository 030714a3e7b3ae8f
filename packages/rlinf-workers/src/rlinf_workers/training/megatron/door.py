"""What `actor.backend: megatron` makes. Neither megatron-core nor its shim is imported before a worker asks for it."""

from __future__ import annotations

from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.training.base import OptimizerSettings, Trainable, TrainingBackend
from rlinf_workers.training.fsdp2.backend import fsdp2
from rlinf_workers.training.megatron.options import MegatronOptions, check_installed
from rlinf_workers.worker import Worker


def megatron(
    model: Trainable,
    worker: Worker,
    *,
    optimizer: OptimizerSettings | None,
    num_shards: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    distributed_optimizer: bool = False,
    recompute: bool = False,
    compute_dtype: str = "float32",
) -> TrainingBackend:
    """A language model in replicas of tensor, pipeline and expert parallelism; see MegatronOptions for the options.

    A frozen model is whole on every rank, unless the plan gives its ranks replicas of that size.

    Raises: ValueError naming the key of the recipe.
    """
    options = MegatronOptions(
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=expert_parallel,
        distributed_optimizer=distributed_optimizer,
        recompute=recompute,
        compute_dtype=compute_dtype,
    )
    if optimizer is None and worker.identity.num_ranks_per_replica == 1:
        return fsdp2(model, worker, optimizer=None, num_shards=num_shards, compute_dtype=compute_dtype)
    if not isinstance(model, TokenModel):
        raise ValueError(
            f"actor.backend=megatron: holds no {type(model).__name__}, only language models that say how likely tokens "
            "are; a critic trains under replicated or fsdp2"
        )
    check_installed()
    from rlinf_workers.training.megatron.backend import MegatronBackend

    return MegatronBackend(model, worker, optimizer=optimizer, num_shards=num_shards, options=options)
