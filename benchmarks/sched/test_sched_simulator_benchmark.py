"""The simulator's events a second, beside SimPy on the same queues, and the time of one call.

    pytest benchmarks/sched/test_sched_simulator_benchmark.py --benchmark-json=sched-simulator.json

An event is a start or an end of a hand-over, an item's leaving of an engine, or a lease change. SimPy (skipped where it
is not installed) runs the pipeline of hand-overs only: a process for each instance, a store for each channel.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

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
    plan_for_mode,
    simulate,
)

NUM_EVENTS_PER_S = 1_000_000
SPREAD = ItemCosts(spread="lognormal", sigma=0.8)
CLUSTER = Cluster.cuda_nodes(2, 8, name="NVIDIA H100", memory_bytes=80 << 30)


def _profile(num_devices: int, batching: Any, seconds: float = 0.1, rounds: int = 1) -> StageProfile:
    points = (TimePoint(num_items=1, seconds=seconds), TimePoint(num_items=64, seconds=10 * seconds))
    instance = InstanceProfile(num_devices=num_devices, points=points, state_bytes=1 << 30)
    return StageProfile(instances=(instance,), batching=batching, costs=SPREAD, rounds=rounds, weights_bytes=15 << 30)


def ppo(num_items: int) -> Problem:
    """Rollout (continuous), reference, reward on the host, critic, actor."""
    flow = FlowGraph(
        name="ppo",
        stages=(
            Stage(name="rollout", worker="rollout", role="rollout", reads=("prompts",), writes=("samples",)),
            Stage(name="reference", worker="reference", role="reference", reads=("samples",), writes=("referenced",)),
            Stage(
                name="reward", worker="reward", role="reward", reads=("referenced",), writes=("scored",),
                needs_device=False,
            ),
            Stage(name="critic", worker="critic", role="critic", reads=("scored",), writes=("valued",)),
            Stage(name="actor", worker="actor", role="actor", reads=("valued",), trains=True),
        ),
        weight_edges=(WeightEdge(source="actor", target="rollout"),),
        feeds=("prompts",),
        item_bytes={"samples": 1 << 16},
    )  # fmt: skip
    stages = {stage.name: _profile(1 if stage.needs_device else 0, "sum") for stage in flow.stages}
    stages["rollout"] = _profile(1, "continuous")
    return Problem(flow=flow, profiles=Profiles(stages=stages), cluster=CLUSTER, num_items=num_items)


def embodied(num_items: int, rounds: int) -> Problem:
    """Environments and a policy that hand items to each other, 80 rounds of them."""
    flow = FlowGraph(
        name="embodied",
        stages=(
            Stage(name="env", worker="env", role="env", reads=("actions",), writes=("observations",), dispatch="key"),
            Stage(name="policy", worker="policy", role="rollout", reads=("observations",), writes=("actions", "out")),
        ),
        collects=("out",),
    )
    stages = {stage.name: _profile(1, "sum", rounds=rounds) for stage in flow.stages}
    return Problem(flow=flow, profiles=Profiles(stages=stages), cluster=CLUSTER, num_items=num_items)


def _disaggregated(problem: Problem) -> Plan:
    return plan_for_mode(problem.flow, problem.cluster, "disaggregated")


def _cycle(problem: Problem) -> Plan:
    half = range(8), range(8, 16)
    rows = zip(("env", "policy"), half, strict=True)
    stages = (
        StagePlan(stage=name, devices=tuple(on), num_ranks=8, granularity=4, offload=False, turn=0) for name, on in rows
    )
    return Plan(flow="embodied", mode="hybrid", stages=tuple(stages), reason="by hand")


CASES = {
    "PPO, 16384 items": (ppo(16384), _disaggregated),
    "cycle, 512 items x 80 rounds": (embodied(512, 80), _cycle),
}


@pytest.mark.parametrize("name", CASES)
def test_events(benchmark: Any, name: str) -> None:
    problem, make = CASES[name]
    plan = make(problem)
    timeline = simulate(problem, plan)
    benchmark.pedantic(lambda: simulate(problem, plan), rounds=7)
    rate = timeline.num_events / benchmark.stats.stats.median
    benchmark.extra_info |= {
        "events": timeline.num_events,
        "events_per_s": round(rate),
        "target": f"at least {NUM_EVENTS_PER_S}",
    }
    print(f"\n{name}: {timeline.num_events} events, {rate / 1e6:.2f} million a second")


def test_events_of_simpy(benchmark: Any) -> None:
    """The peer: the same five queues of hand-overs of one item, 2,048 items."""
    simpy = pytest.importorskip("simpy")
    problem = ppo(2048)
    plan = _disaggregated(problem)

    def run() -> int:
        env = simpy.Environment()
        channels = [simpy.Store(env) for _ in range(6)]
        channels[0].items.extend(range(problem.num_items))

        def rank(reads: Any, writes: Any, costs: list[float], seconds: float) -> Any:
            while True:
                item = yield reads.get()
                yield env.timeout(seconds * costs[item])
                yield writes.put(item)

        for i, stage in enumerate(problem.flow.stages):
            profile = problem.profile(stage.name)
            costs = profile.costs.typical(problem.num_items).tolist()
            for _ in range(plan.stage(stage.name).num_ranks):
                env.process(rank(channels[i], channels[i + 1], costs, profile.instances[0].seconds(1)))
        env.run()
        assert len(channels[-1].items) == problem.num_items
        return 2 * problem.num_items * len(problem.flow.stages)

    num_events = run()
    benchmark.pedantic(run, rounds=3)
    rate = num_events / benchmark.stats.stats.median
    benchmark.extra_info |= {"events": num_events, "events_per_s": round(rate)}
    print(f"\nSimPy: {num_events} events, {rate / 1e6:.3f} million a second")


def test_ten_candidates_of_a_search(benchmark: Any) -> None:
    """What the planner asks for a second opinion: ten plans of a flow of five stages and 512 items, within 0.1 s."""
    problem = ppo(512)
    plans = [
        plan_for_mode(problem.flow, problem.cluster, mode, granularity={"critic": size, "actor": size})
        for mode in ("collocated", "disaggregated")
        for size in (4, 8, 16, 32, 64)
    ]
    for plan in plans:
        simulate(problem, plan)  # costs and tables are made once for a problem

    def ten() -> float:
        start = time.perf_counter()
        for plan in plans:
            simulate(problem, plan)
        return time.perf_counter() - start

    benchmark.pedantic(ten, rounds=7)
    benchmark.extra_info["target"] = "at most 0.1 s"
    print(f"\nten candidates: {benchmark.stats.stats.median * 1e3:.1f} ms")
