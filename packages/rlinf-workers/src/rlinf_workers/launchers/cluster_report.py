"""What was found out about a cluster: its nodes, and the ways between them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlinf_sched import Links


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """One node. Where nobody could look, `problem` says why, and only what Ray says is there."""

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
    """Distribution -> version, of those that are installed."""
    cuda: str | None = None
    """The CUDA that torch was built for."""
    gpus: tuple[tuple[str, int], ...] = ()
    """Name and bytes of those that torch finds."""
    torch_problem: str = ""
    shared_free_bytes: int = 0
    """Of /dev/shm."""
    shared_bytes: int = 0
    clock_offset_s: float = 0.0
    """By how much its clock is ahead of the driver's."""
    clock_error_s: float = 0.0
    """Half a round trip: the offset is off by no more."""

    @property
    def place(self) -> str:
        return f"node {self.number} ({self.hostname}, {self.address})"


@dataclass(frozen=True, kw_only=True, slots=True)
class WayReport:
    """From one node to another. Where there is no way, `problem` says why."""

    source: int
    target: int
    problem: str = ""
    round_trip_s: float = 0.0
    """Of a few bytes over TCP."""
    bytes_per_s: float = 0.0
    """Of one TCP connection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterReport:
    """A cluster.

    Example: two nodes have the ways 0 -> 1 and 1 -> 0.
    """

    nodes: tuple[NodeReport, ...]
    ways: tuple[WayReport, ...]
    is_open: bool = False
    """Whether it takes anybody, without a token."""

    @property
    def open_ways(self) -> list[WayReport]:
        return [way for way in self.ways if not way.problem]

    @property
    def median_bytes_per_s(self) -> float:
        """Of the open ways, of which there is one."""
        return statistics.median(way.bytes_per_s for way in self.open_ways)

    def links(self) -> Links | None:
        """What the planner is told of the network: it has one rate and one latency for all nodes, so they are those of
        the slowest way. A hand-over through a channel's server asks and is answered, so its latency is the round trip.
        None: there is no way between nodes."""
        if not self.open_ways:
            return None
        return Links(
            network_bytes_per_s=min(way.bytes_per_s for way in self.open_ways),
            latency_s=max(way.round_trip_s for way in self.open_ways),
        )
