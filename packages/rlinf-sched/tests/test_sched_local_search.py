"""Plans that the search over cuts does not propose, and that local search finds."""

import random

import pytest
from sched_planner_problems import chain, gpus, profile as simple_profile

from rlinf_sched import (
    Cluster,
    Device,
    FlowGraph,
    InstanceProfile,
    ItemCosts,
    Problem,
    ProblemError,
    Profiles,
    Stage,
    StageProfile,
    TimePoint,
    WeightEdge,
)
from rlinf_sched.planner import best_plan
from rlinf_sched.planner.local_search import Found, LocalSearch
from rlinf_sched.planner.placements import StagePlacement, bits_of
from rlinf_sched.planner.pools import pools_of
from rlinf_sched.profile import Batching
from rlinf_sched.simulator import simulate

pytestmark = pytest.mark.usefixtures("each_search")
GIB = 1 << 30


def profile(batching: Batching, one_s: float, sixteen_s: float, *, state: int, widths: tuple[int, ...] = (1,)):
    return StageProfile(
        instances=tuple(
            InstanceProfile(
                num_devices=width,
                points=(
                    TimePoint(num_items=1, seconds=one_s / width**0.8),
                    TimePoint(num_items=16, seconds=sixteen_s / width**0.8),
                ),
                state_bytes=state * GIB // width,
            )
            for width in widths
        ),
        batching=batching,
        costs=ItemCosts(spread="lognormal", sigma=0.6) if batching != "sum" else ItemCosts(),
        weights_bytes=GIB,
    )


@pytest.fixture
def crowded() -> Problem:
    """Two models fit on a device, so who shares with whom matters: rollout with the trainer, both judges together."""
    chain = {"rollout": "rollout", "score": "reference", "value": "critic", "actor": "actor"}
    stages = tuple(
        Stage(
            name=name,
            worker=name,
            role=role,
            reads=(f"c{i}" if i else "prompts",),
            writes=(f"c{i + 1}",) if name != "actor" else (),
            trains=name == "actor",
        )
        for i, (name, role) in enumerate(chain.items())
    )
    return Problem(
        flow=FlowGraph(
            name="f", stages=stages, feeds=("prompts",), weight_edges=(WeightEdge(source="actor", target="rollout"),)
        ),
        profiles=Profiles(
            stages={
                "rollout": profile("continuous", 2.0, 17.0, state=14),
                "score": profile("longest", 0.2, 3.2, state=14, widths=(1, 2)),
                "value": profile("longest", 2.0, 32.0, state=14),
                "actor": profile("sum", 2.0, 17.0, state=4),
            }
        ),
        cluster=Cluster.cuda_nodes(1, 4, name="GPU", memory_bytes=24 * GIB),
        num_items=16,
        allow_offload=False,
    )


def test_who_shares_devices_is_chosen_anew(crowded: Problem):
    plan = best_plan(crowded)
    assert set(plan.stage("rollout").devices) == set(plan.stage("actor").devices)
    assert set(plan.stage("score").devices) == set(plan.stage("value").devices)
    assert plan.prediction is not None and plan.prediction.estimate_s is None


def test_what_is_not_allowed_is_not_tried(crowded: Problem):
    for stage in best_plan(crowded).stages:
        assert not stage.offload
    assert best_plan(crowded, ["disaggregated"]).mode == "disaggregated"


def test_a_plan_for_drawn_steps_is_shorter_on_them_and_predicts_their_mean(crowded: Problem):
    typical, drawn = best_plan(crowded), best_plan(crowded, num_draws=20)
    takes_s = [simulate(crowded, candidate, seed=0, num_steps=20).step_s for candidate in (typical, drawn)]
    assert drawn.prediction is not None and typical.prediction is not None
    assert (drawn.prediction.step_s, drawn.prediction.num_draws) == (takes_s[1], 20)
    assert takes_s[1] < takes_s[0]
    assert typical.prediction.step_s <= simulate(crowded, drawn).step_s


def test_draws_cannot_be_negative(crowded: Problem):
    with pytest.raises(ProblemError, match=r"num_draws=-1 must be 0 \(typical costs\) or more"):
        best_plan(crowded, num_draws=-1)


@pytest.mark.parametrize("declared_first", ["quick", "long"])
def test_turns_that_need_nothing_of_each_other_come_in_the_better_order(declared_first: str):
    """On one GPU: what a slow check on the host waits for goes first, 100 s of each, so that the other 100 s of
    generation overlap with the check. The other order takes 310 s."""
    sides = {
        "long": Stage(name="long", worker="long", role="rollout", reads=("a",), writes=("x",), whole_batch=True),
        "quick": Stage(name="quick", worker="quick", role="rollout", reads=("b",), writes=("y",), whole_batch=True),
    }
    stages = (
        sides.pop(declared_first),
        *sides.values(),
        Stage(
            name="check", worker="check", role="reward", reads=("x",), writes=("z",), needs_device=False,
            whole_batch=True,
        ),
        Stage(name="actor", worker="actor", role="actor", reads=("y", "z"), trains=True),
    )  # fmt: skip

    def takes(seconds: float, num_devices: int = 1) -> StageProfile:
        point = TimePoint(num_items=1, seconds=seconds)
        return StageProfile(instances=(InstanceProfile(num_devices=num_devices, points=(point,)),), max_instances=1)

    problem = Problem(
        flow=FlowGraph(name="f", stages=stages, feeds=("a", "b")),
        profiles=Profiles(
            stages={"long": takes(1.0), "quick": takes(1.0), "check": takes(1.0, num_devices=0), "actor": takes(0.1)}
        ),
        cluster=Cluster.cuda_nodes(1, 1, name="GPU", memory_bytes=80 * GIB),
        num_items=100,
    )
    plan = best_plan(problem)
    assert plan.stage("long").turn < plan.stage("quick").turn
    assert plan.prediction is not None
    assert plan.prediction.step_s == pytest.approx(210.0, rel=1e-3)


def of_two_products(draw: random.Random) -> Problem:
    """Four stages on four GPUs of one product and four of another, some profiled for one of them only."""
    products = [("fast",), ("slow",), ("fast", "slow"), ("fast", "slow")]
    seconds = {"fast": 1.0, "slow": 2.0}
    profiles = {
        f"s{i}": StageProfile(
            instances=tuple(
                InstanceProfile(
                    num_devices=width,
                    device_name=product,
                    points=(
                        TimePoint(num_items=1, seconds=seconds[product] * share / width),
                        TimePoint(num_items=8, seconds=seconds[product] * share / width * draw.uniform(4, 8)),
                    ),
                    state_bytes=10 * GIB,
                )
                for product in draw.choice(products)
                for width in (1, 2)
            )
        )
        for i, share in enumerate(draw.uniform(0.2, 2.0) for _ in range(4))
    }
    cluster = Cluster(
        devices=tuple(
            Device(index=i, kind="cuda", node=i // 4, name=("fast", "slow")[i // 4], memory_bytes=80 * GIB)
            for i in range(8)
        )
    )
    return chain(profiles, cluster, num_items=16)


@pytest.mark.slow
def test_a_worker_group_is_on_one_product():
    for seed in range(4):
        problem = of_two_products(random.Random(seed))
        for stage in best_plan(problem).stages:
            assert len({problem.cluster.devices[device].name for device in stage.devices}) == 1, (seed, stage)


def test_a_group_moves_to_the_other_product():
    """All four begin on the slow one."""
    problem = of_two_products(random.Random(3))
    pools = pools_of(problem.cluster)
    around = LocalSearch(problem, pools, num_plans=2_000)
    products = {name: [one.device_name for one in of.instances] for name, of in problem.profiles.stages.items()}
    slow, fast = bits_of(range(4, 8)), bits_of(range(4))
    placements = [StagePlacement(slow if "slow" in of else fast, 4, 1, False) for of in products.values()]
    moves = [i for i, of in enumerate(products.values()) if {"slow", "fast"} <= set(of)]
    assert moves
    first = around.time(tuple(placements))
    assert first is not None
    best = around.descend(first, in_turn=False)
    assert any(best.placements[i].devices & fast for i in moves)


def test_processes_of_the_host_work_side_by_side():
    """64 items of 1 s, shared out among eight: 8 s for each, on no device of others."""
    problem = chain({"check": simple_profile(1.0, num_devices=0), "actor": simple_profile(0.01)}, gpus(1), num_items=64)
    around = LocalSearch(problem, pools_of(problem.cluster), num_plans=1)
    timed_plan = around.time((StagePlacement(0, 8, 1, False), StagePlacement(1, 1, 1, False)))
    assert timed_plan is not None
    assert timed_plan.busy_s[0] == pytest.approx(8.0)


def test_a_walk_is_the_same_each_time_and_loses_nothing(crowded: Problem):
    def walked() -> tuple[Found, Found]:
        around = LocalSearch(crowded, pools_of(crowded.cluster), num_plans=200)
        first = around.time(tuple(StagePlacement(bits_of((i,)), 1, 1, False) for i in range(4)))
        assert first is not None
        return first, around.anneal(first)

    (first, best), again = walked(), walked()
    assert (first, best) == again
    assert best.step_s < first.step_s


def test_what_a_descent_gave_up_can_still_be_timed(crowded: Problem):
    """It stops timing a plan at the time of its best one, which says nothing about whether the plan fits."""
    around, other = (LocalSearch(crowded, pools_of(crowded.cluster), num_plans=500) for _ in range(2))
    first = around.time(tuple(StagePlacement(bits_of((i,)), 1, 1, False) for i in range(4)))
    assert first is not None
    best = around.descend(first, in_turn=True)
    neighbours = [
        (*best.placements[:s], best.placements[s]._replace(granularity=size), *best.placements[s + 1 :])
        for s in range(4)
        for size in (1, 2, 4, 8)
    ]
    again, alone = ([search.time(one) for one in neighbours] for search in (around, other))
    assert [plan and plan.step_s for plan in again] == [plan and plan.step_s for plan in alone]
