"""How far the planner's plans are from the best: `python -m benchmarks.sched.enumeration [NUM_PROBLEMS] [SEED]`.

Small random problems (chains and forks of three or four stages, some with a cycle, four to six devices, memory limits,
unequal items, one or two devices an instance, offload) are planned, and then everything is tried: each worker group on
every interval of devices, every width, hand-over and choice of offload. What cannot be as short as the shortest step
known, by the work of its busiest device, is passed over; all others are timed by the planner's own simulator. Nothing
else here is the planner's: problems, memory rule and bound are written for this file.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
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
from rlinf_sched.errors import InfeasibleError, SchedError
from rlinf_sched.plan import Mode
from rlinf_sched.planner import plan
from rlinf_sched.profile import Batching
from rlinf_sched.simulator import simulate

GIB = 1 << 30
MOST_TIMED = 3000
"""Of those that may be shorter, the ones whose busiest device computes least."""


def random_problem(draw: random.Random) -> Problem:
    """A rollout, something that looks at what it made, perhaps a second such stage beside or behind, and a trainer."""
    shape = draw.choice(["chain3", "chain4", "fork4", "cycle3"])
    rounds = draw.choice([2, 4]) if shape == "cycle3" else 1
    reads = {
        "chain3": {"rollout": ["prompts"], "score": ["c0"], "actor": ["c1"]},
        "chain4": {"rollout": ["prompts"], "score": ["c0"], "value": ["c1"], "actor": ["c2"]},
        "fork4": {"rollout": ["prompts"], "score": ["c0"], "value": ["c0b"], "actor": ["c1", "c2"]},
        "cycle3": {"env": ["actions"], "policy": ["seen"], "actor": ["c1"]},
    }[shape]
    writes = {
        "chain3": {"rollout": ["c0"], "score": ["c1"], "actor": []},
        "chain4": {"rollout": ["c0"], "score": ["c1"], "value": ["c2"], "actor": []},
        "fork4": {"rollout": ["c0", "c0b"], "score": ["c1"], "value": ["c2"], "actor": []},
        "cycle3": {"env": ["seen"], "policy": ["actions", "c1"], "actor": []},
    }[shape]
    roles = {
        "rollout": "rollout",
        "policy": "rollout",
        "env": "env",
        "actor": "actor",
        "score": "reference",
        "value": "critic",
    }
    stages = tuple(
        Stage(
            name=name,
            worker=name,
            role=roles[name],
            reads=tuple(of),
            writes=tuple(writes[name]),
            trains=name == "actor",
        )
        for name, of in reads.items()
    )
    makes = "policy" if shape == "cycle3" else "rollout"
    flow = FlowGraph(
        name=shape,
        stages=stages,
        feeds=() if shape == "cycle3" else ("prompts",),
        weight_edges=(WeightEdge(source="actor", target=makes),),
    )
    num_devices = draw.choice([4, 5, 6]) if len(stages) == 3 else 4
    memory = draw.choice([24, 40, 80]) * GIB
    profiles = {
        stage.name: _random_profile(draw, stage.name, rounds if stage.name in {"env", "policy"} else 1)
        for stage in stages
    }
    return Problem(
        flow=flow,
        profiles=Profiles(stages=profiles),
        cluster=Cluster.cuda_nodes(1, num_devices, name="GPU", memory_bytes=memory),
        num_items=draw.choice([8, 12, 16]),
        allow_offload=draw.random() < 0.6,
    )


def _random_profile(draw: random.Random, name: str, rounds: int) -> StageProfile:
    seconds, fixed = draw.choice([0.2, 0.5, 1.0, 2.0]) / rounds, draw.choice([0.0, 0.3, 1.0]) / rounds
    widths = (1, 2) if rounds == 1 and draw.random() < 0.5 else (1,)
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
    """All plans of a problem in which each worker group has an interval of the devices."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._turn = {name: turn for turn, names in enumerate(problem.flow.turns()) for name in names}
        self._cycle = {name for names in problem.flow.cycles() for name in names}
        self._num_devices = problem.cluster.num_devices
        self._memory = problem.cluster.devices[0].memory_bytes

    def best_s(self, known_s: float) -> tuple[float, int, int]:
        """The shortest step, `known_s` if nothing is shorter; how many plans may be shorter; how many were timed."""
        bounds_s, plans = self._all(known_s)
        best, num_timed = known_s, 0
        for i in np.argsort(bounds_s)[:MOST_TIMED]:
            if bounds_s[i] >= best:
                break
            num_timed += 1
            try:
                best = min(best, simulate(self._problem, self._plan(plans(i))).step_s)
            except SchedError:
                continue
        return best, len(bounds_s), num_timed

    def _all(self, known_s: float) -> tuple[np.ndarray, Callable[[int], tuple[StagePlan, ...]]]:
        """What the busiest device of each plan computes that fits and may be shorter, and what the plan is."""
        of_turns = [list(self._of_turn(names)) for names in self._problem.flow.turns()]
        chosen = np.zeros((1, 0), dtype=np.int64)
        busy, stays, works = (np.zeros((1, self._num_devices)) for _ in range(3))
        for options in of_turns:
            numbers = [np.array([self._numbers(stages)[i] for stages in options]) for i in range(3)]
            new_busy = busy[:, None] + numbers[0]
            new_stays = stays[:, None] + numbers[1]
            new_works = np.maximum(works[:, None], numbers[2])
            keeps = (new_busy.max(axis=2) < known_s) & ((new_stays + new_works) <= self._memory).all(axis=2)
            before, option = np.nonzero(keeps)
            chosen = np.column_stack([chosen[before], option])
            busy, stays, works = new_busy[keeps], new_stays[keeps], new_works[keeps]

        def plan_of(i: int) -> tuple[StagePlan, ...]:
            return tuple(stage for turn, option in enumerate(chosen[i]) for stage in of_turns[turn][option])

        return busy.max(axis=1, initial=0.0), plan_of

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
                    if not left and (name not in self._cycle or self._goes_round(num_ranks, size)):
                        yield StagePlan(
                            stage=name,
                            devices=devices,
                            num_ranks=num_ranks,
                            granularity=size,
                            offload=offload,
                            turn=self._turn[name],
                        )

    def _goes_round(self, num_ranks: int, size: int) -> bool:
        share = self._problem.num_items // num_ranks
        return self._problem.num_items % num_ranks == 0 and share % min(size, share) == 0

    def _numbers(self, stages: tuple[StagePlan, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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

    def _plan(self, stages: tuple[StagePlan, ...]) -> Plan:
        mode: Mode = "collocated" if len({stage.devices for stage in stages}) == 1 else "hybrid"
        return Plan(flow=self._problem.flow.name, mode=mode, stages=stages, reason="tried")


# -- the table ---------------------------------------------------------------------------------------------------------


def measure(num_problems: int, seed: int) -> dict[str, Any]:
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
        assert found.prediction is not None
        own_s = found.prediction.step_s
        for mode in ("collocated", "disaggregated", "hybrid"):
            try:
                alone = plan(problem, [mode]).prediction
            except InfeasibleError:
                continue
            worse_than_mode += alone is not None and own_s > alone.step_s * (1 + 1e-9)
        best_s, num_left, timed = Enumeration(problem).best_s(own_s)
        num_timed, num_cut = num_timed + timed, num_cut + (num_left > timed == MOST_TIMED)
        gaps.append(own_s / best_s - 1)
        print(
            f"{len(gaps)}/{num_problems} {problem.flow.name} {problem.cluster.num_devices} devices: {gaps[-1]:.2%}",
            flush=True,
        )
    return {
        "num_problems": len(gaps),
        "seed": seed,
        "num_plans_timed": num_timed,
        "num_problems_with_more_plans": num_cut,
        "mean_gap": statistics.mean(gaps),
        "worst_gap": max(gaps),
        "num_beaten": sum(gap > 1e-6 for gap in gaps),
        "num_beaten_by_1_percent": sum(gap > 0.01 for gap in gaps),
        "num_worse_than_one_mode": worse_than_mode,
        "plan_s_median": statistics.median(plan_s),
    }


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    print(json.dumps(measure(*(given + [100, 0][len(given) :])), indent=1))
