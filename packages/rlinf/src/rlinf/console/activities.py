"""Describes what the workers of an executor are doing, for the live line of a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlinf.console.live_line import PART

if TYPE_CHECKING:
    from rlinf_workers import Executor


def starting(executor: Executor) -> str:
    """Returns `starting 5 workers, 2 are up`, then what follows."""
    num_up, num_workers = executor.num_started()
    if num_up < num_workers:
        return f"starting {num_workers} workers, {num_up} {'is' if num_up == 1 else 'are'} up"
    return "sending the weights to the engines"


def running(what: str, executor: Executor) -> Callable[[], str]:
    """Returns a function that describes the current run of a flow.

    Example, for `what` = "step 13/100": `step 13/100  rollout 37/64  reward 30/64`
    """

    def describe() -> str:
        stages = []
        for stage in executor.progress():
            if stage.num_items:
                stages.append(f"{stage.stage} {min(stage.num_done, stage.num_items)}/{stage.num_items}")
            elif stage.num_done:
                stages.append(f"{stage.stage} {stage.num_done} {stage.unit}".rstrip())
            elif stage.is_computing:
                stages.append(stage.stage)
        return PART.join([what, *stages])

    return describe
