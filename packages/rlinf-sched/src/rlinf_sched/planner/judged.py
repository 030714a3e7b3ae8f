"""A plan, how the simulator is asked about it, and what it thinks of it."""

from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

from rlinf_sched.plan import Plan
from rlinf_sched.problem import Problem
from rlinf_sched.simulator import Timeline
from rlinf_sched.simulator.simulation import execute


class Judging(TypedDict):
    """What the simulator executes to judge a plan."""

    seed: int | None
    num_steps: int


def judging(num_draws: int) -> Judging:
    """A step with typical costs, or so many whose costs are drawn."""
    return {"seed": 0, "num_steps": num_draws} if num_draws else {"seed": None, "num_steps": 1}


@dataclass(frozen=True)
class Judged:
    """A plan without its prediction, judged by the simulator."""

    plan: Plan
    step_s: float
    estimate_s: float | None
    """Seconds of a step as the search over cuts estimates them; None for what local search found."""
    problem: Problem
    num_draws: int

    @cached_property
    def timeline(self) -> Timeline:
        """Executed when it is asked for, which takes as long as judging the plan did."""
        return execute(self.problem, self.plan, **judging(self.num_draws))
