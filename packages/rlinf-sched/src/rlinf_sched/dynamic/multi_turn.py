"""Which request of a multi-turn rollout an engine takes next: the one whose trajectory has completed most turns.

A trajectory alternates between a turn on an engine and a tool or environment that answers. First come, first served
lets all trajectories creep forward together: they end late and together, and all hold their KV cache meanwhile. Most
turns first carries begun trajectories to their end, so that the stages after the rollout have something to do early and
fewer trajectories are open at once.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rlinf_sched.errors import SchedError, did_you_mean

Priority = Literal["fifo", "most_turns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiTurnOutcome:
    """How a rollout went."""

    ends_s: np.ndarray
    """float64 [trajectories]: when each was complete, ascending."""
    most_open: int
    """Most trajectories that were begun and not complete at a time: those for which a KV cache is kept."""
    mean_open: float
    """Mean number of open trajectories over the time of the rollout."""

    @property
    def end_s(self) -> float:
        return float(self.ends_s[-1])

    @property
    def half_s(self) -> float:
        """Seconds until half of the trajectories were complete."""
        return float(self.ends_s[(len(self.ends_s) - 1) // 2])


def simulate_multi_turn(
    turns_s: Sequence[Sequence[float]], *, num_slots: int, tool_s: float, priority: Priority = "most_turns"
) -> MultiTurnOutcome:
    """Every trajectory's turns on the slots of the engines, one at a time each, `tool_s` apart.

    Args:
        turns_s: trajectory -> seconds of each of its turns, at least one; all wait from the beginning.
        num_slots: requests that the engines run at once.
        tool_s: between a turn and the request for the next.
        priority: among the requests that wait; equal ones go by arrival.

    Raises:
        SchedError: an unknown priority, no slot, or a trajectory without turns.
    """
    if priority not in get_args(Priority):
        raise SchedError(f"priority={priority!r}{did_you_mean(priority, get_args(Priority))}")
    if num_slots < 1 or tool_s < 0:
        raise SchedError(f"num_slots={num_slots}, tool_s={tool_s}: use at least 1 slot and 0 seconds")
    if not turns_s or any(len(turns) == 0 for turns in turns_s):
        raise SchedError("turns_s needs at least one trajectory, each with at least one turn")
    waiting = [(0, i, i, 0) for i in range(len(turns_s))]  # (rank by priority, arrival, trajectory, its turn)
    events: list[tuple[float, int, str, int, int]] = []  # (time, tie-break, kind, trajectory, its turn)
    num_arrived, num_free, now, num_open, most_open, open_time = len(turns_s), num_slots, 0.0, 0, 0, 0.0
    ends: list[float] = []
    order = itertools.count()
    while waiting or events:
        while num_free and waiting:
            _, _, trajectory, turn = heapq.heappop(waiting)
            num_free -= 1
            num_open += turn == 0
            heapq.heappush(events, (now + turns_s[trajectory][turn], next(order), "turn", trajectory, turn))
        most_open = max(most_open, num_open)
        end, _, kind, trajectory, turn = heapq.heappop(events)
        open_time += num_open * (end - now)
        now = end
        if kind == "tool":
            heapq.heappush(waiting, (-turn if priority == "most_turns" else 0, num_arrived, trajectory, turn))
            num_arrived += 1
            continue
        num_free += 1
        if turn + 1 < len(turns_s[trajectory]):
            heapq.heappush(events, (now + tool_s, next(order), "tool", trajectory, turn + 1))
        else:
            ends.append(now)
            num_open -= 1
    return MultiTurnOutcome(ends_s=np.array(ends), most_open=most_open, mean_open=open_time / now if now else 0.0)
