"""Predicted and measured times of every stage, for each plan of a run: plan_times.json."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rlinf.run_folder import RunFolder
from rlinf.run_folder.folder import PROBLEM
from rlinf_sched import Plan, Problem, simulate
from rlinf_workers import COMPUTE_SPAN, FlowRun

RECENT_STEPS = 1000
"""Number of steps whose times are kept; a run may have millions."""


def _recent() -> deque[float]:
    return deque(maxlen=RECENT_STEPS)


def busy_seconds(run: FlowRun) -> dict[str, float]:
    """Stage -> seconds of computation of its busiest rank."""
    by_rank: dict[tuple[str, str], float] = defaultdict(float)
    for span in run.spans:
        if span.category == COMPUTE_SPAN:
            by_rank[span.name, span.worker] += span.duration_s
    busiest: dict[str, float] = {}
    for (stage, _), seconds in by_rank.items():
        busiest[stage] = max(seconds, busiest.get(stage, 0.0))
    return busiest


@dataclass(kw_only=True)
class PlanTimes:
    """The measured and predicted times of one plan."""

    plan: Plan
    problem: Problem | None
    """The problem from which times are predicted; may be replaced. None: nothing was predicted."""
    first_step: int
    _predicted: tuple[Problem, float] | None = None
    """Cached: a problem and the prediction from it, which is slow to compute."""
    _num_steps: int = 0
    _steps_s: deque[float] = field(default_factory=_recent)
    _stages_s: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(_recent))

    def add(self, run: FlowRun, busy_s: Mapping[str, float]) -> None:
        """Adds a training step under the plan."""
        self._num_steps += 1
        self._steps_s.append(run.duration_s)
        for stage, seconds in busy_s.items():
            self._stages_s[stage].append(seconds)

    @property
    def predicted_s(self) -> float | None:
        """Predicted duration of a step; None if nothing was predicted."""
        if self.problem is None:
            return None
        if self._predicted is None or self._predicted[0] is not self.problem:
            self._predicted = self.problem, simulate(self.problem, self.plan).step_s
        return self._predicted[1]

    @property
    def expected_s(self) -> float | None:
        """Expected duration of a step: the larger of the prediction and of earlier steps; None before the first step if
        nothing was predicted."""
        estimates = [seconds for seconds in (self.predicted_s, _median(self._steps_s)) if seconds is not None]
        return max(estimates, default=None)

    def to_json(self) -> dict[str, Any]:
        """Medians over the last `RECENT_STEPS` steps; seconds. `predicted_s` is null if nothing was predicted."""
        expected = self.problem and simulate(self.problem, self.plan)
        return {
            "mode": self.plan.mode,
            "reason": self.plan.reason,
            "first_step": self.first_step,
            "num_steps": self._num_steps,
            "step": {"predicted_s": expected and expected.step_s, "measured_s": _median(self._steps_s)},
            "stages": {
                name: {
                    "predicted_s": expected and expected.busiest_s(name, "compute", "step"),
                    "measured_s": _median(self._stages_s[name]),
                }
                for name in (placed.stage for placed in self.plan.stages)
            },
        }


class PlanHistory:
    """The times of every plan of a run; writes problem.json and plan_times.json."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._times: list[PlanTimes] = []

    @property
    def present(self) -> PlanTimes:
        """Times of the current plan."""
        return self._times[-1]

    def begin(self, plan: Plan, problem: Problem | None, step: int) -> None:
        """Starts recording another plan, or other predictions; `step` counts the steps done."""
        self._write_problem(problem)
        self._times.append(PlanTimes(plan=plan, problem=problem, first_step=step))

    def keep(self, plan: Plan, problem: Problem | None, step: int) -> None:
        """Continues with the same plan, perhaps with other predictions."""
        if self.present.problem is None:
            self.begin(plan, problem, step)  # the steps so far were measured under probe plans
        elif problem is not None and problem is not self.present.problem:
            self._write_problem(problem)
            self.present.problem = problem

    def resume_at(self, step: int) -> None:
        """Sets the first step of the current plan, which was started before the checkpoint was read."""
        for times in self._times[-1:]:
            times.first_step = step

    def clear(self) -> None:
        """Forgets all plans, when the run returns to its checkpoint."""
        self._times = []

    def write(self) -> None:
        self._folder.write_plan_times([times.to_json() for times in self._times])

    def _write_problem(self, problem: Problem | None) -> None:
        if problem is not None:
            self._folder.write(PROBLEM, problem.to_json())


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
