"""The training backend `fsdp2`: torch's `fully_shard`, with a shard of every tensor on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from rlinf_workers.trainers.spec import TrainerSpec

if TYPE_CHECKING:
    from rlinf_sched.derive import JobShape, ModelShape, RankMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDP2Options:
    """The options in `actor.backend_options`."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Computes in this dtype; weights, reductions and moments keep the model's dtype."""
    recompute: bool = False
    """Recompute the feed-forward half of each layer in the backward pass instead of keeping its activations."""
    sequence_parallel: Annotated[int, Meta(ge=1)] = 1
    """Ranks of a replica, which compute each packed micro-batch together."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the decoder layers for packed rows (torch.compile). auto: on GPUs."""


@dataclass(frozen=True, kw_only=True)
class FSDP2Spec(TrainerSpec):
    """Sharded over all ranks of the actor. Each has its own micro-batches, or shares them with those of its replica."""

    def sequence_ranks(self, options: Mapping[str, Any]) -> int:
        return int(options.get("sequence_parallel", 1))

    def compute_dtype(self, options: Mapping[str, Any], model_dtype: str) -> str:
        return "bfloat16" if options.get("compute_dtype") == "bfloat16" else model_dtype

    def module_problem(self, options: Mapping[str, Any], module: Callable[[], Any]) -> str | None:
        if not options.get("recompute"):
            return None
        from rlinf_workers.trainers.fsdp2.sharding import recompute_feed_forward

        try:
            recompute_feed_forward(module())
        except ValueError as error:
            return str(error)
        return None

    def memory(self, model: ModelShape, job: JobShape, num_ranks: int) -> RankMemory:
        from rlinf_workers.trainers.fsdp2.memory import fsdp2_memory

        return fsdp2_memory(model, job, self.computed(job), num_ranks)

    def copies_sent(self, job: JobShape, num_ranks: int) -> int:
        """Gathered twice and reduced in each pass; `num_ranks` are replicas where ranks share micro-batches."""
        from rlinf_sched.derive import num_passes

        return 3 * num_passes(job, -(-job.num_groups // (num_ranks * job.num_updates)))


SPEC = FSDP2Spec(
    name="fsdp2",
    implementation="rlinf_workers.trainers.fsdp2.backend:fsdp2",
    options=FSDP2Options,
    trains_adapters=True,
    shards_state=True,
)
