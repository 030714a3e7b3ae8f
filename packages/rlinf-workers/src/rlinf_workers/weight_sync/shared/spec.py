from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_workers.weight_sync.spec import EdgeEnds, WeightSyncSpec


@dataclass(frozen=True, kw_only=True)
class SharedSpec(WeightSyncSpec):
    """Through shared memory of one machine."""

    def suits(self, ends: EdgeEnds) -> bool:
        return ends.are_local

    def host_bytes(self, *, trained_bytes: int, served_bytes: int, options: Mapping[str, Any], on_gpus: bool) -> int:
        return served_bytes


SPEC = SharedSpec(name="shared", implementation="rlinf_workers.weight_sync.shared.sync:SharedWeightSync")
