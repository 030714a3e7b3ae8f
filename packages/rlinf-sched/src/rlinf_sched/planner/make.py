"""Makes a plan for a problem: the search proposes, the simulator decides, and the plan says what is expected of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from rlinf_sched.errors import InfeasibleError, PlanError, ProblemError, did_you_mean
from rlinf_sched.plan import Mode, Plan, Prediction, RunnerUp, StagePlan, StagePrediction
from rlinf_sched.planner.infeasible import why_nothing_fits
from rlinf_sched.planner.judged import Judged, judging
from rlinf_sched.planner.local_search import Found, LocalSearch
from rlinf_sched.planner.pools import Pool, pools_of
from rlinf_sched.planner.search import Search
from rlinf_sched.planner.spots import Spot, Spots, bits_of, plan_of
from rlinf_sched.planner.tree import Candidate, leaves, place, shape
from rlinf_sched.problem import Problem
from rlinf_sched.simulator import Timeline
from rlinf_sched.simulator.simulation import execute

ALL_MODES: tuple[Mode, ...] = get_args(Mode)
MOST_SIMULATED = 16
"""Candidates of each mode that the simulator may judge."""
_WORTH = 0.998
"""Candidates whose estimate is above this part of their mode's best simulated step are not simulated: they may be as
good."""
_ITEMS_COMPARED = 20_000
"""Items, all stages together, that are simulated for each mode in any case, so that the best of several candidates is
known."""
_NEAR = 1.25
"""Local search looks around plans that take at most this multiple of the shortest step of their mode."""
_MOST_STARTS = 4
"""Plans of each mode that local search looks around."""
_PROMISING = 1.05
"""Where no single change gains any more, pairs of changes are tried around plans that take at most this multiple of the
shortest step of their mode."""
_MOST_DEVICES = 2048
"""In larger clusters a local search, which moves a few devices at a time, would take longer than the search."""
_ITEMS_SEARCHED, _LEAST_SEARCHED, _MOST_SEARCHED = 5_000, 8, 12_000
"""Items, all stages together, that local search may simulate, times the square of the flow's parallel choices (which
make plans differ in more things); and how many plans at least and at most."""
_MANY_CHOICES = 20
"""Parallel choices of a flow, from which on their square counts twice."""
_FEW_ITEMS = 128
"""All stages together: of such a step, which takes 0.1 ms to simulate, the most plans are timed."""
_CHOICES = 4
"""Parallel choices of a stage that count."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The best plan and what it was compared with."""

    plan: Plan
    """The best plan, with its prediction."""
    timeline: Timeline
    others: tuple[Judged, ...]
    """The best plan of each other mode, best first, as in `plan.prediction.runners_up`."""


def plan(problem: Problem, modes: Sequence[Mode] | None = None, *, num_draws: int = 0) -> Plan:
    """The plan with the shortest simulated step that was found.

    Args:
        modes: only these; None: all. What is looked at is the same whatever the modes, so no mode planned alone gives a
            shorter step than all together.
        num_draws: 0 judges plans by one step with typical costs. A number judges them by the mean of so many steps with
            drawn costs (`simulate` with seed 0): where few items are unequal, other plans are shorter then. It takes
            about so many times as long.

    Returns:
        a plan that has passed `Plan.validate`, with `prediction` set.

    Raises:
        ProblemError, FlowError: the problem contradicts itself.
        InfeasibleError: nothing fits; says which stage, by how much, and what would make it fit.
    """
    return plan_and_compare(problem, modes, num_draws=num_draws).plan


def plan_and_compare(problem: Problem, modes: Sequence[Mode] | None = None, *, num_draws: int = 0) -> Planned:
    """Plans as `plan` does, and keeps the timelines of the plan and of the best of the other modes."""
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
    candidates: dict[Mode, list[Candidate]] = {mode: search.best([mode], num_each=MOST_SIMULATED) for mode in ALL_MODES}
    if not any(candidates[mode] for mode in modes):
        raise InfeasibleError(why_nothing_fits(problem, pools, modes))
    best = _best_of_modes(problem, pools, candidates, num_draws)
    bound = f"; the search kept at most {search.most_rows} candidates of a part" if search.was_thinned else ""
    judged = [_judged(problem, best[mode], num_draws) for mode in modes if mode in best]
    if not judged:
        raise InfeasibleError("every plan found tears a worker group's stages apart; plan one of the modes alone")
    chosen, *others = sorted(judged, key=lambda one: one.step_s)
    prediction = _prediction(chosen, others, num_draws)
    reasoned = replace(chosen.plan, reason=_reason(chosen, others) + bound, prediction=prediction)
    return Planned(reasoned, chosen.timeline, tuple(others))


def _best_of_modes(
    problem: Problem, pools: Sequence[Pool], candidates: Mapping[Mode, Sequence[Candidate]], num_draws: int
) -> Mapping[Mode, Found]:
    """The best plan of each mode among the candidates that are worth it, and what local search makes of the best of
    each mode and of each way to share devices: first by single changes, then, around the best, by pairs."""
    around = LocalSearch(problem, pools, num_plans=MOST_SIMULATED * len(candidates), num_draws=num_draws)
    starts = [one for of_mode in candidates.values() for one in _simulated(problem, pools, around, of_mode)]
    if problem.cluster.num_devices > _MOST_DEVICES or not starts:
        return around.best
    around.num_left = affordable_plans(problem)
    is_short = around.num_left < _MOST_SEARCHED
    starts += around.regrouped(min(starts, key=lambda found: found.rank))
    nearer: list[Found] = []
    for mode, best in sorted(around.best.items(), key=lambda item: item[1].rank):
        shapes: dict[object, Found] = {}
        for found in sorted(starts, key=lambda found: found.rank):
            if found.mode == mode and found.step_s <= _NEAR * best.step_s:
                shapes.setdefault(found.sharing, found)
        nearer += [around.descend(found, in_turn=is_short) for found in list(shapes.values())[:_MOST_STARTS]]
    for found in dict.fromkeys(sorted(nearer, key=lambda found: found.rank)):
        if found.step_s <= _PROMISING * around.best[found.mode].step_s:
            around.improve(found)
    return around.best


def affordable_plans(problem: Problem) -> int:
    """How many plans local search may time."""
    num_items = problem.num_items * len(problem.flow.stages)
    if num_items <= _FEW_ITEMS:
        return _MOST_SEARCHED
    num_choices = sum(min(_CHOICES, len(problem.profile(stage.name).instances)) for stage in problem.flow.stages)
    more = max(1, num_choices / _MANY_CHOICES) ** 2
    return min(max(int(_ITEMS_SEARCHED * num_choices**2 * more) // num_items, _LEAST_SEARCHED), _MOST_SEARCHED)


def _simulated(
    problem: Problem, pools: Sequence[Pool], around: LocalSearch, candidates: Sequence[Candidate]
) -> list[Found]:
    """Simulates candidates of one mode: some, those that may be better than the best so far, and near ones of each way
    to share devices."""
    few = max(1, min(4, _ITEMS_COMPARED // (problem.num_items * len(problem.flow.stages))))
    result: list[Found] = []
    shapes: set[object] = set()
    best_s = np.inf
    for candidate in candidates:
        is_known = shape(candidate.tree) in shapes or candidate.step_s > _NEAR * best_s
        if len(result) >= few and candidate.step_s > _WORTH * best_s and is_known:
            continue
        shapes.add(shape(candidate.tree))
        spots = spots_of_candidate(problem, pools, candidate)
        found = None if spots is None else around.time(spots, candidate.step_s)
        if found is not None:
            result.append(found)
            best_s = min(best_s, found.step_s)
    return result


def _judged(problem: Problem, found: Found, num_draws: int) -> Judged:
    made = plan_of(problem, found.spots, found.mode, "shortest step in simulation")
    made.validate(problem.flow, problem.cluster)
    return Judged(made, execute(problem, made, **judging(num_draws)), found.estimate_s)


def spots_of_candidate(problem: Problem, pools: Sequence[Pool], candidate: Candidate) -> Spots | None:
    """Where and how the candidate's stages run; None where the stages of a worker group cannot be together."""
    workers = {stage.name: stage.worker for stage in problem.flow.stages}
    placed = place(candidate.tree, [list(pool.devices) for pool in pools], workers)
    if placed is None:
        return None
    in_cycle = {name for cycle in problem.flow.cycles() for name in cycle}  # where 0, the end of the batch, never comes
    spots = {}
    for leaf in leaves(candidate.tree):
        is_whole = leaf.granularity >= problem.num_items and leaf.stage not in in_cycle
        granularity = 0 if is_whole else leaf.granularity
        spots[leaf.stage] = Spot(bits_of(placed[leaf.stage]), leaf.num_instances, granularity, leaf.offload)
    return tuple(spots[stage.name] for stage in problem.flow.stages)


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
    before = steps - 1 - timeline.max_staleness  # whose end lets a step begin
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
