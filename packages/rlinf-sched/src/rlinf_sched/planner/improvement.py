"""Improves the plans proposed by the search over cuts, by simulation and local search.

The strategy of local search depends on how many plans it can time. For a small step: all single changes and pairs of
changes; for a medium one: single changes, and walks that also accept longer steps; for a large one: the best plans of a
part of the cluster (coarse.py), and changes from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlinf_sched.plan import ALL_MODES, Mode
from rlinf_sched.planner.coarse import coarsened, refined
from rlinf_sched.planner.local_search import Found, LocalSearch
from rlinf_sched.planner.placements import Placements, StagePlacement, bits_of
from rlinf_sched.planner.pools import Pool, pools_of
from rlinf_sched.planner.search import Search
from rlinf_sched.planner.tree import Candidate, leaves, place, shape
from rlinf_sched.problem import Problem
from rlinf_sched.simulator.lowering import num_steps_of

MOST_SIMULATED = 16
"""Maximum number of candidates of each mode that are simulated."""
_WORTH = 0.998
"""Candidates whose estimate exceeds this fraction of their mode's best simulated step are not simulated, because they
may be as good."""
_ITEMS_COMPARED = 20_000
"""Total items over all stages that are always simulated per mode, so that the best of several candidates is found."""
_NEAR = 1.25
"""Local search starts from plans whose step is at most this multiple of the shortest of their mode."""
_MOST_STARTS = 4
"""Maximum number of starts per mode."""
_PROMISING = 1.05
"""When no single change helps, pairs of changes are tried from plans whose step is at most this multiple of the
shortest of their mode."""
_MOST_DEVICES = 2048
"""In larger clusters a local search, which moves a few devices at a time, would take longer than the search."""
_ITEMS_SEARCHED, _LEAST_SEARCHED, _MOST_SEARCHED = 5_000, 8, 12_000
"""Total items over all stages that local search may simulate for large steps, scaled by the square of the flow's number
of parallelisms (which make plans differ in more things); the minimum number of plans, and the number for small
steps."""
_MEDIUM_ITEMS, _MEDIUM_POWER = 2_000, 2.5
"""Items of a step up to which the maximum number of plans is timed, and the exponent with which it falls for larger
ones."""
_MANY_CHOICES = 20
"""Number of parallelisms of a flow from which its square counts twice."""
_FEW_ITEMS = 128
"""Total items of a step that takes 0.1 ms to simulate, for which the maximum number of plans is timed."""
_COARSER, _LEAST_COARSE = 8, 64
"""Factor by which a large cluster is reduced for a first search, and the minimum number of devices of the reduced
one."""
_NUM_ELITE = 24
"""Number of plans of the reduced cluster that are tried on the whole cluster."""
_MOST_SETTLED = 4
"""If few plans can be timed: the number of plans that local search improves without moving groups."""
_DESCENDED, _IMPROVED, _WALKED, _NUM_WALKS = 0.27, 0.18, 0.44, 3
"""Shares of the plans of a medium step: for descending from the starts, for improving the results, and for walks; and
the number of walks. The rest is for improving the best plans at the end."""
_FEW_WALKED = 2500
"""Number of plans of a small step reserved for a walk."""
_LEAST_WALKED, _MORE_WALKED = 64, 1.6
"""Minimum number of plans for walks to be made, and the factor by which that number then grows."""
_CHOICES = 4
"""Number of parallelisms per stage that count, and always in a cycle, where granularities depend on each other."""


Candidates = Mapping[Mode, Sequence[Candidate]]


def improved(
    problem: Problem, pools: Sequence[Pool], candidates: Candidates, num_draws: int, *, is_part: bool = False
) -> LocalSearch:
    """Simulates the promising candidates and improves the best of them by local search.

    Args:
        is_part: of a larger problem, which needs some of the time.
    """
    around = LocalSearch(problem, pools, num_plans=MOST_SIMULATED * len(candidates), num_draws=num_draws)
    starts = [one for of_mode in candidates.values() for one in _simulated(problem, pools, around, of_mode)]
    if problem.cluster.num_devices > _MOST_DEVICES or not starts:
        return around
    around.num_left = affordable_plans(problem, num_draws, is_part=is_part)
    starts += around.regrouped(min(starts, key=lambda plan: plan.rank))
    coarse = _coarse_starts(problem, pools, around, num_draws)
    if coarse:
        _settle_and_descend(around, starts, coarse)
    elif is_part or around.num_left < _LEAST_WALKED:
        for plan in _descended(around, starts, in_turn=True):
            around.improve(plan)
    elif _is_small(problem):
        with around.spending(around.num_left - _FEW_WALKED):
            for plan in _descended(around, starts, in_turn=False):
                around.improve(plan)
        with around.spending(_FEW_WALKED):
            around.anneal(min(around.best.values(), key=lambda plan: plan.rank))
    else:
        _improve_and_walk(around, starts)
    return around


def _improve_and_walk(around: LocalSearch, starts: Sequence[Found]) -> None:
    """Descends from the starts, walks from the best results, and descends again."""
    num_plans = around.num_left
    with around.spending(round(_DESCENDED * num_plans)):
        descended = _descended(around, starts, in_turn=True)
    with around.spending(round(_IMPROVED * num_plans)):
        for plan in descended:
            around.improve(plan)
    firsts = around.elite(_NUM_WALKS)
    for first in firsts:
        with around.spending(round(_WALKED * num_plans / len(firsts))):
            around.anneal(first)
    for plan in sorted(around.best.values(), key=lambda plan: plan.rank):
        around.improve(plan)


def _descended(around: LocalSearch, starts: Sequence[Found], *, in_turn: bool) -> list[Found]:
    """Single changes from the best start of each mode and of each way to share devices; returns the results, the best
    first."""
    nearer: list[Found] = []
    for mode, best in sorted(around.best.items(), key=lambda item: item[1].rank):
        shapes: dict[object, Found] = {}
        for plan in sorted(starts, key=lambda plan: plan.rank):
            if plan.mode == mode and plan.step_s <= _NEAR * best.step_s:
                shapes.setdefault(plan.sharing, plan)
        nearer += [around.descend(plan, in_turn=in_turn) for plan in list(shapes.values())[:_MOST_STARTS]]
    nearer = list(dict.fromkeys(sorted(nearer, key=lambda plan: plan.rank)))
    return [plan for plan in nearer if plan.step_s <= _PROMISING * around.best[plan.mode].step_s]


def _settle_and_descend(around: LocalSearch, starts: Sequence[Found], coarse: Sequence[Found]) -> None:
    """From the best starts by changes that move nobody, then from the best of what that leads to by moves too. How long
    a plan of a part of the cluster takes on all of it says little before it has settled, so the best there are
    among the starts too."""
    ranked = sorted([*starts, *coarse], key=lambda plan: plan.rank)
    chosen = [*coarse[:_MOST_SETTLED], *ranked[:_MOST_SETTLED]]
    for mode in around.best:
        chosen += [plan for plan in ranked if plan.mode == mode][:1]
    settled = [around.settle(plan) for plan in dict.fromkeys(chosen)]
    for plan in dict.fromkeys(sorted(settled, key=lambda plan: plan.rank)):
        around.descend(plan, in_turn=True)


def _coarse_starts(problem: Problem, pools: Sequence[Pool], around: LocalSearch, num_draws: int) -> list[Found]:
    """Scales the best plans of the problem on a part of its devices to all of them, ordered by their step time
    there."""
    coarse = coarsened(problem, pools, _COARSER) if _is_large(problem) else None
    if coarse is None:
        return []
    few = pools_of(coarse.cluster)
    searched = improved(coarse, few, candidates_of(Search(coarse, few)), num_draws, is_part=True)
    plans = [refined(plan.placements, coarse, pools, _COARSER) for plan in searched.elite(_NUM_ELITE)]
    return [plan for placements in plans if (plan := around.time(placements)) is not None]


def candidates_of(search: Search) -> Candidates:
    """The proposals of the search over cuts for each mode."""
    return {mode: search.best([mode], num_each=MOST_SIMULATED) for mode in ALL_MODES}


def affordable_plans(problem: Problem, num_draws: int = 0, *, is_part: bool = False) -> int:
    """Number of plans that local search may time. Args are those of `improved`."""
    if _is_small(problem):
        return _MOST_SEARCHED
    num_items = problem.num_items * len(problem.flow.stages)
    num_choices = _num_choices(problem)
    more = max(1, num_choices / _MANY_CHOICES) ** 2
    most = int(_ITEMS_SEARCHED * num_choices**2 * more) // num_items
    if not (is_part or _is_large(problem)):
        rounds = sum(problem.profile(stage.name).rounds for stage in problem.flow.stages)
        num_steps = max(num_draws, num_steps_of(problem.flow.max_staleness))
        num_entries = problem.num_items * rounds * num_steps
        share = min(1.0, (_MEDIUM_ITEMS / num_entries) ** _MEDIUM_POWER) * min(1.0, num_choices / _MANY_CHOICES)
        most = max(most, int(_MOST_SEARCHED * share))
        most = int(_MORE_WALKED * most) if most >= _LEAST_WALKED else most
    return max(most, _LEAST_SEARCHED)


def _is_small(problem: Problem) -> bool:
    return problem.num_items * len(problem.flow.stages) <= _FEW_ITEMS


def _is_large(problem: Problem) -> bool:
    """Whether it pays to plan for a part of the cluster first."""
    return problem.cluster.num_devices >= _LEAST_COARSE * _COARSER and _num_choices(problem) >= _MANY_CHOICES


def _num_choices(problem: Problem) -> int:
    in_cycle = {name for cycle in problem.flow.cycles() for name in cycle}
    return sum(
        _CHOICES if stage.name in in_cycle else min(_CHOICES, len(problem.profile(stage.name).instances))
        for stage in problem.flow.stages
    )


def _simulated(
    problem: Problem, pools: Sequence[Pool], around: LocalSearch, candidates: Sequence[Candidate]
) -> list[Found]:
    """Simulates candidates of one mode: those that may be better than the best so far, and near ones of each way to
    share devices."""
    few = max(1, min(4, _ITEMS_COMPARED // (problem.num_items * len(problem.flow.stages))))
    result: list[Found] = []
    shapes: set[object] = set()
    best_s = np.inf
    for candidate in candidates:
        is_known = shape(candidate.tree) in shapes or candidate.step_s > _NEAR * best_s
        if len(result) >= few and candidate.step_s > _WORTH * best_s and is_known:
            continue
        shapes.add(shape(candidate.tree))
        placements = placements_of_candidate(problem, pools, candidate)
        plan = None if placements is None else around.time(placements, candidate.step_s)
        if plan is not None:
            result.append(plan)
            best_s = min(best_s, plan.step_s)
    return result


def placements_of_candidate(problem: Problem, pools: Sequence[Pool], candidate: Candidate) -> Placements | None:
    """The placements of the candidate's stages; None if the stages of a worker group cannot be placed together."""
    workers = {stage.name: stage.worker for stage in problem.flow.stages}
    placed = place(candidate.tree, [list(pool.devices) for pool in pools], workers)
    if placed is None:
        return None
    in_cycle = {name for cycle in problem.flow.cycles() for name in cycle}  # where the batch never ends, so not 0
    placements: dict[str, StagePlacement] = {}
    for turn, leaf in enumerate(leaves(candidate.tree)):
        is_whole = leaf.granularity >= problem.num_items and leaf.stage not in in_cycle
        granularity = 0 if is_whole else leaf.granularity
        placements[leaf.stage] = StagePlacement(
            bits_of(placed[leaf.stage]), leaf.num_instances, granularity, leaf.offload, turn
        )
    return tuple(placements[stage.name] for stage in problem.flow.stages)
