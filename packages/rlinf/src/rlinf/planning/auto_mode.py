"""Mode auto: measures the first steps of a run, lets the planner make a plan from them, and plans again if times drift.

Results do not depend on the plan, so steps under probe plans train like any others and nothing is run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from rlinf.errors import UserError
from rlinf.jobs.base import Flows, Job
from rlinf.planning.plans import (
    RunPlans,
    as_run,
    complete_problem,
    moved_stages,
    plans_of_problem,
    steps_ahead,
)
from rlinf_sched import DriftDetector, DriftMonitor, Plan, Problem, SchedError, index_ranges
from rlinf_workers import Executor, FlowRun, Measured, Profiler, probe_plans

NUM_REPEATS = 3
"""Measured steps for each probe plan, after one warm-up step."""
NOISE_OF_SPREAD = 1.48
"""Ratio of standard deviation to median absolute deviation for normal noise."""
LEAST_SHARE = 0.02
"""Share of the step's time below which a stage is not watched for drift."""


class AutoMode:
    """The plan of one run, from step to step.

    Args:
        planned: the plans with which the run begins.
        tell: prints a line for the user.
    """

    def __init__(self, job: Job, flows: Flows, planned: RunPlans, tell: Callable[[str], None]) -> None:
        self._job, self._flows, self._tell = job, flows, tell
        self._profiler = Profiler(flows.train.graph(), planned.cluster, job.num_items)
        self.probes: list[Plan] = []
        """The plans of the steps that are still to be measured before planning."""
        self._is_warm = False
        """A step was run under a probe plan, and its measurements have not been read yet."""
        self._drifted: dict[str, float] = {}
        """Stage -> its duration relative to that at the time of planning."""
        self.measured: Measured | None = None
        """What the probes found."""
        if job.config.mode == "auto" and planned.problem is None:
            self.begin_probes(planned)
        else:
            self._adopt(planned)
            if job.config.mode == "auto" and (text := self._overlap_text(self.plan)):
                tell(f"auto: {self.plan.mode}{text}")

    def _adopt(self, planned: RunPlans) -> None:
        """Makes these plans the current ones."""
        graph = self._flows.train.graph()
        if planned.problem is not None and graph.max_staleness:
            problem = as_run(planned.problem, planned.plans[self._flows.train.name], graph)
            planned = replace(planned, problem=problem)
        self._planned = planned
        self._watch = None
        if planned.problem is not None:
            noise = DriftDetector().first_noise
            if self.measured is not None:
                noise = max(noise, *(NOISE_OF_SPREAD * fit.spread for fit in self.measured.fits.values()))
            self._watch = DriftMonitor(
                problem=planned.problem, plan=self.plan, detector=DriftDetector(first_noise=noise)
            )

    @property
    def plan(self) -> Plan:
        """The plan of the training flow, without what a probe changes."""
        return self._planned.plans[self._flows.train.name]

    @property
    def overlaps(self) -> bool:
        """Whether the next steps may overlap: not while a placement is measured."""
        return not self.probes and steps_ahead(self.plan, self._flows.train.graph()) > 0

    @property
    def problem(self) -> Problem | None:
        """What is predicted from; None before anything is measured."""
        return self._planned.problem

    # -- measuring ---------------------------------------------------------------------------------------------------

    def begin_probes(self, planned: RunPlans) -> None:
        """Lets the next steps measure this placement, too."""
        self._adopt(planned)
        self.probes, self._is_warm = self.probes_of(planned), False

    def probes_of(self, planned: RunPlans) -> list[Plan]:
        """The plans of the steps that measure a placement."""
        plan = planned.plans[self._flows.train.name]
        probes = probe_plans(self._flows.train.graph(), plan, self._job.num_items)
        return [probes[0], *probes * NUM_REPEATS]

    def fit_into(self, num_steps: int) -> None:
        """Skips the measurement if too few steps are left for it."""
        if 0 < len(self.probes) >= num_steps:
            what = f"measuring takes {len(self.probes)} steps, and the run has {num_steps} left"
            self._tell(f"auto: {self.plan.mode} stays: {what}")
            self.probes, self._is_warm = [], False

    def observe(self, run: FlowRun, busy_s: Mapping[str, float]) -> bool:
        """Records a training step.

        Args:
            busy_s: stage -> seconds of computation of its busiest rank.

        Returns:
            whether to plan now, because the measurement is complete or a stage has drifted.
        """
        if self.probes:
            probe = self.probes.pop(0)
            if self._is_warm:
                self._profiler.observe(run, probe)
            self._is_warm = True
            return not self.probes
        if self._watch is None or self._job.config.mode != "auto" or self.overlaps:
            return False  # another plan would make steps that overlap pause, and the numbers depend on time
        least_s = LEAST_SHARE * self._watch.step_s
        drifted = self._watch.observe({stage: seconds for stage, seconds in busy_s.items() if seconds > least_s})
        for stage, factor in drifted.items():
            self._watch.rescale(stage, factor)
            self._drifted[stage] = self._drifted.get(stage, 1.0) * factor
        return bool(drifted)

    def measure(self, executor: Executor) -> Measured:
        """What the probes found."""
        self._is_warm = False
        self._profiler.observe_memory(executor, self.plan)
        measured = self._profiler.measured()
        self.measured = replace(measured, problem=complete_problem(self._job, measured.problem))
        return self.measured

    # -- deciding ----------------------------------------------------------------------------------------------------

    def better(self, executor: Executor, *, num_steps: int, move_s: float) -> RunPlans | None:
        """Plans that save time within the remaining steps; call `take` when the run goes on under them. None: the
        current plans stay.

        Args:
            executor: runs the flow; provides what the probes did not measure.
            move_s: seconds to start the workers that a plan moves, at most those of the first start.
        """
        stays = f"auto: {self.plan.mode} stays"
        try:
            if self._is_warm or self._watch is None:
                problem = self.measure(executor).problem
            else:
                problem = self._watch.problem
            self._adopt(replace(self._planned, problem=problem))
            run_plans = plans_of_problem(self._job, self._flows, problem)
        except (UserError, SchedError) as error:
            self._tell(f"{stays}: {error}")
            return None
        assert self._watch is not None, "there is a problem"
        now_s = self._watch.step_s
        plan = run_plans.plans[self._flows.train.name]
        assert plan.prediction is not None, "the planner predicts"
        gain_s = (now_s - plan.prediction.step_s) * num_steps
        cost_s = move_s if moved_stages(self.plan, plan) else 0.0
        other = plan.mode if plan.mode != self.plan.mode else f"another {plan.mode} plan"
        if gain_s <= cost_s:
            moving = f", and moving there {cost_s:.0f} s" if gain_s > 0 else ""
            takes = f"; {other} takes {plan.prediction.step_s:.3g} s{moving}" if plan != self.plan else ""
            if not self._drifted:  # what drifts and changes nothing is for plan_times.json alone
                self._tell(f"{stays}, {now_s:.3g} s a step{takes}")
            return None
        drifts = "".join(f"; {stage} takes {factor:.2g} times what it did" for stage, factor in self._drifted.items())
        self._drifted = {}
        self._tell(
            f"auto: goes on with {other}: {plan.prediction.step_s:.3g} s a step instead of {now_s:.3g}{drifts}"
            f"{self._overlap_text(plan)}"
        )
        return run_plans

    def take(self, run_plans: RunPlans) -> None:
        """Makes the plans of `better` the current ones. Stages for which the prediction assumes another number of ranks
        than was measured are measured there next."""
        if self._profiler.has_seen(run_plans.plans[self._flows.train.name]):
            self._adopt(run_plans)
        else:
            self.begin_probes(run_plans)

    def _overlap_text(self, plan: Plan) -> str:
        """How steps overlap under the plan; empty if they do not."""
        graph = self._flows.train.graph()
        if not (ahead := steps_ahead(plan, graph)):
            return ""
        places = "; ".join(
            f"{stage.stage} on device{'s' if len(stage.devices) > 1 else ''} {index_ranges(stage.devices)}, "
            f"{stage.granularity or 'all'} items at a time"
            for stage in plan.stages
            if stage.devices
        )
        bound = f", of at most {graph.max_staleness}" if graph.max_staleness > 1 else ""
        return f"; its steps overlap ({ahead} step{'s' if ahead > 1 else ''} ahead{bound}): {places}"
