"""Chooses the weight sync of an edge from the location of its two ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.weight_sync.spec import EdgeEnds, WeightSyncSpec


def choose(name: str, options: Mapping[str, Any], ends: EdgeEnds) -> list[tuple[str, dict[str, Any]]]:
    """[(a name in `plugins.WEIGHT_SYNCS` or an import path, its options)]: the recipe's choice or, for `auto`,
    candidates to try in this order until one is accepted."""
    names = (
        {spec.name: spec for spec in suitable_weight_syncs(ends)} if name == "auto" else {name: WEIGHT_SYNCS.spec(name)}
    )
    return [(name, {**spec.settings(ends), **options}) for name, spec in names.items()]


def suitable_weight_syncs(ends: EdgeEnds) -> list[WeightSyncSpec]:
    """The candidates of `auto` for an edge, the best first."""
    return [spec for spec in WEIGHT_SYNCS.specs() if spec.suits(ends)]
