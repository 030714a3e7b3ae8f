from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_workers.addresses import own_address
from rlinf_workers.errors import FlowDefinitionError
from rlinf_workers.weight_sync.spec import EdgeEnds, WeightSyncSpec


@dataclass(frozen=True, kw_only=True)
class PerNodeSpec(WeightSyncSpec):
    """Sends once per node, if several ranks of a node receive weights in host memory."""

    def suits(self, ends: EdgeEnds) -> bool:
        return not ends.are_local and not ends.on_gpus and ends.share_nodes and ends.same_versions

    def settings(self, ends: EdgeEnds) -> dict[str, Any]:
        """Raises: FlowDefinitionError if ranks of a node may receive different versions."""
        if not ends.same_versions and ends.share_nodes:
            raise FlowDefinitionError(
                "weight sync per_node brings each version to a node once, for all its ranks, and these may take "
                "different ones (rollout.on_new_weights); use weight sync streams, or on_new_weights finish"
            )
        return {**({} if ends.are_local else {"host": own_address()}), "nodes": list(ends.targets)}

    def host_bytes(self, *, trained_bytes: int, served_bytes: int, options: Mapping[str, Any], on_gpus: bool) -> int:
        return trained_bytes


SPEC = PerNodeSpec(name="per_node", implementation="rlinf_workers.weight_sync.per_node.sync:PerNodeWeightSync")
