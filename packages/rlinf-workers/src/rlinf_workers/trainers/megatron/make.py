"""Creates the backend. megatron-core and its shim are imported only when a worker creates it."""

from __future__ import annotations

from typing import Literal

from rlinf_workers.models.lora import LoraModel
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.trainers.base import ModelAdapter, OptimizerSettings, TrainingBackend
from rlinf_workers.trainers.fsdp2.backend import fsdp2
from rlinf_workers.trainers.megatron.options import MegatronOptions
from rlinf_workers.trainers.megatron.spec import is_installed
from rlinf_workers.worker import Worker


def megatron(
    model: ModelAdapter,
    worker: Worker,
    *,
    optimizer: OptimizerSettings | None,
    num_shards: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    pipeline_parallel: int = 1,
    virtual_pipeline_parallel: int = 1,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    distributed_optimizer: bool = False,
    recompute: bool = False,
    compute_dtype: Literal["float32", "bfloat16"] = "float32",
) -> TrainingBackend:
    """A language model with tensor, pipeline, context and expert parallelism; see MegatronOptions for the options.

    A frozen model is whole on every rank, unless the plan gives its role replicas of that size.

    Raises: ValueError naming the option.
    """
    options = MegatronOptions(
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
        pipeline_parallel=pipeline_parallel,
        virtual_pipeline_parallel=virtual_pipeline_parallel,
        context_parallel=context_parallel,
        expert_parallel=expert_parallel,
        distributed_optimizer=distributed_optimizer,
        recompute=recompute,
        compute_dtype=compute_dtype,
    )
    if optimizer is None and worker.identity.num_ranks_per_replica == 1:
        return fsdp2(model, worker, optimizer=None, num_shards=num_shards, compute_dtype=compute_dtype)
    if not isinstance(model.base if isinstance(model, LoraModel) else model, TokenModel | ValueModel):
        raise ValueError(
            f"megatron cannot train a {type(model).__name__}, only whole language models with a head for tokens or "
            "values"
        )
    assert isinstance(model, TokenModel | ValueModel | LoraModel)
    if not is_installed():
        raise ValueError("megatron-core is not installed; pip install 'rlinf-workers[megatron]'")
    from rlinf_workers.trainers.megatron.backend import MegatronBackend

    return MegatronBackend(model, worker, optimizer=optimizer, num_shards=num_shards, options=options)
