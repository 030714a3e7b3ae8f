"""Planning time of a PPO graph, by devices and by stages: search, simulation of the best, and the plan's prediction.
And predictions on typical costs beside simulations on drawn ones, of long-tailed workloads.

    pytest benchmarks/sched/test_sched_planner_benchmark.py --benchmark-json=benchmarks/results/sched-planner.json

Profiles are round numbers of the size of a 7B model's; the batch grows with the devices, up to 4,096 items.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from benchmarks.sched.random_graphs import random_graph

from rlinf_sched import (
    Cluster,
    FlowGraph,
    InstanceProfile,
    ItemCosts,
    Problem,
    Profiles,
    Stage,
    StageProfile,
    TimePoint,
    WeightEdge,
    best_plan,
    simulate,
)
from rlinf_sched.derive import workload

DEVICES = (8, 64, 512, 1_024, 8_192, 100_000)
STAGES = (2, 3, 4, 5, 6)
LONG_TAILED = ("grpo-qwen2.5-7b-64", "ppo-qwen2.5-7b-32", "grpo-qwen3-30b-a3b-32", "grpo-qwen3-30b-a3b-128")
SEEDS = range(20)
TARGETS = {1_024: 0.2, 100_000: 1.0}
"""Devices -> seconds, for five stages."""
RANDOM_TARGETS = {5: 2.0, 6: 4.0, 7: 10.0}
"""Stages of random graphs, which have four widths each -> seconds of the processor on 1,024 devices."""
GIB = 1 << 30
ANSWERS = ItemCosts(spread="lognormal", sigma=0.6, longest=4)


def ppo(num_devices: int, num_stages: int = 5) -> Problem:
    """Rollout, reference, reward on the host, critic, actor: of them rollout, actor and the first others; a sixth stage
    scores with a model of its own."""
    others = ("reference", "critic", "reward", "judge")[: num_stages - 2]
    names = ["rollout", *(name for name in ("reference", "reward", "judge", "critic") if name in others), "actor"]
    stages = tuple(
        Stage(
            name=name,
            worker=name,
            role={"judge": "reward"}.get(name, name),
            reads=(f"to-{name}",),
            writes=tuple(f"to-{following}" for following in names[i + 1 : i + 2]),
            trains=name == "actor",
            needs_device=name != "reward",
        )
        for i, name in enumerate(names)
    )
    flow = FlowGraph(
        name="ppo",
        stages=stages,
        weight_edges=(WeightEdge(source="actor", target="rollout"),),
        feeds=("to-rollout",),
        item_bytes={f"to-{name}": 1 << 20 for name in names[1:]},
    )
    return Problem(
        flow=flow,
        profiles=Profiles(stages={name: _profile(name) for name in names}),
        cluster=Cluster.cuda_nodes(num_devices // 8, 8, name="NVIDIA H100", memory_bytes=80 * GIB),
        num_items=min(4096, max(512, 4 * num_devices)),
    )


def _profile(name: str) -> StageProfile:
    if name == "rollout":
        points = (TimePoint(num_items=1, seconds=40), TimePoint(num_items=32, seconds=96))
        engine = InstanceProfile(
            points=points, max_items=32, state_bytes=15 * GIB, work_bytes=2 * GIB, item_work_bytes=GIB
        )
        return StageProfile(instances=(engine,), batching="continuous", costs=ANSWERS, weights_bytes=15 * GIB)
    if name == "reward":
        host = InstanceProfile(num_devices=0, points=(TimePoint(num_items=1, seconds=0.01),))
        return StageProfile(instances=(host,))
    seconds = {"reference": 0.9, "judge": 0.5, "critic": 3.0, "actor": 3.6}[name]
    trains = name in ("critic", "actor")
    instance = InstanceProfile(
        points=(TimePoint(num_items=1, seconds=seconds), TimePoint(num_items=8, seconds=7.5 * seconds)),
        step_s=0.8 if trains else 0.0,
        state_bytes=(4 if trains else 15) * GIB,
        sharded_state_bytes=120 * GIB if trains else 0,
        work_bytes=20 * GIB if trains else 4 * GIB,
    )
    return StageProfile(instances=(instance,), costs=ANSWERS, weights_bytes=15 * GIB)


def _measure(benchmark: Any, problem: Problem, target_s: float | None = None) -> None:
    start = time.perf_counter()
    plan = best_plan(problem)
    first_s = time.perf_counter() - start
    benchmark.pedantic(lambda: best_plan(problem), rounds=3)
    assert plan.prediction is not None
    num_devices = problem.cluster.num_devices
    benchmark.extra_info |= {
        "devices": num_devices,
        "stages": len(problem.flow.stages),
        "median_s": benchmark.stats.stats.median,
        "first_s": first_s,
        "step_s": plan.prediction.step_s,
        "estimate_s": plan.prediction.estimate_s,
        "mode": plan.mode,
    }
    if target_s:
        benchmark.extra_info["target_s"] = target_s
    print(f"\n{len(problem.flow.stages)} stages, {num_devices:,} devices: {benchmark.stats.stats.median:.2f} s")


@pytest.mark.parametrize("num_devices", DEVICES)
def test_by_devices(benchmark: Any, num_devices: int) -> None:
    _measure(benchmark, ppo(num_devices), TARGETS.get(num_devices))


@pytest.mark.parametrize("num_stages", STAGES)
def test_by_stages(benchmark: Any, num_stages: int) -> None:
    _measure(benchmark, ppo(64, num_stages))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_stages", RANDOM_TARGETS)
def test_random_graphs(benchmark: Any, num_stages: int, seed: int) -> None:
    _measure(benchmark, random_graph(num_stages, 1024, seed=seed), RANDOM_TARGETS[num_stages])


@pytest.mark.parametrize("name", LONG_TAILED)
def test_against_simulator(benchmark: Any, name: str) -> None:
    """What a plan was said to take, for costs drawn at random."""
    problem = workload(name)
    plan = best_plan(problem)
    benchmark.pedantic(lambda: best_plan(problem), rounds=1)
    assert plan.prediction is not None
    drawn_s = np.array([simulate(problem, plan, seed=seed).step_s for seed in SEEDS])
    benchmark.extra_info |= {
        "mode": plan.mode,
        "step_s": plan.prediction.step_s,
        "estimate_s": plan.prediction.estimate_s,
        "mean_s": float(drawn_s.mean()),
        "deviation_s": float(drawn_s.std()),
    }
