"""Makes a plan for a problem: the search proposes, the simulator decides, and the plan says what is expected of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from rlinf_sched.errors import InfeasibleError, PlanError, ProblemError, did_you_mean
from rlinf_sched.plan import Mode, Plan, Prediction, RunnerUp, StagePlan, StagePrediction
from rlinf_sched.planner.infeasible import why_nothing_fits
from rlinf_sched.planner.judged import Judged
from rlinf_sched.planner.local_search import LocalSearch
from rlinf_sched.planner.pools import Pool, pools_of
from rlinf_sched.planner.search import Search
from rlinf_sched.planner.tree import Candidate, leaves, place, shape
from rlinf_sched.problem import Problem
from rlinf_sched.simulator import Timeline
from rlinf_sched.simulator.simulation import execute
from rlinf_sched.stage_time import items_at_once

ALL_MODES: tuple[Mode, ...] = get_args(Mode)
MOST_SIMULATED = 16
"""Candidates of each mode that the simulator may judge."""
_WORTH = 0.998
"""Candidates whose estimate is above this part of the best simulated step are not simulated: they may be as good."""
_ITEMS_COMPARED = 20_000
"""Items, all stages together, that are simulated for each mode in any case, so that the best of several candidates is
known however short the plans of other modes are."""
_NEAR = 1.25
"""Local search looks around the best plan of each mode that takes at most this multiple of the shortest step."""
_MOST_STARTS = 6
_MOST_DEVICES = 2048
"""Local search counts devices one by one; in larger clusters it would take longer than the search."""
_ITEMS_SEARCHED, _LEAST_SEARCHED, _MOST_SEARCHED = 120_000, 24, 300
"""Items, all stages together, that local search may simulate, and how many plans at least and at most."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The best plan and what it was compared with."""

    plan: Plan
    """The best plan, with its prediction."""
    timeline: Timeline
    others: tuple[Judged, ...]
    """The best plan of each other mode, best first, as in `plan.prediction.runners_up`."""


def plan(problem: Problem, modes: Sequence[Mode] | None = None) -> Plan:
    """The plan with the shortest simulated step among the search's best plans of each mode.

    Args:
        modes: consider only these; None: all.

    Returns:
        a plan that has passed `Plan.validate`, with `prediction` set.

    Raises:
        ProblemError, FlowError: the problem contradicts itself.
        InfeasibleError: nothing fits; says which stage, by how much, and what would make it fit.
    """
    return plan_and_compare(problem, modes).plan


def plan_and_compare(problem: Problem, modes: Sequence[Mode] | None = None, *, each_alone: bool = False) -> Planned:
    """Plans as `plan` does, and keeps the timelines of the plan and of the best of the other modes.

    Args:
        each_alone: search each mode on its own too. A search for the best of all drops plans of a mode once another
            mode beats them, so the one that it compares with need not be the best of its mode.
    """
    problem.validate()
    modes = ALL_MODES if modes is None else modes
    for mode in modes:
        if mode not in ALL_MODES:
            raise PlanError(f"mode={mode!r}{did_you_mean(mode, ALL_MODES)}")
    if not modes:
        raise ProblemError(f"modes is empty; allowed: {', '.join(ALL_MODES)}")
    pools = pools_of(problem.cluster)
    searches = [modes, *([mode] for mode in modes if each_alone and len(modes) > 1)]
    search = Search(problem, pools)
    found = [search.best(some, num_each=MOST_SIMULATED) for some in searches]
    if not any(found):
        raise InfeasibleError(why_nothing_fits(problem, pools, modes))
    judged = [
        one
        for some, candidates in zip(searches, found, strict=True)
        for one in _improved(problem, pools, some, _judge(problem, pools, candidates))
    ]
    judged.sort(key=_step_s)
    if not judged:
        raise InfeasibleError("every plan found tears a worker group's stages apart; plan one of the modes alone")
    best, *rest = judged
    others = {one.plan.mode: one for one in reversed(rest) if one.plan.mode != best.plan.mode}
    runners_up = tuple(sorted(others.values(), key=lambda one: one.step_s))
    best.plan.validate(problem.flow, problem.cluster)
    chosen = replace(best.plan, reason=_reason(best, runners_up), prediction=_prediction(best, runners_up))
    return Planned(chosen, best.timeline, runners_up)


def _judge(problem: Problem, pools: Sequence[Pool], candidates: Sequence[Candidate]) -> list[Judged]:
    """Simulates candidates, best first: some of each mode, and those that may be better than the best so far."""
    few = max(1, min(4, _ITEMS_COMPARED // (problem.num_items * len(problem.flow.stages))))
    result: list[Judged] = []
    shapes: set[object] = set()
    best_s = np.inf
    for candidate in sorted(candidates, key=lambda one: (float(f"{one.step_s:.6g}"), _busy_s(problem, one))):
        num_alike = sum(one.plan.mode == candidate.mode for one in result)
        is_known = shape(candidate.tree) in shapes or candidate.step_s > _NEAR * best_s
        if num_alike >= few and candidate.step_s > _WORTH * best_s and is_known:
            continue
        shapes.add(shape(candidate.tree))
        made = to_plan(problem, pools, candidate)
        if made is None or any(made.stages == one.plan.stages for one in result):
            continue
        result.append(Judged(made, execute(problem, made), candidate.step_s))
        best_s = min(best_s, result[-1].step_s)
    return result


def _improved(problem: Problem, pools: Sequence[Pool], modes: Sequence[Mode], judged: list[Judged]) -> list[Judged]:
    """The plans, and what local search makes of the best of each mode and of each way to share devices, where it may
    yet become the best."""
    if not judged or problem.cluster.num_devices > _MOST_DEVICES:
        return judged
    num_items = problem.num_items * len(problem.flow.stages)
    most = min(max(_ITEMS_SEARCHED // num_items, _LEAST_SEARCHED), _MOST_SEARCHED)
    around = LocalSearch(problem, pools, modes, most_simulated=most)
    starts: dict[object, Judged] = {}
    for one in sorted([*judged, *around.regrouped(min(judged, key=_step_s))], key=_step_s):
        starts.setdefault((one.plan.mode, tuple(one.plan.shared_devices().values())), one)
    near = [one for one in starts.values() if one.step_s <= _NEAR * next(iter(starts.values())).step_s]
    found = [(one, around.improve(one)) for one in near[:_MOST_STARTS]]
    return [*judged, *(last for first, last in found if last.plan != first.plan)]


def _step_s(one: Judged) -> float:
    """For comparisons: what differs by rounding is equal."""
    return float(f"{one.step_s:.9g}")


def _busy_s(problem: Problem, candidate: Candidate) -> list[float]:
    """Seconds that each stage computes, the busiest first: of plans that the search finds equal, the one whose next
    bottleneck has most to spare comes first."""
    seconds = []
    for leaf in leaves(candidate.tree):
        profile = problem.profile(leaf.stage)
        instance = profile.instances[leaf.choice]
        size = items_at_once(
            instance,
            profile.batching,
            num_items=problem.num_items,
            num_instances=leaf.num_instances,
            granularity=leaf.granularity,
        )
        seconds.append(instance.seconds(size) * problem.num_items / (size * leaf.num_instances))
    return sorted(seconds, reverse=True)


def to_plan(problem: Problem, pools: Sequence[Pool], candidate: Candidate) -> Plan | None:
    """The candidate as a plan, stages ordered by turn; None where the stages of a worker group cannot be together."""
    workers = {stage.name: stage.worker for stage in problem.flow.stages}
    placed = place(candidate.tree, [list(pool.devices) for pool in pools], workers)
    if placed is None:
        return None
    turns = {name: turn for turn, names in enumerate(problem.flow.turns()) for name in names}
    in_cycle = {name for cycle in problem.flow.cycles() for name in cycle}  # where 0, the end of the batch, never comes
    stages = [
        StagePlan(
            stage=leaf.stage,
            devices=placed[leaf.stage],
            num_ranks=leaf.num_instances,
            granularity=0 if leaf.granularity >= problem.num_items and leaf.stage not in in_cycle else leaf.granularity,
            offload=leaf.offload,
            turn=turns[leaf.stage],
        )
        for leaf in leaves(candidate.tree)
    ]
    return Plan(
        flow=problem.flow.name,
        mode=candidate.mode,
        stages=tuple(sorted(stages, key=lambda stage: stage.turn)),
        reason="proposed by the search",
    )


def _reason(best: Judged, others: Sequence[Judged]) -> str:
    lost = [f"{o.plan.mode} {o.step_s:.3g} s (+{o.step_s / best.step_s - 1:.0%})" for o in others]
    text = f"shortest step in simulation, {best.step_s:.3g} s"
    return f"{text}; best of the other modes: {', '.join(lost)}" if lost else text


def _prediction(best: Judged, others: Sequence[Judged]) -> Prediction:
    timeline = best.timeline
    syncs = [timeline.end_s[i] - timeline.start_s[i] for name in timeline.stages for i in timeline.of(name, "sync")]
    return Prediction(
        step_s=timeline.step_s,
        estimate_s=best.estimate_s,
        sync_s=float(sum(syncs)) / timeline.num_steps,
        stages={stage.stage: _stage_prediction(timeline, stage) for stage in best.plan.stages},
        runners_up=tuple(RunnerUp(mode=o.plan.mode, step_s=o.step_s, reason="") for o in others),
        max_staleness=timeline.max_staleness,
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
