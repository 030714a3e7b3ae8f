"""From a problem to the plan that the search likes best, with predictions and what the other modes would have given."""

from collections.abc import Sequence
from typing import get_args

from rlinf_sched.errors import InfeasibleError, PlanError, did_you_mean
from rlinf_sched.plan import Mode, Plan, Prediction, RunnerUp, StagePlan
from rlinf_sched.planner.pools import pools_of
from rlinf_sched.planner.search import Candidate, Search
from rlinf_sched.planner.tree import leaves, place
from rlinf_sched.problem import Problem

ALL_MODES: tuple[Mode, ...] = get_args(Mode)


def plan(problem: Problem, modes: Sequence[Mode] = ALL_MODES) -> Plan:
    """The best plan of the given modes.

    Returns:
        a plan that has passed `Plan.validate`, with `prediction` set.

    Raises:
        ProblemError, FlowError: the problem contradicts itself.
        InfeasibleError: nothing fits; says what is missing.
    """
    problem.validate()
    for mode in modes:
        if mode not in ALL_MODES:
            raise PlanError(f"mode={mode!r}{did_you_mean(mode, ALL_MODES)}")
    pools = pools_of(problem.cluster)
    candidates = Search(problem, pools).best(modes)
    if not candidates:
        raise InfeasibleError("no plan fits")
    best = candidates[0]
    return to_plan(problem, best, reason="least predicted step time", others=candidates[1:])


def to_plan(problem: Problem, candidate: Candidate, *, reason: str, others: Sequence[Candidate] = ()) -> Plan:
    """The candidate as a plan, its stages ordered by turn."""
    pools = pools_of(problem.cluster)
    placed = place(candidate.tree, [list(pool.devices) for pool in pools])
    turns = {name: turn for turn, names in enumerate(problem.flow.turns()) for name in names}
    stages = [
        StagePlan(
            stage=leaf.stage,
            devices=placed[leaf.stage],
            num_ranks=leaf.num_instances,
            granularity=0 if leaf.granularity >= problem.num_items else leaf.granularity,
            offload=leaf.offload,
            turn=turns[leaf.stage],
        )
        for leaf in leaves(candidate.tree)
    ]
    result = Plan(
        flow=problem.flow.name,
        mode=candidate.mode,
        stages=tuple(sorted(stages, key=lambda stage: stage.turn)),
        reason=reason,
        prediction=Prediction(
            step_s=candidate.step_s,
            sync_s=candidate.sync_s,
            stages={},
            runners_up=tuple(RunnerUp(mode=c.mode, step_s=c.step_s, reason="") for c in others),
        ),
    )
    result.validate(problem.flow, problem.cluster)
    return result
