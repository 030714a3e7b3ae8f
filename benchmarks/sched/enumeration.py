"""How far plans are from the best: `python -m benchmarks.sched.enumeration [NUM_PROBLEMS] [SEED] [--drawn]`.

Small random problems (chains and forks of three to five stages, some with a cycle, four to eight devices, memory
limits, unequal items, instances of one, two or four devices, offload) are planned, and then everything is tried: each
worker group on every interval of devices, every width, hand-over and choice of offload. What cannot be as short as the
shortest step known, by the work of its busiest device, is passed over; of the others the most promising are timed by
the planner's own simulator. Where there are too many to list, a part of them is; so everything that differs from the
best plan known in one turn of the flow, or in two, is tried besides. Nothing else here is the planner's: problems,
memory rule and bound are written for this file.

With `--drawn` plans are judged on 20 draws of the items' costs: the mean step of the plan, made from typical costs,
against that of the best plan known for the draws. A seed's problems can be had in parts: other seeds, other problems.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rlinf_sched import (
    Cluster,
    FlowGraph,
    InstanceProfile,
    ItemCosts,
    Plan,
    Problem,
    Profiles,
    Stage,
    StagePlan,
    StageProfile,
    TimePoint,
    WeightEdge,
)
from rlinf_sched.errors import InfeasibleError
from rlinf_sched.plan import Mode
from rlinf_sched.planner import plan
from rlinf_sched.planner.plan_timer import PlanTimer
from rlinf_sched.planner.spots import Spots, spots_of
from rlinf_sched.profile import Batching

GIB = 1 << 30
MOST_TIMED = 10_000
"""Of those that may be shorter, the ones whose busiest device computes least: so many of all, and a tenth of that for
each pair of turns in which a plan may differ from the best known; divided by the number of draws."""
MOST_LISTED = 1_000_000
"""Rows that are looked at for each turn of the flow."""
DRAWS = range(0, 2000, 100)
MODES: tuple[Mode, ...] = ("collocated", "disaggregated", "hybrid")
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
    """All plans of a problem in which each worker group has an interval of the devices.

    Args:
        seeds: of the costs that plans are timed with, their mean counts; None stands for the typical costs.
    """

    def __init__(self, problem: Problem, known: Plan, seeds: Sequence[int | None] = (None,)) -> None:
        self._problem = problem
        self._turns = problem.flow.turns()
        self._turn = {name: turn for turn, names in enumerate(self._turns) for name in names}
        self._cycle = {name for names in problem.flow.cycles() for name in names}
        self._num_devices = problem.cluster.num_devices
        self._memory = problem.cluster.devices[0].memory_bytes
        self._timers = [PlanTimer(problem, spots_of(problem, known), seed=seed) for seed in seeds]
        self._options = [list(self._of_turn(names)) for names in self._turns]
        self._numbers = [
            [np.array([self._of_option(stages)[i] for stages in options]) for i in range(3)]
            for options in self._options
        ]
        self._known = [tuple(known.stage(name) for name in names) for names in self._turns]
        self.known_s = self.best_s = self._time(self._known)
        self.num_timed, self.was_cut = 0, False
        self._most = MOST_TIMED // len(seeds)
        self._draw = np.random.default_rng(0)

    def search(self) -> None:
        """Sets `best_s`."""
        before_s = np.inf
        while self.best_s < before_s:
            before_s = self.best_s
            for changed in itertools.combinations(range(len(self._turns)), 2):
                self._try(changed, most=self._most // 10)
        self._try(range(len(self._turns)), most=self._most)

    def _try(self, changed: Sequence[int], most: int) -> None:
        """Every option of these turns, the others as in the best plan known."""
        known = list(self._known)
        bounds_s, plan_of = self._all(changed, known)
        order = np.argsort(bounds_s, kind="stable")
        self.was_cut |= len(order) > most
        for i in order[:most]:
            if bounds_s[i] >= self.best_s:
                break
            self.num_timed += 1
            stages = plan_of(int(i))
            step_s = self._time(stages)
            if step_s < self.best_s:
                self.best_s, self._known = step_s, stages

    def _time(self, stages: Sequence[tuple[StagePlan, ...]]) -> float:
        spots = self._spots(stages)
        return statistics.fmean(timer.step_s(spots) for timer in self._timers)

    def _spots(self, stages: Sequence[tuple[StagePlan, ...]]) -> Spots:
        flat = tuple(stage for of_turn in stages for stage in of_turn)
        return spots_of(self._problem, Plan(flow=self._problem.flow.name, mode="hybrid", stages=flat, reason="tried"))

    def _all(
        self, changed: Sequence[int], known: list[tuple[StagePlan, ...]]
    ) -> tuple[np.ndarray, Callable[[int], list[tuple[StagePlan, ...]]]]:
        """What the busiest device of each plan computes that fits and may be shorter, and what the plan is."""
        chosen = np.zeros((1, 0), dtype=np.int32)
        busy, stays, works = (np.zeros((1, self._num_devices)) for _ in range(3))
        for turn in range(len(self._turns)):
            if turn not in changed:
                fixed = self._of_option(known[turn])
                busy, stays, works = busy + fixed[0], stays + fixed[1], np.maximum(works, fixed[2])
        for turn in changed:
            numbers = self._numbers[turn]
            rows = np.arange(len(busy))
            if len(rows) * len(numbers[0]) > MOST_LISTED:
                self.was_cut = True
                rows = self._draw.choice(rows, MOST_LISTED // len(numbers[0]), replace=False)
            kept = [self._extended(busy[part], stays[part], works[part], numbers) for part in _parts(rows, 500)]
            before = np.concatenate([part[keep[0]] for part, keep in zip(_parts(rows, 500), kept, strict=True)])
            option = np.concatenate([keep[1] for keep in kept])
            chosen = np.column_stack([chosen[before], option])
            busy, stays, works = (np.concatenate([keep[k] for keep in kept]) for k in (2, 3, 4))

        def plan_of(i: int) -> list[tuple[StagePlan, ...]]:
            stages = list(known)
            for turn, option in zip(changed, chosen[i].tolist(), strict=True):
                stages[turn] = self._options[turn][option]
            return stages

        return busy.max(axis=1, initial=0.0), plan_of

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

    def _of_turn(self, names: Sequence[str]) -> Iterator[tuple[StagePlan, ...]]:
        """A stage, or those of a cycle: together or apart, with the same hand-over."""
        for stages in itertools.product(*(self._of_stage(name) for name in names)):
            first = stages[0]
            alike = all((one.granularity, one.offload) == (first.granularity, first.offload) for one in stages)
            pairs = itertools.combinations((set(one.devices) for one in stages), 2)
            if alike and all(mine == other or not mine & other for mine, other in pairs):
                yield stages

    def _of_stage(self, name: str) -> Iterator[StagePlan]:
        sizes = (1, 4, self._problem.num_items if name in self._cycle else 0)
        offloads = (False, True) if self._problem.allow_offload else (False,)
        for first, last in itertools.combinations(range(self._num_devices + 1), 2):
            devices = tuple(range(first, last))
            for instance in self._problem.profile(name).instances:
                num_ranks, left = divmod(len(devices), instance.num_devices)
                for size, offload in itertools.product(sizes, offloads):
                    if not left:
                        yield StagePlan(
                            stage=name,
                            devices=devices,
                            num_ranks=num_ranks,
                            granularity=size,
                            offload=offload,
                            turn=self._turn[name],
                        )

    def _of_option(self, stages: tuple[StagePlan, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of one turn, for each device: seconds of computing if items were alike, bytes that stay, and bytes besides
        while it has its turn."""
        busy, stays, works = (np.zeros(self._num_devices) for _ in range(3))
        for stage in stages:
            profile, width = self._problem.profile(stage.stage), len(stage.devices) // stage.num_ranks
            instance = next(one for one in profile.instances if one.num_devices == width)
            share = -(-self._problem.num_items // stage.num_ranks)
            continuous = profile.batching == "continuous"
            items = share if continuous else min(stage.granularity or self._problem.num_items, share)
            all_items = self._problem.num_items * profile.rounds / stage.num_ranks
            on = list(stage.devices)
            # Dealt out unevenly, a device may have less than its share.
            busy[on] += 0.9 * instance.seconds(items) / items * all_items + instance.step_s
            stays[on] += 0 if stage.offload else instance.state_bytes
            works[on] += instance.item_work_bytes * items + (instance.state_bytes if stage.offload else 0)
        return busy, stays, works


def _parts(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[i : i + size] for i in range(0, max(1, len(rows)), size)]


# -- the table ---------------------------------------------------------------------------------------------------------


def measure(num_problems: int, seed: int, seeds: Sequence[int | None]) -> dict[str, Any]:
    """Gaps of the planner's plans over the best that enumeration finds, and beside single modes."""
    draw, gaps, worse_than_mode, plan_s = random.Random(seed), [], 0, []
    num_timed = num_cut = 0
    while len(gaps) < num_problems:
        problem = random_problem(draw)
        began_s = time.process_time()
        try:
            found = plan(problem)
        except InfeasibleError:
            continue
        plan_s.append(time.process_time() - began_s)
        worse_than_mode += _is_worse_than_a_mode(problem, found)
        everything = Enumeration(problem, found, seeds)
        everything.search()
        num_timed, num_cut = num_timed + everything.num_timed, num_cut + everything.was_cut
        gaps.append(everything.known_s / everything.best_s - 1)
        print(
            f"{len(gaps)}/{num_problems} {problem.flow.name} {problem.cluster.num_devices} devices: {gaps[-1]:.2%} "
            f"plan {plan_s[-1]:.2f} s, {everything.num_timed} timed{', cut' if everything.was_cut else ''}",
            flush=True,
        )
    return {
        "num_problems": len(gaps),
        "seed": seed,
        "costs": "typical" if None in seeds else f"{len(seeds)} draws",
        "most_timed": MOST_TIMED,
        "num_plans_timed": num_timed,
        "num_problems_with_more_plans": num_cut,
        "mean_gap": statistics.mean(gaps),
        "worst_gap": max(gaps),
        "num_beaten": sum(gap > 1e-6 for gap in gaps),
        "num_beaten_by_1_percent": sum(gap > 0.01 for gap in gaps),
        "num_worse_than_one_mode": worse_than_mode,
        "plan_s_median": statistics.median(plan_s),
    }


def _is_worse_than_a_mode(problem: Problem, found: Plan) -> bool:
    assert found.prediction is not None
    steps_s = [found.prediction.step_s]
    for mode in MODES:
        try:
            alone = plan(problem, [mode]).prediction
        except InfeasibleError:
            continue
        assert alone is not None
        steps_s.append(alone.step_s)
    return steps_s[0] > min(steps_s) * (1 + 1e-9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("num_problems", type=int, nargs="?", default=100)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--drawn", action="store_true")
    given = parser.parse_args()
    print(json.dumps(measure(given.num_problems, given.seed, DRAWS if given.drawn else (None,)), indent=1))
