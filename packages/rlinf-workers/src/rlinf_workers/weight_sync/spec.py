"""What is known of a weight sync before any process starts, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_workers.addresses import DRIVERS_NODE
from rlinf_workers.plugins import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeEnds:
    """Where the ranks of one edge of weights are.

    Example: one trainer on the driver's node and two servers on another, all on GPUs:
        EdgeEnds(sources=(0,), targets=(1, 1), on_gpus=True)
    """

    sources: Sequence[int]
    """Nodes of the ranks that train, as the cluster counts them."""
    targets: Sequence[int]
    """The node of each serving end."""
    on_gpus: bool
    """Whether all ranks of the edge are on GPUs."""

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
    """A weight sync; those that leave everything out are taken where a recipe names them, and count no GPU memory."""

    def suits(self, ends: EdgeEnds) -> bool:
        """Whether `auto` tries it for this edge. Those that suit are tried in the order of the table, until one is not
        refused."""
        return False

    def settings(self, ends: EdgeEnds) -> dict[str, Any]:
        """Options that follow from where the ends are; the recipe's own come on top."""
        return {}

    def problem(self, *, on_gpus: bool) -> str | None:
        """Why it cannot work on such devices; None: it can."""
        return None

    def gpu_bytes(self, *, trained_bytes: int, served_bytes: int, options: Mapping[str, Any]) -> int:
        """Bytes that a trainer's rank keeps on its GPU of a published version until all servers have taken it.

        Args:
            trained_bytes: the rank's share of the weights in the dtype that it trains.
            served_bytes: the same in the dtype that is served.
            options: the recipe's.
        """
        return 0
