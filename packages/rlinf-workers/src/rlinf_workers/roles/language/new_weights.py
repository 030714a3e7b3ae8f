"""When a stage takes new weights before it ends: as soon as they are there, or where a record says.

{"took": version, "after": decode steps since the stage began}        a decision of each rank
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rlinf_workers.worker import Decision


@dataclass(kw_only=True, slots=True)
class WeightTakes:
    """The weights that a stage takes while it generates; none by default.

    Example: a stage that began when its engine had done 40 decode steps follows a record:
        WeightTakes.of_stage(40, [{"took": 3, "after": 12}])    next_step 52; due(12, newest=4) is 3, then nothing
    """

    is_open: bool = False
    """Whether it takes any."""
    first_step: int = 0
    """Decode steps of the engine before the stage."""
    recorded: deque[tuple[int, int]] | None = None
    """Versions and decode steps that are still to come; None: there is no record."""

    @classmethod
    def of_stage(cls, first_step: int, recorded: Iterable[Decision] | None) -> WeightTakes:
        """Those of a stage that begins now.

        Args:
            recorded: decisions of this rank in the stage that is replayed; None: newer weights are taken as they come.
        """
        if recorded is None:
            return cls(is_open=True, first_step=first_step)
        taken = deque((one["took"], one["after"]) for one in recorded if "took" in one)
        return cls(is_open=bool(taken), first_step=first_step, recorded=taken)

    def num_steps(self, num_engine_steps: int) -> int:
        """Decode steps since the stage began."""
        return num_engine_steps - self.first_step

    @property
    def next_step(self) -> int | None:
        """Decode step of the engine at which the next recorded weights are due; None: there are none."""
        return self.first_step + self.recorded[0][1] if self.recorded else None

    def due(self, num_steps: int, newest: int | None) -> int | None:
        """The version to take now; None: go on without.

        Args:
            num_steps: decode steps since the stage began.
            newest: the newest version that may be taken.
        """
        if self.recorded is None:
            return newest
        if not self.recorded or num_steps < self.recorded[0][1]:
            return None
        return self.recorded.popleft()[0]
