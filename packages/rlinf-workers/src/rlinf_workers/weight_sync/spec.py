"""What the rest of the system asks about a weight sync before any process starts, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_workers.addresses import DRIVERS_NODE
from rlinf_workers.plugins import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeEnds:
    """The location of the ranks of a weight sync edge.

    Example: one trainer on the driver's node and two servers on another, all on GPUs:
        EdgeEnds(sources=(0,), targets=(1, 1), on_gpus=True)
    """

    sources: Sequence[int]
    """Nodes of the training ranks, as the cluster counts them."""
    targets: Sequence[int]
    """The node of each serving end."""
    on_gpus: bool
    """Whether all ranks of the edge are on GPUs."""
    same_versions: bool = True
    """Whether all serving ends receive the same versions; otherwise each may leave out others."""

    @property
    def are_local(self) -> bool:
        """Whether all are on the driver's node."""
        return {*self.sources, *self.targets} == {DRIVERS_NODE}

    @property
    def share_nodes(self) -> bool:
        """Whether several serving ends are on one node."""
        return len(set(self.targets)) < len(self.targets)


@dataclass(frozen=True, kw_only=True)
class WeightSyncSpec(Spec):
    """A weight sync; by default it is only used if a recipe names it, and uses no GPU memory."""

    bytes_per_s: float | None = None
    """Measured rate of a whole sync on GPUs, beside the time on their links. None: not measured; plans then assume that
    of public systems."""

    def suits(self, ends: EdgeEnds) -> bool:
        """Whether `auto` tries it for this edge. Suitable ones are tried in the order of the table, until one is
        accepted."""
        return False

    def settings(self, ends: EdgeEnds) -> dict[str, Any]:
        """Options that depend on the location of the ends; the recipe's options override them."""
        return {}

    def problem(self, *, on_gpus: bool) -> str | None:
        """Why it cannot work on such devices; None: it can."""
        return None

    def gpu_bytes(self, *, trained_bytes: int, served_bytes: int, options: Mapping[str, Any]) -> int:
        """Bytes that a trainer's rank keeps on its GPU for each published version until all servers have received it.

        Args:
            trained_bytes: the rank's share of the weights in the training dtype.
            served_bytes: the same in the serving dtype.
            options: the recipe's options.
        """
        return 0

    def host_bytes(self, *, trained_bytes: int, served_bytes: int, options: Mapping[str, Any], on_gpus: bool) -> int:
        """As `gpu_bytes`, in the memory of the rank's machine.

        Args:
            on_gpus: whether all ranks of the edge are on GPUs.
        """
        return 0
