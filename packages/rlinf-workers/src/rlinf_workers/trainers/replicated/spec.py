"""The training backend `replicated`: the whole model on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from rlinf_workers.trainers.spec import TrainerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedOptions:
    """The options in `actor.backend_options`."""

    sequence_parallel: Annotated[int, Meta(ge=1)] = 1
    """Ranks of a replica, which compute each packed micro-batch together."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the decoder layers for packed rows (torch.compile). auto: on GPUs."""


@dataclass(frozen=True, kw_only=True)
class ReplicatedSpec(TrainerSpec):
    """Each rank has its own micro-batches, or shares them with those of its replica."""

    def sequence_ranks(self, options: Mapping[str, Any]) -> int:
        return int(options.get("sequence_parallel", 1))


SPEC = ReplicatedSpec(
    name="replicated",
    implementation="rlinf_workers.trainers.replicated.backend:ReplicatedBackend",
    options=ReplicatedOptions,
    trains_adapters=True,
    sums_shards_apart=True,
)
