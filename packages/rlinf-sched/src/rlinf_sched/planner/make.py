"""Makes a plan for a problem: the search proposes, the simulator decides, and the plan contains the prediction."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlinf_sched.errors import InfeasibleError, PlanError, ProblemError, did_you_mean
from rlinf_sched.plan import ALL_MODES, Mode, Plan, Prediction, RunnerUp, StagePlan, StagePrediction
from rlinf_sched.planner.improvement import candidates_of, improved
from rlinf_sched.planner.infeasible import why_nothing_fits
from rlinf_sched.planner.judged import Judged
from rlinf_sched.planner.local_search import Found
from rlinf_sched.planner.placements import plan_of
from rlinf_sched.planner.pools import pools_of
from rlinf_sched.planner.search import Search
from rlinf_sched.problem import Problem
from rlinf_sched.simulator import Timeline


@dataclass(frozen=True, slots=True)
class Planned:
    """The best plan and the plans it was compared with."""

    plan: Plan
    """The best plan, with its prediction."""
    timeline: Timeline
    others: tuple[Judged, ...]
    """The best plan of each other mode, best first, as in `best_plan.prediction.runners_up`."""


def best_plan(problem: Problem, modes: Sequence[Mode] | None = None, *, num_draws: int = 0) -> Plan:
    """The plan with the shortest simulated step that was found.

    Args:
        modes: allowed modes; None: all. The search is the same for all modes, so planning one mode alone never gives a
            shorter step than planning all together.
        num_draws: 0 compares plans by one step with typical costs. A number compares them by the mean of this many
            steps with drawn costs (`simulate` with seed 0), which favors other plans if few items have unequal costs.
            Takes about this many times as long.

    Returns:
        a plan that passes `Plan.validate`, with `prediction` set.

    Raises:
        ProblemError, FlowError: the problem is inconsistent.
        InfeasibleError: nothing fits; the message names the stage, the shortage, and what would make it fit.
    """
    return plan_and_compare(problem, modes, num_draws=num_draws).plan


def plan_and_compare(problem: Problem, modes: Sequence[Mode] | None = None, *, num_draws: int = 0) -> Planned:
    """Plans like `best_plan`; also returns the timelines of the plan and of the best plans of the other modes."""
    problem.validate()
    modes = ALL_MODES if modes is None else modes
    for mode in modes:
        if mode not in ALL_MODES:
            raise PlanError(f"mode={mode!r}{did_you_mean(mode, ALL_MODES)}")
    if not modes:
        raise ProblemError(f"modes is empty; allowed: {', '.join(ALL_MODES)}")
    if num_draws < 0:
        raise ProblemError(f"num_draws={num_draws} must be 0 (typical costs) or more")
    pools = pools_of(problem.cluster)
    search = Search(problem, pools)
    candidates = candidates_of(search)
    if not any(candidates[mode] for mode in modes):
        raise InfeasibleError(why_nothing_fits(problem, pools, modes))
    best = improved(problem, pools, candidates, num_draws).best
    bound = f"; the search kept at most {search.most_rows} candidates of a part" if search.was_thinned else ""
    judged = [_judged(problem, best[mode], num_draws) for mode in modes if mode in best]
    if not judged:
        raise InfeasibleError("every plan found separates a worker group's stages; plan one of the modes alone")
    chosen, *others = sorted(judged, key=lambda one: one.step_s)
    prediction = _prediction(chosen, others, num_draws)
    reasoned = replace(chosen.plan, reason=_reason(chosen, others) + bound, prediction=prediction)
    return Planned(reasoned, chosen.timeline, tuple(others))


def _judged(problem: Problem, best: Found, num_draws: int) -> Judged:
    plan = plan_of(problem, best.placements, best.mode, "shortest step in simulation")
    plan.validate(problem.flow, problem.cluster)
    return Judged(plan, best.step_s, best.estimate_s, problem, num_draws)


def _reason(best: Judged, others: Sequence[Judged]) -> str:
    lost = [f"{o.plan.mode} {o.step_s:.3g} s (+{o.step_s / best.step_s - 1:.0%})" for o in others]
    text = f"shortest step in simulation, {best.step_s:.3g} s"
    return f"{text}; best of the other modes: {', '.join(lost)}" if lost else text


def _prediction(best: Judged, others: Sequence[Judged], num_draws: int) -> Prediction:
    timeline = best.timeline
    syncs = [timeline.end_s[i] - timeline.start_s[i] for name in timeline.stages for i in timeline.of(name, "sync")]
    return Prediction(
        step_s=timeline.step_s,
        estimate_s=best.estimate_s,
        sync_s=float(sum(syncs)) / timeline.num_steps,
        stages={stage.stage: _stage_prediction(timeline, stage) for stage in best.plan.stages},
        runners_up=tuple(RunnerUp(mode=o.plan.mode, step_s=o.step_s, reason="") for o in others),
        max_staleness=timeline.max_staleness,
        num_draws=num_draws,
    )


def _stage_prediction(timeline: Timeline, stage: StagePlan) -> StagePrediction:
    """The mean over the steps that have settled."""
    steps = np.arange(timeline.first_settled, timeline.num_steps)
    before = steps - 1 - timeline.max_staleness  # the step whose end lets this one begin
    begin_s = np.where(before < 0, 0.0, timeline.step_end_s[before])

    compute = timeline.of(stage.stage)
    compute = compute[timeline.step[compute] >= steps[0]]
    start_s, end_s = np.full(len(steps), np.inf), np.zeros(len(steps))
    np.minimum.at(start_s, timeline.step[compute] - steps[0], timeline.start_s[compute])
    np.maximum.at(end_s, timeline.step[compute] - steps[0], timeline.end_s[compute])
    return StagePrediction(
        start_s=float((start_s - begin_s).mean()),
        end_s=float((end_s - begin_s).mean()),
        busy_s=timeline.busiest_s(stage.stage, "compute", "step"),
        switch_s=timeline.busiest_s(stage.stage, "onload", "offload"),
        peak_bytes=max((timeline.memory(device).peak_bytes for device in stage.devices[:1]), default=0),
    )
