"""What a recipe says to the training backend `megatron`: how a model is cut over ranks, checked without torch.

A replica is the ranks that hold one copy of the model together. Its experts are dealt out over the same ranks as the
rest of the model, whole (not cut by tensor parallelism) where there is expert parallelism. So a stage of the pipeline
has `tensor_parallel` ranks, or `expert_parallel` where that is more, and then each `tensor_parallel` of them work on
other rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rlinf_sched.derive.shapes import ModelShape
from rlinf_sched.errors import did_you_mean

DTYPES = ("float32", "bfloat16")
WHERE = "actor.backend_options"


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronOptions:
    """The keys of `actor.backend_options`. Raises: ValueError for sizes that do not go together."""

    tensor_parallel: int = 1
    """Ranks that share each matrix out."""
    sequence_parallel: bool = False
    """Those ranks also share the positions of a sequence out between the matrices."""
    pipeline_parallel: int = 1
    """Stages of consecutive layers; micro-batches go through them one forward, one backward (1F1B)."""
    expert_parallel: int = 1
    """Ranks that share the experts of a layer out."""
    distributed_optimizer: bool = False
    """Replicas share moments (and float32 masters) out among themselves."""
    recompute: bool = False
    """The backward pass computes each layer again instead of keeping its activations."""
    compute_dtype: str = "float32"
    """"bfloat16" holds and computes weights in it; masters, sums of gradients and moments are float32."""

    def __post_init__(self) -> None:
        for key in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
            size = getattr(self, key)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{WHERE}: {key}={size!r} is not a number of ranks; use 1 or more")
        for key in ("sequence_parallel", "distributed_optimizer", "recompute"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"{WHERE}: {key}={getattr(self, key)!r} is neither true nor false")
        if self.compute_dtype not in DTYPES:
            raise ValueError(f"{WHERE}: compute_dtype={self.compute_dtype!r} is not one of {', '.join(DTYPES)}")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(f"{WHERE}: sequence_parallel=true needs tensor_parallel of 2 or more; it has 1")
        small, large = sorted((self.tensor_parallel, self.expert_parallel))
        if large % small:
            raise ValueError(
                f"{WHERE}: tensor_parallel={self.tensor_parallel} and expert_parallel={self.expert_parallel}: "
                "the ranks of a stage are dealt out by both, so one must be a multiple of the other"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> MegatronOptions:
        """What a recipe says, as options. Raises: ValueError, also for a key that is not there."""
        known = [field.name for field in fields(cls)]
        for key in options:
            if key not in known:
                raise ValueError(f"{WHERE}: megatron has no option {key!r}{did_you_mean(key, known)}")
        return cls(**options)

    @property
    def ranks_per_stage(self) -> int:
        return max(self.tensor_parallel, self.expert_parallel)

    @property
    def ranks_per_replica(self) -> int:
        """What `plan.num_ranks_per_replica` must be."""
        return self.pipeline_parallel * self.ranks_per_stage

    @property
    def num_parts(self) -> int:
        """Parts of a micro-batch's rows that different ranks of a stage work on."""
        return self.ranks_per_stage // self.tensor_parallel

    @property
    def expert_tensor_parallel(self) -> int:
        return 1 if self.expert_parallel > 1 else self.tensor_parallel

    def check_model(self, model: ModelShape) -> None:
        """Whether the model can be cut so. Raises: ValueError with what was allowed."""
        self._divides("tensor_parallel", "attention heads", model.num_heads)
        self._divides("tensor_parallel", "KV groups", model.num_kv_heads)
        self._divides("pipeline_parallel", "layers", model.num_layers)
        if not model.num_experts:
            self._divides("tensor_parallel", "columns of a feed-forward layer", model.intermediate_size)
            if self.expert_parallel > 1:
                raise ValueError(
                    f"{WHERE}: expert_parallel={self.expert_parallel}, but the model has no experts; leave it out"
                )
            return
        self._divides("expert_parallel", "experts", model.num_experts)
        if self.expert_tensor_parallel > 1:
            self._divides("tensor_parallel", "columns of an expert", model.expert_intermediate_size)
        if self.tensor_parallel > 1 and not self.sequence_parallel:
            raise ValueError(
                f"{WHERE}: tensor_parallel={self.tensor_parallel} for a mixture of experts needs "
                "sequence_parallel: true; megatron-core routes tokens that are shared out over the ranks"
            )

    def check_ranks(self, num_ranks: int, num_ranks_per_replica: int) -> None:
        """Whether ranks of a plan can be cut so. Raises: ValueError naming the key of the plan."""
        size = self.ranks_per_replica
        if num_ranks_per_replica != size:
            raise ValueError(
                f"plan.num_ranks_per_replica.actor={num_ranks_per_replica}: {self} makes a replica of {size} ranks; "
                f"use {size}"
            )
        num_replicas = num_ranks // size
        if num_replicas > 1 and self.pipeline_parallel > 1 and self.num_parts > 1:
            raise ValueError(
                f"{WHERE}: {num_replicas} replicas of a pipeline whose stages have expert_parallel="
                f"{self.expert_parallel} but tensor_parallel={self.tensor_parallel}: megatron-core numbers such ranks "
                f"in another order; use one replica, or expert_parallel of {self.tensor_parallel} or 1"
            )

    def _divides(self, key: str, what: str, count: int) -> None:
        if count % getattr(self, key):
            allowed = [str(size) for size in range(1, count + 1) if count % size == 0][:12]
            raise ValueError(
                f"{WHERE}: {key}={getattr(self, key)} does not divide the model's {count} {what}; "
                f"use one of {', '.join(allowed)}"
            )

    def __str__(self) -> str:
        sizes = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
        return " ".join(f"{key}={getattr(self, key)}" for key in sizes)
