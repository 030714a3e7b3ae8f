"""What `actor.backend: megatron` makes. Neither megatron-core nor its shim is imported before a worker asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal

from rlinf_sched.derive.megatron import MegatronOptions
from rlinf_sched.derive.shapes import ModelShape
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.trainers.base import OptimizerSettings, Trainable, TrainingBackend
from rlinf_workers.trainers.fsdp2.backend import fsdp2
from rlinf_workers.worker import Worker

MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe")
"""Architectures (`model_type`) with a mapping that was compared with transformers."""


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
    compute_dtype: Literal["float32", "bfloat16"] = "float32",
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
    if not isinstance(model, TokenModel | ValueModel):
        raise ValueError(
            f"actor.backend=megatron: holds no {type(model).__name__}, only whole language models that say how likely "
            "tokens are or what they are worth; use replicated or fsdp2"
        )
    _check_installed()
    from rlinf_workers.trainers.megatron.backend import MegatronBackend

    return MegatronBackend(model, worker, optimizer=optimizer, num_shards=num_shards, options=options)


def check(options: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Whether a recipe can be run so, asked before any process starts.

    Args:
        config: what stands in the model's config.json.

    Raises: ValueError with what was allowed, or what to install.
    """
    sizes = MegatronOptions.of(options)
    _check_installed()
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"actor.backend=megatron: model_type={kind!r} has no mapping to megatron-core; those that have: "
            f"{', '.join(MODEL_TYPES)}; other models train under replicated or fsdp2"
        )
    sizes.check_model(ModelShape.from_config(config))


def _check_installed() -> None:
    try:
        found = find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ValueError("actor.backend=megatron: megatron-core is not installed; pip install 'rlinf[megatron]'")
