from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_workers.addresses import own_address
from rlinf_workers.weight_sync.spec import EdgeEnds, WeightSyncSpec


@dataclass(frozen=True, kw_only=True)
class StreamsSpec(WeightSyncSpec):
    """Between processes of any machines; `auto` uses `per_node` if several ranks of a node receive weights in host
    memory."""

    def suits(self, ends: EdgeEnds) -> bool:
        return not ends.are_local and (ends.on_gpus or not ends.share_nodes or not ends.same_versions)

    def settings(self, ends: EdgeEnds) -> dict[str, Any]:
        return {} if ends.are_local else {"host": own_address()}

    def gpu_bytes(self, *, trained_bytes: int, served_bytes: int, options: Mapping[str, Any]) -> int:
        return trained_bytes if options.get("device_memory", True) else 0

    def host_bytes(self, *, trained_bytes: int, served_bytes: int, options: Mapping[str, Any], on_gpus: bool) -> int:
        return 0 if on_gpus and options.get("device_memory", True) else trained_bytes


SPEC = StreamsSpec(name="streams", implementation="rlinf_workers.weight_sync.streams.sync:StreamsWeightSync")
