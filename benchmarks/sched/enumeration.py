"""How far plans are from the best: `python -m benchmarks.sched.enumeration [NUM_PROBLEMS] [SEED] [--known]`.

Small random problems (chains and forks of three to five stages, some with a cycle, four to eight devices, memory
limits, unequal items, instances of one, two or four devices, offload) are planned, and then everything is tried: each
worker group on every interval of devices, every width, hand-over and choice of offload. What cannot be as short as the
shortest step known, by the work of its busiest device, is passed over; of the others the most promising are timed by
the planner's own simulator. Where there are too many to list, a part of them is; so everything that differs from the
best plan known in one turn of the flow, or in two, is tried besides. Nothing else here is the planner's: problems,
memory rule and bound are written for this file.

The first problems are looked at on 20 draws of the items' costs too: the mean step of the plan that is made for these
draws against that of the best one known for them. Beside it stand what the plan for typical costs loses on these draws,
and both plans for the 20 draws on 200 others, where neither is at home.

The shortest plan of each problem is kept in a file with what was not tried, so that with `--known` today's planner is
compared without enumerating again; an enumeration that was cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from benchmarks.harness import RESULTS_FOLDER

from rlinf_sched import (
    Cluster,
    FlowGraph,
    InfeasibleError,
    InstanceProfile,
    ItemCosts,
    Plan,
    Problem,
    Profiles,
    Stage,
    StageProfile,
    TimePoint,
    WeightEdge,
    best_plan,
)
from rlinf_sched.plan import ALL_MODES
from rlinf_sched.planner.placements import Placements, StagePlacement, devices_of, placements_of, shares_of
from rlinf_sched.planner.plan_timer import PlanTimer
from rlinf_sched.profile import Batching

GIB = 1 << 30
MOST_TIMED = 10_000
"""Of those that may be shorter, the ones whose busiest device computes least: so many of all, and a tenth of that for
each pair of turns in which a plan may differ from the best known."""
_MOST_COPIES = 4
"""Plans that may be looked at for each that is timed, as many differ in the names of devices only."""
MOST_KEPT = 100
"""Plans, the shortest on typical costs, that are tried on drawn ones."""
MOST_LISTED = 1_000_000
"""Rows that are looked at for each turn of the flow."""
_ROUNDING = 1e-6
"""Part of a step by which a shorter one is not shorter."""
NUM_DRAWS = 20
TYPICAL: dict[str, Any] = {"seed": None, "num_steps": 1}
DRAWN: dict[str, Any] = {"seed": 0, "num_steps": NUM_DRAWS}
FRESH: dict[str, Any] = {"seed": 1, "num_steps": 200}
"""What the simulator executes to judge a plan."""
CHAIN = {"rollout": "rollout", "score": "reference", "value": "critic", "judge": "reward", "actor": "actor"}
SHAPES = ("chain3", "chain4", "chain5", "fork4", "fork5", "cycle3", "cycle4")


def random_problem(draw: random.Random) -> Problem:
    """A rollout, stages that look at what it made, one behind the other or beside, and a trainer; or a cycle."""
    shape = draw.choice(SHAPES)
    num_stages, rounds = int(shape[-1]), draw.choice([2, 4]) if shape.startswith("cycle") else 1
    flow = _cycle(num_stages) if rounds > 1 else _chain(num_stages, shape.startswith("fork"))
    num_devices = draw.choice([4, 5, 6, 8])
    memory = draw.choice([24, 40, 80]) * GIB
    profiles = {
        stage.name: _random_profile(draw, stage.name, rounds if stage.name in {"env", "policy"} else 1)
        for stage in flow.stages
    }
    return Problem(
        flow=flow,
        profiles=Profiles(stages=profiles),
        cluster=Cluster.cuda_nodes(1, num_devices, name="GPU", memory_bytes=memory),
        num_items=draw.choice([8, 12, 16]),
        allow_offload=draw.random() < 0.6,
    )


def _chain(num_stages: int, forks: bool) -> FlowGraph:
    """Of the stages between rollout and actor the first two stand side by side where it forks."""
    names = [*list(CHAIN)[: num_stages - 1], "actor"]
    reads = {name: [f"{before}-{name}"] for before, name in itertools.pairwise(names)}
    if forks:
        reads |= {"value": ["rollout-value"], names[3]: [*reads[names[3]], f"score-{names[3]}"]}
    stages = tuple(
        Stage(
            name=name,
            worker=name,
            role=CHAIN[name],
            reads=tuple(reads.get(name, ["prompts"])),
            writes=tuple(channel for of in reads.values() for channel in of if channel.startswith(f"{name}-")),
            trains=name == "actor",
        )
        for name in names
    )
    edge = WeightEdge(source="actor", target="rollout")
    return FlowGraph(name=f"{num_stages} stages", stages=stages, feeds=("prompts",), weight_edges=(edge,))


def _cycle(num_stages: int) -> FlowGraph:
    """Environments and a policy, perhaps a critic, and a trainer."""
    between = ("value",) if num_stages == 4 else ()
    reads = {"env": "actions", "policy": "seen", **dict.fromkeys(between, "policy-made")}
    reads["actor"] = "value-made" if between else "policy-made"
    writes = {"env": ("seen",), "policy": ("actions", "policy-made"), "value": ("value-made",), "actor": ()}
    roles = {"env": "env", "policy": "rollout", "value": "critic", "actor": "actor"}
    stages = tuple(
        Stage(name=name, worker=name, role=roles[name], reads=(of,), writes=writes[name], trains=name == "actor")
        for name, of in reads.items()
    )
    edge = WeightEdge(source="actor", target="policy")
    return FlowGraph(name=f"cycle of {num_stages}", stages=stages, weight_edges=(edge,))


def _random_profile(draw: random.Random, name: str, rounds: int) -> StageProfile:
    seconds, fixed = draw.choice([0.2, 0.5, 1.0, 2.0]) / rounds, draw.choice([0.0, 0.3, 1.0]) / rounds
    widths = draw.choice([(1,), (1, 2), (1, 2, 4)]) if rounds == 1 else (1,)
    state = draw.choice([1, 4, 8, 14]) * GIB
    batching: Batching = "sum" if rounds > 1 or name == "actor" else draw.choice(["sum", "longest", "continuous"])
    costs = ItemCosts() if rounds > 1 or draw.random() < 0.4 else ItemCosts(spread="lognormal", sigma=0.6)
    return StageProfile(
        instances=tuple(
            InstanceProfile(
                num_devices=width,
                points=tuple(TimePoint(num_items=n, seconds=(fixed + seconds * n) / width**0.8) for n in (1, 16)),
                step_s=draw.choice([0.0, 0.5]) if name == "actor" else 0.0,
                state_bytes=state // width,
                item_work_bytes=draw.choice([0, GIB // 4]) // width,
            )
            for width in widths
        ),
        batching=batching,
        costs=costs,
        rounds=rounds,
        weights_bytes=GIB if name in {"actor", "rollout", "policy"} else 0,
    )


# -- everything --------------------------------------------------------------------------------------------------------


class Enumeration:
    """All plans of a problem in which each worker group, which here is a stage, has an interval of the devices.

    Args:
        known: plans to begin with.
        judged_by: what the simulator executes for each plan.

    Attributes:
        best, best_s: the shortest plan known and its step.
        shortest: the plans that were timed, the shortest first, at most `MOST_KEPT`.
    """

    def __init__(self, problem: Problem, plans: Sequence[Placements], judged_by: Mapping[str, Any] = TYPICAL) -> None:
        self._problem = problem
        names = [stage.name for stage in problem.flow.stages]
        self._turns = [[names.index(name) for name in turn] for turn in problem.flow.turns()]
        self._cycle = {names.index(name) for cycle in problem.flow.cycles() for name in cycle}
        self._profiles = [problem.profile(name) for name in names]
        self._devices = problem.cluster.num_devices
        self._memory = problem.cluster.devices[0].memory_bytes
        self.step_s = PlanTimer(problem, plans[0], **judged_by).step_s
        self._options = [list(self._of_turn(turn)) for turn in self._turns]
        self._numbers = [
            [np.array([self._of_option(turn, placements)[i] for placements in options]) for i in range(3)]
            for turn, options in zip(self._turns, self._options, strict=True)
        ]
        self.was_cut = False
        self._timed: dict[object, float] = {}
        self.shortest: list[tuple[float, Placements]] = []
        self.best_s = math.inf
        for placements in plans:
            self._time(placements)
        self._draw = np.random.default_rng(0)

    @property
    def best(self) -> Placements:
        return self.shortest[0][1]

    @property
    def num_timed(self) -> int:
        return len(self._timed)

    def search(self) -> None:
        """Sets `best`."""
        before_s = math.inf
        while self.best_s < before_s:
            before_s = self.best_s
            for changed in itertools.combinations(range(len(self._turns)), 2):
                self._try(changed, most=MOST_TIMED // 10)
        self._try(range(len(self._turns)), most=MOST_TIMED)

    def _try(self, changed: Sequence[int], most: int) -> None:
        """Every option of these turns, the others as in the best plan known."""
        bounds_s, spots_of_row = self._all(changed, self.best)
        order = np.argsort(bounds_s, kind="stable")
        last = len(self._timed) + most
        for looked_at, i in enumerate(order.tolist()):
            if bounds_s[i] >= self.best_s:
                return
            if looked_at >= _MOST_COPIES * most or len(self._timed) >= last:
                self.was_cut = True
                return
            self._time(spots_of_row(i))

    def _time(self, placements: Placements) -> None:
        """Plans that differ in the names of devices only are timed once."""
        shares = shares_of(placements, [(1 << self._devices) - 1])
        counts = frozenset((share.stages, share.devices.bit_count()) for share in shares)
        key = (*(placement[1:] for placement in placements), counts)
        if key not in self._timed:
            step_s = self._timed[key] = self.step_s(placements)
            if len(self.shortest) < MOST_KEPT or step_s < self.shortest[-1][0]:
                bisect.insort(self.shortest, (step_s, placements))
                del self.shortest[MOST_KEPT:]
                self.best_s = self.shortest[0][0]

    def _all(self, changed: Sequence[int], base: Placements) -> tuple[np.ndarray, Callable[[int], Placements]]:
        """What the busiest device of each plan computes that fits and may be shorter, and what the plan is."""
        chosen = np.zeros((1, 0), dtype=np.int32)
        busy, stays, works = (np.zeros((1, self._devices)) for _ in range(3))
        for turn, stages in enumerate(self._turns):
            if turn not in changed:
                fixed = self._of_option(stages, [base[s] for s in stages])
                busy, stays, works = busy + fixed[0], stays + fixed[1], np.maximum(works, fixed[2])
        for turn in changed:
            numbers = self._numbers[turn]
            rows = np.arange(len(busy))
            if len(rows) * len(numbers[0]) > MOST_LISTED:
                self.was_cut = True
                rows = self._draw.choice(rows, MOST_LISTED // len(numbers[0]), replace=False)
            extended = [self._extended(busy[part], stays[part], works[part], numbers) for part in _parts(rows, 500)]
            before = np.concatenate([part[keep[0]] for part, keep in zip(_parts(rows, 500), extended, strict=True)])
            option = np.concatenate([keep[1] for keep in extended])
            chosen = np.column_stack([chosen[before], option])
            busy, stays, works = (np.concatenate([keep[k] for keep in extended]) for k in (2, 3, 4))

        def spots_of_row(row: int) -> Placements:
            placements = list(base)
            for turn, option in zip(changed, chosen[row].tolist(), strict=True):
                for s, placement in zip(self._turns[turn], self._options[turn][option], strict=True):
                    placements[s] = placement
            return tuple(placements)

        return busy.max(axis=1, initial=0.0), spots_of_row

    def _extended(
        self, busy: np.ndarray, stays: np.ndarray, works: np.ndarray, numbers: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, ...]:
        """Rows with each option of a turn: which row, which option, and their numbers, of those that fit and may be
        shorter."""
        new_busy = busy[:, None] + numbers[0]
        new_stays = stays[:, None] + numbers[1]
        new_works = np.maximum(works[:, None], numbers[2])
        keeps = (new_busy.max(axis=2) < self.best_s) & ((new_stays + new_works) <= self._memory).all(axis=2)
        return *np.nonzero(keeps), new_busy[keeps], new_stays[keeps], new_works[keeps]

    def _of_turn(self, stages: Sequence[int]) -> Iterator[Placements]:
        """A stage, or those of a cycle: together or apart, with the same hand-over."""
        for placements in itertools.product(*(self._of_stage(s) for s in stages)):
            alike = len({(placement.granularity, placement.offload) for placement in placements}) == 1
            pairs = itertools.combinations((placement.devices for placement in placements), 2)
            if alike and all(mine == other or not mine & other for mine, other in pairs):
                yield placements

    def _of_stage(self, s: int) -> Iterator[StagePlacement]:
        sizes = (1, 4, self._problem.num_items if s in self._cycle else 0)
        offloads = (False, True) if self._problem.allow_offload else (False,)
        for first, last in itertools.combinations(range(self._devices + 1), 2):
            for instance in self._profiles[s].instances:
                num_ranks, left = divmod(last - first, instance.num_devices)
                for size, offload in itertools.product(sizes, offloads):
                    if not left:
                        yield StagePlacement((1 << last) - (1 << first), num_ranks, size, offload)

    def _of_option(
        self, stages: Sequence[int], placements: Sequence[StagePlacement]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of one turn, for each device: seconds of computing if items were alike, bytes that stay, and bytes besides
        while it has its turn."""
        busy, stays, works = (np.zeros(self._devices) for _ in range(3))
        for s, placement in zip(stages, placements, strict=True):
            profile, width = self._profiles[s], placement.devices.bit_count() // placement.num_ranks
            instance = next(one for one in profile.instances if one.num_devices == width)
            share = -(-self._problem.num_items // placement.num_ranks)
            continuous = profile.batching == "continuous"
            items = share if continuous else min(placement.granularity or self._problem.num_items, share)
            all_items = self._problem.num_items * profile.rounds / placement.num_ranks
            on = list(devices_of(placement.devices))
            # Dealt out unevenly, a device may have less than its share.
            busy[on] += 0.9 * instance.seconds(items) / items * all_items + instance.step_s
            stays[on] += 0 if placement.offload else instance.state_bytes
            works[on] += instance.item_work_bytes * items + (instance.state_bytes if placement.offload else 0)
        return busy, stays, works


def enumerated(problem: Problem) -> tuple[Placements, Enumeration] | None:
    """Today's plan, and what is known after a search around it; None where nothing fits."""
    try:
        placements = placements_of(problem, best_plan(problem))
    except InfeasibleError:
        return None
    everything = Enumeration(problem, [placements])
    everything.search()
    return placements, everything


def _parts(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[i : i + size] for i in range(0, max(1, len(rows)), size)]


# -- what is known -----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Known:
    """The shortest plan known for a problem, on the costs that it was sought for."""

    step_s: float
    plan: list[list[Any]]
    """For each stage in the order of the flow: devices as bits, ranks, items handed over, whether it offloads."""
    found_by: Literal["planner", "enumeration"]
    num_timed: int
    """Plans, each under one of its devices' names."""
    had_more: bool
    """Whether more plans could have been shorter than were timed."""

    @property
    def placements(self) -> Placements:
        return tuple(StagePlacement(*stage) for stage in self.plan)


@dataclass(kw_only=True, slots=True)
class KnownProblem:
    """One problem of a seed: the `number`-th that is drawn."""

    number: int
    flow: str
    num_devices: int
    typical: Known
    drawn: Known | None = None


def problems(seed: int) -> Iterator[tuple[int, Problem]]:
    """All problems of a seed, numbered; some have no plan."""
    draw = random.Random(seed)
    for number in itertools.count():
        yield number, random_problem(draw)


def enumerate_into(path: Path, num_problems: int, seed: int, num_drawn: int) -> None:
    """Adds to the file what it lacks: the shortest plans of the first problems, of the first of these on drawn costs
    too. Saves after each."""
    known_problems = read(path)[1] if path.exists() else []
    for number, problem in problems(seed):
        if len(known_problems) >= num_problems:
            return
        if known_problems and number <= known_problems[-1].number:
            continue
        searched = enumerated(problem)
        if searched is None:
            continue
        plan_placements, everything = searched
        one = KnownProblem(
            number=number,
            flow=problem.flow.name,
            num_devices=problem.cluster.num_devices,
            typical=_known(everything, plan_placements),
        )
        if len(known_problems) < num_drawn:
            plan_placements = placements_of(problem, best_plan(problem, num_draws=NUM_DRAWS))
            drawn = Enumeration(
                problem, [plan_placements, *(placements for _, placements in everything.shortest)], DRAWN
            )
            drawn.search()
            one.drawn = _known(drawn, plan_placements)
        known_problems.append(one)
        write(path, known_problems, {"seed": seed, "most_timed": MOST_TIMED})
        print(f"{len(known_problems)}/{num_problems}", one, flush=True)


def _known(everything: Enumeration, placements: Placements) -> Known:
    return Known(
        step_s=everything.best_s,
        plan=[list(placement) for placement in everything.best],
        found_by="planner" if everything.step_s(placements) < everything.best_s * (1 + _ROUNDING) else "enumeration",
        num_timed=everything.num_timed,
        had_more=everything.was_cut,
    )


def read(path: Path) -> tuple[dict[str, Any], list[KnownProblem]]:
    """What `write` was given: the summary and the problems."""
    summary = json.loads(path.read_text(encoding="utf-8"))
    return summary, [
        KnownProblem(**row | {costs: Known(**row[costs]) for costs in ("typical", "drawn") if row[costs]})
        for row in summary.pop("problems")
    ]


def write(path: Path, known_problems: Sequence[KnownProblem], summary: Mapping[str, Any]) -> None:
    """One line for each problem."""
    head = json.dumps(summary, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(asdict(one))}" for one in known_problems)
    whole = path.with_suffix(".part")
    whole.write_text(f'{head},\n "problems": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    whole.replace(path)


# -- the table ---------------------------------------------------------------------------------------------------------


def compare(
    path: Path, num_problems: int | None = None, *, also_alone: bool = False, also_drawn: bool = True
) -> dict[str, Any]:
    """Today's plans beside the shortest known of the first problems in the file, or of all; shorter ones are known from
    then on.

    Args:
        also_alone: plans each problem with each mode alone too, which takes three times as long again.
        also_drawn: plans for drawn costs too; else their figures stay as they are in the file.

    Returns:
        the summary. Only on drawn costs a gap may be negative: "on others", where the plan is shorter than the one that
        is the best on the draws that both were made for.
    """
    before, stored = read(path)
    by_number = {one.number: one for one in stored}
    compared = sorted(by_number)[:num_problems]
    gaps: dict[str, list[float]] = {"typical": [], "drawn": [], "typical on drawn": [], "drawn on others": []}
    plan_s: list[float] = []
    num_worse = 0
    for number, problem in problems(before["seed"]):
        if number > compared[-1]:
            break
        if number not in by_number:
            continue
        began_s = time.process_time()
        typical_plan = best_plan(problem)
        plan_s.append(time.process_time() - began_s)
        num_worse += also_alone and _is_worse_than_a_mode(problem, typical_plan)
        typical_placements, best = placements_of(problem, typical_plan), by_number[number]
        of_problem = {"typical": _gap(problem, typical_placements, best.typical, TYPICAL)}
        if also_drawn and best.drawn is not None:
            for_draws = placements_of(problem, best_plan(problem, num_draws=NUM_DRAWS))
            of_problem["drawn"] = _gap(problem, for_draws, best.drawn, DRAWN)
            of_problem["typical on drawn"] = _over(problem, typical_placements, best.drawn.placements, DRAWN)
            of_problem["drawn on others"] = _over(problem, for_draws, best.drawn.placements, FRESH)
        for costs, gap in of_problem.items():
            gaps[costs].append(gap)
        print(number, problem.flow.name, f"{problem.cluster.num_devices} devices", of_problem, flush=True)
    summary = {
        "seed": before["seed"],
        "most_timed": before["most_timed"],
        "plan_s_median": statistics.median(plan_s),
        "num_worse_than_one_mode": num_worse if also_alone else before.get("num_worse_than_one_mode"),
        "typical": _summary(gaps["typical"], [one.typical for one in by_number.values()]),
        "drawn": _of_drawn(gaps, by_number.values()) if also_drawn else before.get("drawn"),
    }
    if len(compared) == len(by_number):
        write(path, list(by_number.values()), summary)
    return summary


def _of_drawn(gaps: Mapping[str, Sequence[float]], known_problems: Iterable[KnownProblem]) -> dict[str, Any]:
    return _summary(gaps["drawn"], [one.drawn for one in known_problems if one.drawn]) | {
        "mean_gap_of_plans_for_typical_costs": statistics.fmean(gaps["typical on drawn"] or [0.0]),
        "worst_gap_of_plans_for_typical_costs": max(gaps["typical on drawn"], default=0.0),
        "mean_gap_on_other_draws": statistics.fmean(gaps["drawn on others"] or [0.0]),
    }


def _gap(problem: Problem, placements: Placements, best: Known, judged_by: Mapping[str, Any]) -> float:
    """Of a plan over the shortest known, which it becomes if it is shorter; both are timed anew."""
    step_s, best.step_s = _steps_s(problem, (placements, best.placements), judged_by)
    gap = step_s / best.step_s - 1
    if gap < -_ROUNDING:
        best.step_s, best.plan, best.found_by = step_s, [list(placement) for placement in placements], "planner"
    return max(0.0, gap)


def _over(problem: Problem, placements: Placements, best: Placements, judged_by: Mapping[str, Any]) -> float:
    """By what part of its step a plan is longer than the best; both are timed anew."""
    step_s, best_s = _steps_s(problem, (placements, best), judged_by)
    return step_s / best_s - 1


def _steps_s(problem: Problem, plans: Sequence[Placements], judged_by: Mapping[str, Any]) -> list[float]:
    timer = PlanTimer(problem, plans[0], **judged_by)
    return [timer.step_s(placements) for placements in plans]


def _summary(gaps: Sequence[float], known_plans: Sequence[Known]) -> dict[str, Any]:
    return {
        "num_problems": len(gaps),
        "mean_gap": statistics.fmean(gaps) if gaps else 0.0,
        "worst_gap": max(gaps, default=0.0),
        "num_beaten": sum(gap > _ROUNDING for gap in gaps),
        "num_beaten_by_1_percent": sum(gap > 0.01 for gap in gaps),
        "num_plans_timed": sum(one.num_timed for one in known_plans),
        "num_problems_with_more_plans": sum(one.had_more for one in known_plans),
    }


def _is_worse_than_a_mode(problem: Problem, plan: Plan) -> bool:
    assert plan.prediction is not None
    steps_s = [plan.prediction.step_s]
    for mode in ALL_MODES:
        try:
            alone = best_plan(problem, [mode]).prediction
        except InfeasibleError:
            continue
        assert alone is not None
        steps_s.append(alone.step_s)
    return steps_s[0] > min(steps_s) * (1 + 1e-9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("num_problems", type=int, nargs="?", default=500)
    parser.add_argument("seed", type=int, nargs="?", default=2026)
    parser.add_argument("--drawn", type=int, default=100, help="problems whose plans are sought on drawn costs too")
    parser.add_argument("--file", type=Path, default=RESULTS_FOLDER / "planner-enumeration.json")
    parser.add_argument("--known", action="store_true", help="only compare with what is in the file")
    parser.add_argument("--alone", action="store_true", help="plan with each mode alone too")
    options = parser.parse_args()
    if not options.known:
        enumerate_into(options.file, options.num_problems, options.seed, options.drawn)
    summary = compare(options.file, options.num_problems, also_alone=options.alone, also_drawn=options.drawn > 0)
    print(json.dumps(summary, indent=1))
