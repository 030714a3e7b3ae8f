"""From a problem to a plan: the search proposes, the simulator decides, and the plan says what is expected of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from rlinf_sched.errors import InfeasibleError, PlanError, ProblemError, did_you_mean
from rlinf_sched.plan import Mode, Plan, Prediction, RunnerUp, StagePlan, StagePrediction
from rlinf_sched.planner.infeasible import why_nothing_fits
from rlinf_sched.planner.pools import pools_of
from rlinf_sched.planner.search import Candidate, Search
from rlinf_sched.planner.tree import leaves, place
from rlinf_sched.problem import Problem
from rlinf_sched.simulator import Timeline, simulate

ALL_MODES: tuple[Mode, ...] = get_args(Mode)
MOST_SIMULATED, FEWEST_SIMULATED = 16, 4
"""Candidates of each mode that the simulator judges, fewer on clusters of over a thousand devices: the search takes
parts of a flow for boxes, the simulator does not."""


@dataclass(frozen=True, slots=True)
class _Judged:
    candidate: Candidate
    plan: Plan
    timeline: Timeline


def plan(problem: Problem, modes: Sequence[Mode] | None = None) -> Plan:
    """Of the search's best of each mode the one that the simulator finds shortest.

    Args:
        modes: consider only these; None: all.

    Returns:
        a plan that has passed `Plan.validate`, with `prediction` set.

    Raises:
        ProblemError, FlowError: the problem contradicts itself.
        InfeasibleError: nothing fits; says which stage, by how much, and what would make it fit.
    """
    problem.validate()
    modes = ALL_MODES if modes is None else modes
    for mode in modes:
        if mode not in ALL_MODES:
            raise PlanError(f"mode={mode!r}{did_you_mean(mode, ALL_MODES)}")
    if not modes:
        raise ProblemError(f"modes is empty; allowed: {', '.join(ALL_MODES)}")
    pools = pools_of(problem.cluster)
    num_each = max(FEWEST_SIMULATED, min(MOST_SIMULATED, 16_384 // problem.cluster.num_devices))
    candidates = Search(problem, pools).best(modes, num_each=num_each)
    if not candidates:
        raise InfeasibleError(why_nothing_fits(problem, pools, modes))
    judged = [found for candidate in candidates if (found := _judge(problem, candidate))]
    if not judged:
        raise InfeasibleError("every plan found tears a worker group's stages apart; plan one of the modes alone")
    judged.sort(key=lambda one: one.timeline.step_s)
    best = judged[0]
    others = [next(one for one in judged if one.plan.mode == mode) for mode in _modes_of(judged[1:], best)]
    return replace(
        best.plan,
        reason=_reason(best, others),
        prediction=_prediction(best, [RunnerUp(mode=o.plan.mode, step_s=o.timeline.step_s, reason="") for o in others]),
    )


def _modes_of(judged: Sequence[_Judged], best: _Judged) -> list[Mode]:
    """The other modes, best first."""
    return list(dict.fromkeys(one.plan.mode for one in judged if one.plan.mode != best.plan.mode))


def _judge(problem: Problem, candidate: Candidate) -> _Judged | None:
    made = to_plan(problem, candidate)
    return made and _Judged(candidate, made, simulate(problem, made))


def to_plan(problem: Problem, candidate: Candidate) -> Plan | None:
    """The candidate as a plan, stages ordered by turn; None where the stages of a worker group cannot be together."""
    workers = {stage.name: stage.worker for stage in problem.flow.stages}
    placed = place(candidate.tree, [list(pool.devices) for pool in pools_of(problem.cluster)], workers)
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
    result = Plan(
        flow=problem.flow.name,
        mode=candidate.mode,
        stages=tuple(sorted(stages, key=lambda stage: stage.turn)),
        reason="proposed by the search",
    )
    result.validate(problem.flow, problem.cluster)
    return result


def _reason(best: _Judged, others: Sequence[_Judged]) -> str:
    chosen_s = best.timeline.step_s
    lost = [f"{o.plan.mode} {o.timeline.step_s:.3g} s (+{o.timeline.step_s / chosen_s - 1:.0%})" for o in others]
    text = f"shortest step in simulation, {chosen_s:.3g} s"
    return f"{text}; best of the other modes: {', '.join(lost)}" if lost else text


def _prediction(judged: _Judged, runners_up: Sequence[RunnerUp]) -> Prediction:
    timeline = judged.timeline
    syncs = [timeline.end_s[i] - timeline.start_s[i] for name in timeline.stages for i in timeline.of(name, "sync")]
    return Prediction(
        step_s=timeline.step_s,
        estimate_s=judged.candidate.step_s,
        sync_s=float(sum(syncs)) / timeline.num_steps,
        stages={stage.stage: _stage_prediction(timeline, stage) for stage in judged.plan.stages},
        runners_up=tuple(runners_up),
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
