"""A report on a cluster: its nodes, and the network between them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlinf_sched import Links


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """One node. If it could not be inspected, `problem` has the reason, and the other fields are what Ray reports."""

    number: int
    """0: the driver's."""
    hostname: str
    address: str
    num_cpus: int
    """As Ray counts them."""
    num_gpus: int
    """As Ray counts them."""
    problem: str = ""
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Installed distribution -> version."""
    cuda: str | None = None
    """The CUDA that torch was built for."""
    gpus: tuple[tuple[str, int], ...] = ()
    """Name and bytes of those that torch finds."""
    torch_problem: str = ""
    shared_free_bytes: int = 0
    """Free bytes of /dev/shm."""
    shared_bytes: int = 0
    clock_offset_s: float = 0.0
    """How far its clock is ahead of the driver's."""
    clock_error_s: float = 0.0
    """Half a round trip, the maximum error of the offset."""

    @property
    def place(self) -> str:
        return f"node {self.number} ({self.hostname}, {self.address})"


@dataclass(frozen=True, kw_only=True, slots=True)
class WayReport:
    """The network path from one node to another. If there is none, `problem` has the reason."""

    source: int
    target: int
    problem: str = ""
    round_trip_s: float = 0.0
    """Round trip of a few bytes over TCP."""
    bytes_per_s: float = 0.0
    """Bandwidth of one TCP connection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterReport:
    """A cluster.

    Example: two nodes have the ways 0 -> 1 and 1 -> 0.
    """

    nodes: tuple[NodeReport, ...]
    ways: tuple[WayReport, ...]
    is_open: bool = False
    """Whether it accepts clients without a token."""

    @property
    def open_ways(self) -> list[WayReport]:
        return [way for way in self.ways if not way.problem]

    @property
    def median_bytes_per_s(self) -> float:
        """Of the working paths; there must be one."""
        return statistics.median(way.bytes_per_s for way in self.open_ways)

    def links(self) -> Links | None:
        """The network as the planner models it: one bandwidth and one latency for all nodes, those of the slowest path.
        A hand-over through a channel server is a request and a reply, so its latency is the round trip. None: no nodes
        can reach each other."""
        if not self.open_ways:
            return None
        return Links(
            network_bytes_per_s=min(way.bytes_per_s for way in self.open_ways),
            latency_s=max(way.round_trip_s for way in self.open_ways),
        )
