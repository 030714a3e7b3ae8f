"""What the rest of the system asks about a launcher before any process starts, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_workers.launchers.base import Node
from rlinf_workers.launchers.cluster_report import ClusterReport
from rlinf_workers.plugins import Spec


@dataclass(frozen=True, kw_only=True)
class LauncherSpec(Spec):
    """A launcher; by default it starts processes on this machine or, if its class has the class method `nodes`, on the
    nodes that this returns."""

    @property
    def has_nodes(self) -> bool:
        """Whether it starts processes on nodes of a cluster instead of this machine. Its constructor then takes the
        devices of the run as `cluster`."""
        return hasattr(self.load(), "nodes")

    def nodes(self, options: Mapping[str, Any]) -> Sequence[Node]:
        """The nodes of its cluster, the driver's first; only called if it `has_nodes`.

        Args:
            options: the recipe's options for the constructor.

        Raises: ClusterRefused, NodeLost.
        """
        return self.load().nodes(**options)

    @property
    def can_look(self) -> bool:
        """Whether `look` examines a cluster."""
        return False

    def look(self, address: str, packages: Sequence[str], say: Callable[[str], None]) -> ClusterReport:
        """Inspects every node of a cluster and the network between them; only called if it `can_look`.

        Args:
            address: of the cluster, in the format of the launcher's options; empty: the launcher's default.
            packages: distributions whose versions are reported.
            say: called with progress messages.

        Raises: ClusterRefused; ModuleNotFoundError if a package that the launcher needs is missing.
        """
        raise NotImplementedError(f"launcher {self.name} cannot inspect a cluster")
