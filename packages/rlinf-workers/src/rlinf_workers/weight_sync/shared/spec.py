from __future__ import annotations

from dataclasses import dataclass

from rlinf_workers.weight_sync.spec import EdgeEnds, WeightSyncSpec


@dataclass(frozen=True, kw_only=True)
class SharedSpec(WeightSyncSpec):
    """Through shared memory of one machine."""

    def suits(self, ends: EdgeEnds) -> bool:
        return ends.are_local


SPEC = SharedSpec(name="shared", implementation="rlinf_workers.weight_sync.shared.sync:SharedWeightSync")
