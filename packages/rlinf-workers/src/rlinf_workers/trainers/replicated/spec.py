"""The training backend `replicated`: the whole model on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_workers.trainers.spec import TrainerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedOptions:
    """It has none."""


SPEC = TrainerSpec(
    name="replicated",
    implementation="rlinf_workers.trainers.replicated.backend:ReplicatedBackend",
    options=ReplicatedOptions,
    trains_adapters=True,
    sums_shards_apart=True,
)
