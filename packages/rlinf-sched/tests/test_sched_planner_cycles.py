"""Cycles: the planner's best is as good as all devices and hand-overs tried through the simulator."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sched_planner_problems import GIB, gpus, profile

from rlinf_sched import FlowGraph, Plan, Problem, Profiles, Stage, StagePlan, WeightEdge, simulate
from rlinf_sched.planner import best_plan
from rlinf_sched.planner.columns import RowColumns
from rlinf_sched.planner.pools import pools_of
from rlinf_sched.planner.search import Search
from rlinf_sched.planner.tree import Cycle, leaves

pytestmark = pytest.mark.usefixtures("each_search")

NUM_ITEMS = 8
SIZES = (1, 2, 4, 8)


@st.composite
def cycles(draw: st.DrawFn) -> Problem:
    """Environments and a policy, 8 items, a few rounds, on up to four devices."""
    stages = (
        Stage(name="env", worker="env", role="env", reads=("actions",), writes=("observations",), dispatch="key"),
        Stage(name="policy", worker="policy", role="rollout", reads=("observations",), writes=("actions", "out")),
    )
    stages = tuple(replace(stage, granularities=SIZES) for stage in stages)
    rounds = draw(st.integers(2, 6))
    profiles = {
        stage.name: profile(
            draw(st.sampled_from([0.1, 0.5, 1.0])), fixed=draw(st.sampled_from([0.0, 0.5, 2.0])), rounds=rounds
        )
        for stage in stages
    }
    return Problem(
        flow=FlowGraph(name="cycle", stages=stages, collects=("out",)),
        profiles=Profiles(stages=profiles),
        cluster=gpus(draw(st.sampled_from([1, 2, 3, 4]))),
        num_items=NUM_ITEMS,
        allow_offload=False,
    )


def every_plan(problem: Problem, sizes: Sequence[int] = SIZES) -> Iterator[Plan]:
    """The environment on the first few devices, the policy on any that follow each other, hand-overs of each size."""
    total = problem.cluster.num_devices
    first_few = [range(n) for n in range(1, total + 1)]
    intervals = [range(a, b) for a in range(total) for b in range(a + 1, total + 1)]
    for env, policy, *chosen in itertools.product(first_few, intervals, sizes, sizes):
        rows = zip(("env", "policy"), (env, policy), chosen, strict=True)
        stages = tuple(
            StagePlan(stage=name, devices=tuple(on), num_ranks=len(on), granularity=size, offload=False, turn=0)
            for name, on, size in rows
        )
        yield Plan(flow="cycle", mode="hybrid", stages=stages, reason="tried")


@pytest.mark.slow
@settings(max_examples=6)
@given(cycles())
def test_the_best_is_as_good_as_trying_all_splits_and_granularities(problem: Problem) -> None:
    least = min(simulate(problem, candidate).step_s for candidate in every_plan(problem))
    plan = best_plan(problem)
    assert plan.prediction is not None
    assert plan.prediction.step_s == pytest.approx(simulate(problem, plan).step_s)
    assert plan.prediction.step_s <= 1.03 * least


def forty_items(num_devices: int, *, granularities: tuple[int, ...] = (), sharded: int = 0, **pinned: int) -> Problem:
    """40 environments of 1 s a step, 10 steps of an episode."""
    stages = (
        Stage(name="env", worker="env", role="env", reads=("actions",), writes=("observations",), dispatch="key"),
        Stage(name="policy", worker="policy", role="rollout", reads=("observations",), writes=("actions", "out")),
    )
    profiles = {
        "env": profile(1.0, rounds=10),
        "policy": profile(0.02, fixed=0.1, rounds=10, sharded_state_bytes=sharded),
    }
    return Problem(
        flow=FlowGraph(
            name="cycle",
            stages=tuple(replace(stage, granularities=granularities) for stage in stages),
            collects=("out",),
        ),
        profiles=Profiles(stages=profiles),
        cluster=gpus(num_devices),
        num_items=40,
        pinned_devices=pinned,
    )


@pytest.mark.parametrize(
    "problem",
    [
        forty_items(3, policy=3),
        forty_items(3, env=3, policy=3),
        forty_items(3, sharded=200 * GIB),
        forty_items(1, granularities=(14,)),
        forty_items(3, granularities=(14,)),
    ],
    ids=["one pinned", "both pinned", "state of 3 devices", "chunks of 14 on 1", "chunks of 14 on 3"],
)
def test_what_only_uneven_shares_can_do_is_planned(problem: Problem):
    """40 items are no multiple of 3 devices, nor of chunks of 14: the best is what trying every plan finds."""
    pinned = problem.pinned_devices
    sizes = problem.choices("env")
    fits = problem.profile("policy").instances[0].sharded_state_bytes == 0
    tried = [
        candidate
        for candidate in every_plan(problem, sizes)
        if all(len(candidate.stage(group).devices) == count for group, count in pinned.items())
        and (fits or len(candidate.stage("policy").devices) >= 3)
    ]
    plan = best_plan(problem)
    assert plan.prediction is not None
    assert plan.prediction.step_s <= min(simulate(problem, one).step_s for one in tried) * (1 + 1e-9)
    assert all(len(plan.stage(group).devices) == count for group, count in pinned.items())


@pytest.mark.parametrize("num_devices", [2, 4])
def test_no_part_of_an_instance_waits_for_ever_for_a_hand_over(num_devices: int):
    """Of twelve groups two instances have six: four at a time leave two over, and twelve would never come."""
    problem = forty_items(num_devices, granularities=(4, 12), policy=2)
    stages = tuple(replace(stage, num_parts=12, dispatch="key") for stage in problem.flow.stages)
    problem = replace(problem, flow=replace(problem.flow, stages=stages), num_items=12)
    for placed in best_plan(problem).stages:
        assert 12 // placed.num_ranks % placed.granularity == 0


def test_uneven_numbers_are_offered_where_they_shorten_a_round():
    """40 items: 6 devices with at most 7 each, 7 with at most 6, but 9 with 5 each have no less to do than 8."""
    options = Search(forty_items(9), pools_of(gpus(9))).turn_options[0]
    of_env = [
        next(leaf for leaf in leaves(options.tree(row)) if leaf.stage == "env") for row in range(len(options.rows))
    ]
    assert {leaf.num_instances for leaf in of_env if leaf.granularity == 1} == {1, 2, 3, 4, 5, 6, 7, 8}
    assert {leaf.num_instances for leaf in of_env if leaf.granularity == 16} == {1, 2, 3, 4, 5, 6, 7, 8}


def test_not_all_of_many_uneven_numbers_are_offered():
    """On 64 devices 38 numbers shorten the busiest one's share of 512 items, the larger of them a little each."""
    problem = replace(forty_items(64), num_items=512)
    options = Search(problem, pools_of(gpus(64))).turn_options[0]
    of_env = [
        next(leaf for leaf in leaves(options.tree(row)) if leaf.stage == "env") for row in range(len(options.rows))
    ]
    counts = {leaf.num_instances for leaf in of_env if leaf.granularity == 1}
    assert len(counts) < 30
    assert {2**power for power in range(7)} <= counts


@pytest.mark.parametrize(("num_ranks", "granularity"), [(3, 1), (3, 2), (6, 1), (7, 2)])
def test_the_estimate_of_uneven_shares_is_near_what_they_take(num_ranks: int, granularity: int):
    problem = forty_items(num_ranks)
    search, columns = Search(problem, pools_of(problem.cluster)), RowColumns(num_pools=1, num_edges=0)
    options = search.turn_options[0]
    for row in range(len(options.rows)):
        env, policy = leaves(options.tree(row))
        together = options.rows[row, 0] == env.num_devices == policy.num_devices == num_ranks
        if together and env.granularity == granularity and not env.offload:
            break
    else:
        pytest.fail("the search has no such option")
    devices = tuple(range(num_ranks))
    stages = tuple(
        StagePlan(stage=name, devices=devices, num_ranks=num_ranks, granularity=granularity, offload=False, turn=0)
        for name in ("env", "policy")
    )
    by_hand = Plan(flow="cycle", mode="collocated", stages=stages, reason="by hand")
    simulated_s = simulate(problem, by_hand).step_s
    assert options.rows[row, columns.last] == pytest.approx(simulated_s, rel=0.05)


def test_a_chunk_of_the_whole_batch_goes_round_as_a_number():
    """0 would wait for the end of the batch, which only ends after the cycle."""
    stages = (
        Stage(name="env", worker="env", role="env", reads=("actions",), writes=("observations",), dispatch="key"),
        Stage(name="policy", worker="policy", role="rollout", reads=("observations",), writes=("actions", "out")),
    )
    problem = Problem(
        flow=FlowGraph(name="cycle", stages=stages, collects=("out",)),
        profiles=Profiles(stages={name: profile(0.1, fixed=2.0, rounds=2) for name in ("env", "policy")}),
        cluster=gpus(1),
        num_items=NUM_ITEMS,
    )
    assert [stage.granularity for stage in best_plan(problem).stages] == [NUM_ITEMS, NUM_ITEMS]


def test_more_devices_than_items_are_left_out_without_a_warning():
    stages = (
        Stage(name="env", worker="env", role="env", reads=("actions",), writes=("observations",), dispatch="key"),
        Stage(name="policy", worker="policy", role="rollout", reads=("observations",), writes=("actions", "out")),
    )
    problem = Problem(
        flow=FlowGraph(name="cycle", stages=stages, collects=("out",)),
        profiles=Profiles(stages={name: profile(1.0, rounds=2) for name in ("env", "policy")}),
        cluster=gpus(2),
        num_items=1,
    )
    with np.errstate(all="raise"):
        assert [stage.num_ranks for stage in best_plan(problem).stages] == [1, 1]


def test_a_weight_sync_within_a_cycle_takes_time():
    """A policy that learns while it goes round, and the environment's copy of its weights."""
    stages = (
        Stage(name="env", worker="env", role="env", reads=("actions",), writes=("observations",)),
        Stage(name="policy", worker="policy", role="actor", reads=("observations",), writes=("actions",), trains=True),
    )
    problem = Problem(
        flow=FlowGraph(name="cycle", stages=stages, weight_edges=(WeightEdge(source="policy", target="env"),)),
        profiles=Profiles(stages={name: profile(1.0, rounds=2) for name in ("env", "policy")}),
        cluster=gpus(1),
        num_items=4,
    )
    links, prediction = problem.cluster.links, best_plan(problem).prediction
    assert prediction is not None
    sync_s = links.latency_s + GIB / links.node_bytes_per_s
    assert prediction.sync_s == pytest.approx(sync_s, rel=1e-6)
    assert prediction.estimate_s == prediction.step_s == pytest.approx(16.0 + sync_s, rel=1e-9)


@pytest.mark.parametrize(
    ("num_ranks", "simulated_over_estimate"), [((3, 3), 1.0), ((4, 4), 1.0), ((4, 1), 1.2)], ids=str
)
def test_two_stages_with_unequal_ranks_may_take_longer_than_the_bound(
    num_ranks: tuple[int, int], simulated_over_estimate: float
):
    """Chunks of 4 of 12 items, 3 s and 1 s an item, 4 rounds, ranks of both stages on devices of their own."""
    stages = (
        Stage(name="env", worker="env", role="env", reads=("actions",), writes=("observations",)),
        Stage(name="policy", worker="policy", role="rollout", reads=("observations",), writes=("actions",)),
    )
    problem = Problem(
        flow=FlowGraph(name="cycle", stages=stages),
        profiles=Profiles(stages={"env": profile(3.0, rounds=4), "policy": profile(1.0, rounds=4)}),
        cluster=gpus(8),
        num_items=12,
        allow_offload=False,
    )
    search, columns = Search(problem, pools_of(problem.cluster)), RowColumns(num_pools=1, num_edges=0)
    options = search.turn_options[0]
    for row in range(len(options.rows)):
        env, policy = leaves(options.tree(row))
        apart = options.rows[row, 0] == env.num_devices + policy.num_devices
        if (env.num_instances, policy.num_instances) == num_ranks and env.granularity == 4 and apart:
            break
    else:
        pytest.fail("the search has no such option")
    ends = np.cumsum(num_ranks)
    plans = [
        StagePlan(
            stage=stage.name,
            devices=tuple(range(end - count, end)),
            num_ranks=count,
            granularity=4,
            offload=False,
            turn=0,
        )
        for stage, count, end in zip(stages, num_ranks, ends.tolist(), strict=True)
    ]
    simulated_s = simulate(problem, Plan(flow="cycle", mode="hybrid", stages=tuple(plans), reason="by hand")).step_s
    assert simulated_s / options.rows[row, columns.last] == pytest.approx(simulated_over_estimate, rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "num_items", "granularity", "devices", "simulated_over_estimate"),
    [
        (((0, 1), (1, 0.2), (0.1, 1)), 8, 1, (0, 1, 0), 16.8 / 18),
        (((0, 1), (0, 0.05), (0, 1)), 24, 2, (0, 0, 1), 48.1 / 27.2),
        (((0, 1), (0, 0.05), (0, 1)), 24, 2, (0, 0, 0), 1.0),
    ],
    ids=["quicker in two blocks", "slower in two blocks", "as estimated in one"],
)
def test_what_is_said_of_three_stages_is_no_bound(
    seconds: Sequence[tuple[float, float]],
    num_items: int,
    granularity: int,
    devices: tuple[int, ...],
    simulated_over_estimate: float,
):
    """`seconds`: of each stage a fixed part, and for each item. One instance each, on these devices."""
    names = ("env", "policy", "judge")
    stages = tuple(
        Stage(
            name=name,
            worker=name,
            role="env" if name == "env" else "rollout",
            reads=(f"to-{name}",),
            writes=(f"to-{names[(i + 1) % 3]}",),
        )
        for i, name in enumerate(names)
    )
    profiles = {name: profile(each, fixed=fixed) for name, (fixed, each) in zip(names, seconds, strict=True)}
    problem = Problem(
        flow=FlowGraph(name="cycle", stages=stages),
        profiles=Profiles(stages=profiles),
        cluster=gpus(2),
        num_items=num_items,
        allow_offload=False,
    )
    options, columns = Search(problem, pools_of(problem.cluster)).turn_options[0], RowColumns(num_pools=1, num_edges=0)
    blocks = tuple(tuple(i for i in range(3) if devices[i] == device) for device in sorted(set(devices)))
    estimates_s = [
        options.rows[row, columns.last]
        for row in range(len(options.rows))
        if isinstance(tree := options.tree(row), Cycle)
        and tree.blocks == blocks
        and {(leaf.num_instances, leaf.granularity) for leaf in tree.leaves} == {(1, granularity)}
    ]
    placed = tuple(
        StagePlan(stage=name, devices=(device,), num_ranks=1, granularity=granularity, offload=False, turn=0)
        for name, device in zip(names, devices, strict=True)
    )
    simulated_s = simulate(problem, Plan(flow="cycle", mode="hybrid", stages=placed, reason="by hand")).step_s
    assert [simulated_s / estimate_s for estimate_s in estimates_s] == pytest.approx(
        [simulated_over_estimate], rel=1e-3
    )
