"""A plan, how the simulator is asked about it, and what it thinks of it."""

from dataclasses import dataclass
from typing import TypedDict

from rlinf_sched.plan import Plan
from rlinf_sched.simulator import Timeline


class Judging(TypedDict):
    """What the simulator executes to judge a plan."""

    seed: int | None
    num_steps: int


def judging(num_draws: int) -> Judging:
    """A step with typical costs, or so many whose costs are drawn."""
    return {"seed": 0, "num_steps": num_draws} if num_draws else {"seed": None, "num_steps": 1}


@dataclass(frozen=True, slots=True)
class Judged:
    """A plan without its prediction, executed by the simulator."""

    plan: Plan
    timeline: Timeline
    estimate_s: float | None
    """Seconds of a step as the search over cuts estimates them; None for what local search found."""

    @property
    def step_s(self) -> float:
        return self.timeline.step_s
