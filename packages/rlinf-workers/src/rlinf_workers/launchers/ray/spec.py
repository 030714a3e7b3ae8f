from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlinf_workers.launchers.cluster_report import ClusterReport
from rlinf_workers.launchers.spec import LauncherSpec


@dataclass(frozen=True, kw_only=True)
class RaySpec(LauncherSpec):
    """Processes on the nodes of a Ray cluster."""

    @property
    def has_nodes(self) -> bool:
        return True

    @property
    def can_look(self) -> bool:
        return True

    def look(self, address: str, packages: Sequence[str], say: Callable[[str], None]) -> ClusterReport:
        from rlinf_workers.launchers.ray.look import look_at_cluster

        return look_at_cluster(address or "auto", (*packages, "ray"), say)


SPEC = RaySpec(name="ray", implementation="rlinf_workers.launchers.ray.launcher:RayLauncher")
