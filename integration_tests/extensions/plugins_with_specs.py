"""A launcher and weight syncs that bring specs; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_workers.launchers import ClusterReport, LauncherSpec, NodeReport
from rlinf_workers.weight_sync import WeightSyncSpec


@dataclass(frozen=True, kw_only=True)
class BarnSpec(LauncherSpec):
    @property
    def has_nodes(self) -> bool:
        return False

    @property
    def can_look(self) -> bool:
        return True

    def look(self, address: str, packages: Sequence[str], say: Callable[[str], None]) -> ClusterReport:
        node = NodeReport(number=0, hostname="barn", address="10.0.0.1", num_cpus=4, num_gpus=0, problem="nobody home")
        return ClusterReport(nodes=(node,), ways=())


@dataclass(frozen=True, kw_only=True)
class WingedSpec(WeightSyncSpec):
    def problem(self, *, on_gpus: bool) -> str | None:
        return "it needs wings"


@dataclass(frozen=True, kw_only=True)
class CartSpec(WeightSyncSpec):
    def gpu_bytes(self, *, trained_bytes: int, served_bytes: int, options: Mapping[str, Any]) -> int:
        return 3 * served_bytes


LAUNCHER = BarnSpec(name="barn", implementation="integration_tests.extensions.launcher:CountingLauncher")
WEIGHT_SYNC = CartSpec(name="cart", implementation="rlinf_workers.weight_sync.shared.sync:SharedWeightSync")
ON_GPUS_ALONE = WingedSpec(name="winged", implementation="rlinf_workers.weight_sync.shared.sync:SharedWeightSync")
