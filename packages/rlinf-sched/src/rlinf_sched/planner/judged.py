"""A plan and what the simulator thinks of it."""

from dataclasses import dataclass

from rlinf_sched.plan import Plan
from rlinf_sched.simulator import Timeline


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
