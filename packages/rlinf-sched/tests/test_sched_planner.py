"""The planner finds what trying everything finds, and its plans are what they say."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sched_brute_force import least_step_s

from rlinf_sched import (
    Cluster,
    FlowGraph,
    InstanceProfile,
    ItemCosts,
    Problem,
    Profiles,
    SchedError,
    Stage,
    StageProfile,
    TimePoint,
    WeightEdge,
)
from rlinf_sched.planner.pools import pools_of
from rlinf_sched.planner.search import Search
from rlinf_sched.planner.tree import Join, Leaf, place, shape

MODES = ("collocated", "disaggregated", "hybrid")


MOST_DEVICES = {2: 8, 3: 8, 4: 4, 5: 3, 6: 2}
"""By stages, so that trying everything takes a second."""


@st.composite
def problems(draw: st.DrawFn, most_devices: dict[int, int] = MOST_DEVICES) -> Problem:
    """Flows without cycles: each stage reads from one or two earlier ones. Larger flows get fewer choices."""
    num_stages = draw(st.integers(2, 6))
    num_devices = draw(st.integers(1, most_devices[num_stages]))
    num_items = draw(st.sampled_from([1, 3, 4]))
    stages, item_bytes, profiles = [], {}, {}
    for i in range(num_stages):
        name = f"s{i}"
        sources = draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=2)) if i else set()
        reads = tuple(f"c{source}-{i}" for source in sorted(sources)) or ("feed",)
        for channel in reads:
            item_bytes[channel] = draw(st.sampled_from([0, 10**8]))
        stages.append((name, reads, draw(st.booleans())))
        # few different numbers, so that trying everything stays possible
        slope, fixed = draw(st.sampled_from([1.0, 2.0])), draw(st.sampled_from([0.0, 1.0]))
        points = (TimePoint(num_items=1, seconds=fixed + slope), TimePoint(num_items=4, seconds=fixed + 4 * slope))
        instance = InstanceProfile(
            num_devices=draw(st.sampled_from([1, 1, 2])),
            points=points,
            step_s=draw(st.sampled_from([0.0, 0.5])),
            state_bytes=draw(st.sampled_from([0, 10 << 30])),
            sharded_state_bytes=draw(st.sampled_from([0, 20 << 30])),
            item_work_bytes=draw(st.sampled_from([0, 1 << 30])),
        )
        profiles[name] = StageProfile(
            instances=draw(st.sampled_from([(instance,), (instance,), _at_two_numbers(instance)])),
            batching=draw(st.sampled_from(["sum", "longest", "continuous"])),
            costs=draw(st.sampled_from([ItemCosts(), ItemCosts(spread="lognormal", sigma=0.5)])),
            weights_bytes=draw(st.sampled_from([0, 10 << 30])),
        )
    channels = [channel for _, reads, _ in stages for channel in reads]
    flow_stages = tuple(
        Stage(
            name=name,
            worker=name,
            role="actor" if trains else "rollout",
            reads=reads,
            writes=tuple(channel for channel in channels if channel.startswith(f"c{name[1:]}-")),
            trains=trains,
        )
        for name, reads, trains in stages
    )
    trainers = [name for name, _, trains in stages if trains]
    others = [name for name, _, trains in stages if not trains]
    edges = (WeightEdge(source=trainers[0], target=others[0]),) if trainers and others else ()
    feeds = tuple(channel for channel in channels if channel == "feed")
    flow = FlowGraph(name="flow", stages=flow_stages, weight_edges=edges, feeds=feeds[:1], item_bytes=item_bytes)
    memory = draw(st.sampled_from([24, 48, 1000])) << 30
    sizes = draw(st.sampled_from([(1, 0), (0,)])) if num_stages <= 4 else (draw(st.sampled_from([0, 1])),)
    problem = Problem(
        flow=flow,
        profiles=Profiles(stages=profiles),
        cluster=Cluster.cuda_nodes(1, num_devices, name="GPU", memory_bytes=memory),
        num_items=num_items,
        granularities={name: sizes for name, _, _ in stages},
        allow_offload=draw(st.booleans()) if num_stages <= 4 else draw(st.booleans()) and num_devices <= 2,
    )
    return problem


def _at_two_numbers(instance: InstanceProfile) -> tuple[InstanceProfile, InstanceProfile]:
    """Measured alone, and slower as one of three."""
    slower = tuple(replace(point, seconds=1.5 * point.seconds) for point in instance.points)
    return replace(instance, num_ranks=1), replace(instance, num_ranks=3, points=slower)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_it_finds_what_trying_everything_finds(problem: Problem) -> None:
    check_against_trying_everything(problem)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems({2: 8, 3: 8, 4: 6, 5: 4, 6: 3}))
def test_it_finds_what_trying_everything_finds_on_more_devices(problem: Problem) -> None:
    check_against_trying_everything(problem)


def check_against_trying_everything(problem: Problem) -> None:
    try:
        problem.validate()
    except SchedError:
        assume(False)
    expected = least_step_s(problem)
    found = Search(problem, pools_of(problem.cluster), tolerance=0.0).best(MODES)
    if expected is None:
        assert found == []
    else:
        assert found[0].step_s == pytest.approx(expected, rel=1e-9)


def test_stages_that_offload_are_not_interleaved():
    """Three stages that fill a device each, on two devices: the last two share one, and wait for the first's end."""
    state_bytes, names = 20 << 30, ("s0", "s1", "s2")
    stages = tuple(
        Stage(name=name, worker=name, role="rollout", reads=(f"c{i}",), writes=(f"c{i + 1}",))
        for i, name in enumerate(names)
    )
    points = (TimePoint(num_items=1, seconds=1.0),)
    profiles = {
        name: StageProfile(instances=(InstanceProfile(points=points, state_bytes=state_bytes, step_s=step_s),))
        for name, step_s in zip(names, (0.5, 0.0, 0.0), strict=True)
    }
    problem = Problem(
        flow=FlowGraph(name="flow", stages=stages, feeds=("c0",), collects=("c3",)),
        profiles=Profiles(stages=profiles),
        cluster=Cluster.cuda_nodes(1, 2, name="GPU", memory_bytes=24 << 30),
        num_items=1,
    )
    links = problem.cluster.links
    move_s = state_bytes / links.host_bytes_per_s
    # s0; then s1, loaded by then, and its offload; then s2 with both
    step_s = 1.5 + (1.0 + move_s) + (1.0 + 2 * move_s) + links.latency_s
    found = Search(problem, pools_of(problem.cluster), tolerance=0.0).best(MODES)
    assert found[0].step_s == pytest.approx(step_s, rel=1e-9)
    check_against_trying_everything(problem)


def test_stages_of_a_worker_group_come_to_be_in_one_place():
    """Beside a wide part first and beside a narrow one later, the group would else be on two ranges of devices."""
    x, y = (Leaf(name, 0, 0, count, count, 1, False) for name, count in (("x", 3), ("y", 1)))
    first, second = (Leaf(name, 0, 0, 2, 2, 1, False) for name in ("g1", "g2"))
    tree = Join("in turn", Join("side by side", x, first), Join("side by side", second, y))
    workers = {"x": "x", "y": "y", "g1": "g", "g2": "g"}
    assert place(tree, [list(range(5))], workers) == {"x": (0, 1, 2), "g1": (3, 4), "g2": (3, 4), "y": (0,)}
    other = Leaf("h2", 0, 0, 2, 2, 1, False)  # together first, apart later: impossible
    apart = Join(
        "in turn", Join("in turn", first, Leaf("h1", 0, 0, 2, 2, 1, False)), Join("side by side", second, other)
    )
    assert place(apart, [list(range(5))], {**workers, "h1": "h", "h2": "h"}) is None


def test_a_shape_is_who_shares_devices_with_whom():
    a, b, c = (Leaf(name, 0, 0, 1, 1, 1, False) for name in "abc")
    host = Leaf("host", 0, -1, 1, 0, 1, False)
    left = Join("side by side", Join("side by side", a, host), Join("in turn", b, c))
    right = Join("side by side", a, Join("in turn", Join("interleaved", host, b), c))
    assert shape(left) == shape(right)
    assert shape(left) != shape(Join("side by side", a, Join("in turn", c, b)))
    assert shape(left) != shape(Join("in turn", a, Join("in turn", b, c)))
