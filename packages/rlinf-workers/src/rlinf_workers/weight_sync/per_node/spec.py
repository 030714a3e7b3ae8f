from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_workers.addresses import own_address
from rlinf_workers.weight_sync.spec import EdgeEnds, WeightSyncSpec


@dataclass(frozen=True, kw_only=True)
class PerNodeSpec(WeightSyncSpec):
    """Sends once per node, if several ranks of a node receive weights in host memory."""

    def suits(self, ends: EdgeEnds) -> bool:
        return not ends.are_local and not ends.on_gpus and ends.share_nodes

    def settings(self, ends: EdgeEnds) -> dict[str, Any]:
        return {**({} if ends.are_local else {"host": own_address()}), "nodes": list(ends.targets)}

    def host_bytes(self, *, trained_bytes: int, served_bytes: int, options: Mapping[str, Any], on_gpus: bool) -> int:
        return trained_bytes


SPEC = PerNodeSpec(name="per_node", implementation="rlinf_workers.weight_sync.per_node.sync:PerNodeWeightSync")
