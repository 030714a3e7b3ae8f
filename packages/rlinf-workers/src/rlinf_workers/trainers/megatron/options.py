"""The options of the training backend `megatron`: how a model is sharded over ranks; checked without torch.

A replica is the ranks that hold one copy of the model together. Its experts are distributed over the same ranks as the
rest of the model; with expert parallelism each expert is whole (no tensor parallelism inside experts). A pipeline stage
has max(`tensor_parallel` * `context_parallel`, `expert_parallel`) ranks. Each group of `tensor_parallel` ranks of it
computes another slice of a micro-batch: other rows of a padded one, a part of the tokens of a packed one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from rlinf_workers.plugins import OptionError

if TYPE_CHECKING:
    from rlinf_sched.derive import ModelShape

NumRanks = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronOptions:
    """The backend's options. Raises: OptionError for incompatible sizes."""

    tensor_parallel: NumRanks = 1
    """Ranks that shard each matrix."""
    sequence_parallel: bool = False
    """The same ranks also shard the positions of a sequence between matrix products."""
    pipeline_parallel: NumRanks = 1
    """Stages of consecutive layers with the 1F1B schedule; where it does not divide the layers, some have one more."""
    virtual_pipeline_parallel: NumRanks = 1
    """Chunks of layers on each rank of a pipeline, which a micro-batch passes in turn (interleaved 1F1B): the bubble is
    this many times shorter."""
    context_parallel: NumRanks = 1
    """Groups of ranks that share the tokens of each packed micro-batch."""
    expert_parallel: NumRanks = 1
    """Ranks that share the experts of a layer."""
    distributed_optimizer: bool = False
    """Shard moments (and float32 masters) over replicas."""
    recompute: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """"bfloat16" stores and computes weights in bfloat16; masters, gradient sums and moments are float32."""

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise OptionError("sequence_parallel", "=true needs tensor_parallel of 2 or more; it has 1")
        if self.virtual_pipeline_parallel > 1 and self.pipeline_parallel == 1:
            text = f"={self.virtual_pipeline_parallel} needs pipeline_parallel of 2 or more; it has 1"
            raise OptionError("virtual_pipeline_parallel", text)
        small, large = sorted((self.tensor_parallel * self.context_parallel, self.expert_parallel))
        if large % small:
            context = f" context_parallel={self.context_parallel}" if self.context_parallel > 1 else ""
            raise OptionError(
                "tensor_parallel",
                f"={self.tensor_parallel}{context} and expert_parallel={self.expert_parallel}: both divide the ranks "
                "of a stage, so one must be a multiple of the other",
            )

    @property
    def compute_bytes(self) -> int:
        """Bytes of each number in the compute dtype."""
        return 2 if self.compute_dtype == "bfloat16" else 4

    @property
    def num_chunks(self) -> int | None:
        """Megatron-core's virtual pipeline size; None: there is a single chunk."""
        return self.virtual_pipeline_parallel if self.virtual_pipeline_parallel > 1 else None

    def layers_by_chunk(self, num_layers: int) -> list[int]:
        """Number of layers of each stage, of a virtual pipeline of each chunk, in the order of the forward pass. What
        an even split leaves over goes to those in the middle, then to the first, which has the embedding, since the
        last has the head.

        Example: 61 layers in 4 stages -> [15, 16, 15, 15]
        """
        num_chunks = self.pipeline_parallel * self.virtual_pipeline_parallel
        of_each, num_left = divmod(num_layers, num_chunks)
        longer = [*range(1, num_chunks - 1), 0][:num_left]
        return [of_each + (number in longer) for number in range(num_chunks)]

    def layers_by_stage(self, num_layers: int) -> list[int]:
        """Number of layers of each pipeline stage."""
        chunks = self.layers_by_chunk(num_layers)
        return [sum(chunks[stage :: self.pipeline_parallel]) for stage in range(self.pipeline_parallel)]

    @property
    def ranks_per_stage(self) -> int:
        return max(self.tensor_parallel * self.context_parallel, self.expert_parallel)

    @property
    def ranks_per_replica(self) -> int:
        """The required value of `plan.num_ranks_per_replica`."""
        return self.pipeline_parallel * self.ranks_per_stage

    @property
    def num_row_slices(self) -> int:
        """Number of slices of a micro-batch that the ranks of a stage divide among themselves."""
        return self.ranks_per_stage // self.tensor_parallel

    @property
    def expert_tensor_parallel(self) -> int:
        return 1 if self.expert_parallel > 1 else self.tensor_parallel

    def check_model(self, model: ModelShape) -> None:
        """Raises: OptionError with the allowed values if the model cannot be sharded this way."""
        self._divides("tensor_parallel", "attention heads", model.num_heads)
        self._divides("tensor_parallel", "KV groups", model.num_kv_heads)
        if (latent := model.latent) is not None:
            if latent.q_rank:
                self._divides("tensor_parallel", "numbers of a query's latent vector", latent.q_rank)
            of_keys = latent.kv_rank + latent.rope_dim
            self._divides("tensor_parallel", "numbers of a key's latent vector and its position", of_keys)
        for key, most in (
            ("pipeline_parallel", model.num_layers),
            ("virtual_pipeline_parallel", model.num_layers // self.pipeline_parallel),
        ):
            if getattr(self, key) > most:
                stages = f" with pipeline_parallel={self.pipeline_parallel}" if key != "pipeline_parallel" else ""
                text = f"={getattr(self, key)}{stages}: the model has {model.num_layers} layers; use at most {most}"
                raise OptionError(key, text)
        if model.num_dense_layers or not model.num_experts:
            self._divides("tensor_parallel", "columns of a feed-forward layer", model.intermediate_size)
        if not model.num_experts:
            if self.expert_parallel > 1:
                text = f"={self.expert_parallel}, but the model has no experts; leave it out"
                raise OptionError("expert_parallel", text)
            return
        self._divides("expert_parallel", "experts", model.num_experts)
        if model.shared_intermediate_size:
            self._divides("tensor_parallel", "columns of the shared experts", model.shared_intermediate_size)
        if self.expert_tensor_parallel > 1:
            self._divides("tensor_parallel", "columns of an expert", model.expert_intermediate_size)
        if self.tensor_parallel > 1 and not self.sequence_parallel:
            raise OptionError(
                "tensor_parallel",
                f"={self.tensor_parallel} for a mixture of experts needs sequence_parallel: true; megatron-core routes "
                "tokens that are sharded over the ranks",
            )

    def check_ranks(self, num_ranks: int, num_ranks_per_replica: int, *, has_experts: bool) -> None:
        """Raises: ValueError if the ranks of a plan do not match these options."""
        size = self.ranks_per_replica
        if num_ranks_per_replica != size:
            raise ValueError(
                f"the plan has {num_ranks_per_replica} ranks per replica, and {self} makes a replica of {size}"
            )
        shares = self.expert_parallel * self.expert_tensor_parallel
        if has_experts and self.replicates_slices(num_ranks) and shares != self.ranks_per_stage:
            raise OptionError(
                "expert_parallel",
                f"={self.expert_parallel}: {num_ranks // size} replicas of a pipeline whose stages have "
                f"{self.ranks_per_stage} ranks need each expert once in a stage, since megatron-core numbers others in "
                f"another order; use {self.ranks_per_stage}, or one replica",
            )

    def replicates_slices(self, num_ranks: int) -> bool:
        """Whether there are several replicas of a pipeline whose stages have slices."""
        return num_ranks > self.ranks_per_replica and self.pipeline_parallel > 1 and self.num_row_slices > 1

    def _divides(self, key: str, what: str, count: int) -> None:
        if count % getattr(self, key):
            allowed = [str(size) for size in range(1, count + 1) if count % size == 0][:12]
            text = f"={getattr(self, key)} does not divide the model's {count} {what}; use one of {', '.join(allowed)}"
            raise OptionError(key, text)

    def __str__(self) -> str:
        sizes = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
        return " ".join(f"{key}={getattr(self, key)}" for key in sizes)
