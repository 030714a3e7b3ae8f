"""The groups of a run that outlive their step (`rollout.sampler: as_finished`), between two steps.

The ranks of the rollout say them when no step is under way. They go into the checkpoint, and back to the ranks when a
run is resumed, lost processes were replaced, or workers have moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_comm import pack, unpack
from rlinf_workers import StepContext
from rlinf_workers.roles import LateGroup, Prompt, late_from_start

if TYPE_CHECKING:
    from rlinf.loop.session import Session

FILE = "late_groups.bin"
"""In the folder of a checkpoint."""


class LateGroups:
    """Those of each rank, as they stood when the latest step had ended."""

    def __init__(self) -> None:
        self._shares: list[list[LateGroup]] = []

    def begin(self, prompts: Sequence[Prompt], group_size: int, seed: int, num_items: int) -> None:
        """Those with which a run begins: nothing of them has been sampled.

        Args:
            num_items: prompts of a step; these are numbered after them.
        """
        step = StepContext(step=0, phase="train", seed=seed, num_items=num_items)
        numbered = (replace(one, index=index) for index, one in enumerate(prompts, start=num_items))
        self._shares = [[late_from_start(one, step, group_size) for one in numbered]]

    def take(self, session: Session) -> None:
        """Those that the latest step has left; no step may be under way."""
        self._shares = session.group("rollout").call("late_groups")

    def hand_out(self, session: Session) -> None:
        """Gives each rank its own, or shares them out anew among another number of ranks."""
        num_ranks = session.group("rollout").num_ranks
        if len(self._shares) != num_ranks:
            groups = sorted(chain.from_iterable(self._shares), key=lambda one: (one.step, one.prompt.index))
            self._shares = [groups[rank::num_ranks] for rank in range(num_ranks)]
        session.group("rollout").call("go_on_with", self._shares)

    def save(self, checkpoint: Path) -> None:
        """Writes `FILE`."""
        (checkpoint / FILE).write_bytes(pack(self._shares))

    def load(self, checkpoint: Path) -> None:
        """Reads `FILE`."""
        self._shares = unpack((checkpoint / FILE).read_bytes())
