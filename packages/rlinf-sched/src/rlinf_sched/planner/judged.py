"""A plan, how it is simulated, and the result."""

from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

from rlinf_sched.plan import Plan
from rlinf_sched.problem import Problem
from rlinf_sched.simulator import Timeline
from rlinf_sched.simulator.simulation import execute


class Judging(TypedDict):
    """What the simulator runs to evaluate a plan."""

    seed: int | None
    num_steps: int


def judging(num_draws: int) -> Judging:
    """A step with typical costs, or this many steps with drawn costs."""
    return {"seed": 0, "num_steps": num_draws} if num_draws else {"seed": None, "num_steps": 1}


@dataclass(frozen=True)
class Judged:
    """A plan without a prediction, evaluated by the simulator."""

    plan: Plan
    step_s: float
    estimate_s: float | None
    """Step time in seconds as estimated by the search over cuts; None for plans found by local search."""
    problem: Problem
    num_draws: int

    @cached_property
    def timeline(self) -> Timeline:
        """Simulated on access, which takes as long as evaluating the plan did."""
        return execute(self.problem, self.plan, **judging(self.num_draws))
