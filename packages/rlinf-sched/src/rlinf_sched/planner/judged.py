"""A plan and what the simulator thinks of it."""

from dataclasses import dataclass

from rlinf_sched.plan import Plan
from rlinf_sched.simulator import Timeline


@dataclass(frozen=True, slots=True)
class Judged:
    """A plan without its prediction, executed by the simulator."""

    plan: Plan
    timeline: Timeline
    estimate_s: float
    """Seconds of a step as the search estimates them; of the plan that a local search began with."""

    @property
    def step_s(self) -> float:
        return self.timeline.step_s
