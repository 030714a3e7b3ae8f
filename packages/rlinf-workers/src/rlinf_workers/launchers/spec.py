"""What is known of a launcher before any process starts, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_workers.launchers.base import Node
from rlinf_workers.launchers.cluster_report import ClusterReport
from rlinf_workers.plugins import Spec


@dataclass(frozen=True, kw_only=True)
class LauncherSpec(Spec):
    """A launcher; one that leaves everything out starts processes on this machine or, where its class has the class
    method `nodes`, on the nodes that it returns."""

    @property
    def has_nodes(self) -> bool:
        """Whether it starts processes on nodes that it knows, and not on this machine. Its constructor then takes the
        devices of the run as `cluster`."""
        return hasattr(self.load(), "nodes")

    def nodes(self, options: Mapping[str, Any]) -> Sequence[Node]:
        """The nodes of its cluster, the driver's first; asked where it `has_nodes`.

        Args:
            options: the recipe's, as the constructor takes them.

        Raises: ClusterRefused, NodeLost.
        """
        return self.load().nodes(**options)

    @property
    def can_look(self) -> bool:
        """Whether `look` examines a cluster."""
        return False

    def look(self, address: str, packages: Sequence[str], say: Callable[[str], None]) -> ClusterReport:
        """What there is to see of every node of a cluster, and of the network between them; asked where it `can_look`.

        Args:
            address: of the cluster, as the launcher's options write it; empty: the launcher's default.
            packages: whose versions are reported.
            say: is called with what is being done.

        Raises: ClusterRefused; ModuleNotFoundError where a package that the launcher needs is missing.
        """
        raise NotImplementedError(f"launcher {self.name} examines no cluster")
