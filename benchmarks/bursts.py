"""Steps of a flow in bursts, generation ahead of training: what every comparison of steps that overlap does."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlinf_workers import Executor, FlowRun


def burst(
    executor: Executor, begin: Callable[[int], None], *, first: int, num_steps: int, ahead: int
) -> tuple[list[FlowRun], list[float]]:
    """Does steps `first` to `first + num_steps`; none is under way before and afterwards.

    Args:
        begin: begins the run of a step.
        ahead: steps by which generation is ahead of training.

    Returns: the run of each step, and the seconds of the clock at which it ended.
    """
    begun, runs, ended_s = first, [], []
    for step in range(first, first + num_steps):
        while begun < min(first + num_steps, step + ahead + 1):
            begin(begun)
            begun += 1
        runs.append(executor.finish())
        ended_s.append(time.perf_counter())
    return runs, ended_s
