"""The planner finds what trying everything finds, and its plans are what they say."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from sched_brute_force import least_step_s, undominated
from sched_brute_force_problems import problems

from rlinf_sched import Cluster, FlowGraph, InstanceProfile, Problem, Profiles, Stage, StageProfile, TimePoint
from rlinf_sched.planner.pools import pools_of
from rlinf_sched.planner.search import Search
from rlinf_sched.planner.tree import Join, Leaf, place, shape

MODES = ("collocated", "disaggregated", "hybrid")


@settings(max_examples=40)
@given(problems())
def test_it_finds_what_trying_everything_finds(problem: Problem) -> None:
    check_against_trying_everything(problem)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(problems({2: 8, 3: 8, 4: 8, 5: 5, 6: 4}))
def test_it_finds_what_trying_everything_finds_on_more_devices(problem: Problem) -> None:
    check_against_trying_everything(problem)


@settings(max_examples=40)
@given(problems())
def test_what_is_dominated_is_in_no_better_plan(problem: Problem) -> None:
    """So that larger flows can be compared without it."""
    assert least_step_s(problem, prune=True) == least_step_s(problem)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=30), st.sampled_from([[0, 1, 2, 3], [0, 2]]))
def test_what_is_kept_is_what_no_other_is_as_good_as(points: list[tuple[int, ...]], compared: list[int]) -> None:
    keys = {tuple(point[row] for row in compared) for point in points}
    best = {key for key in keys if not any(a != key and all(x <= y for x, y in zip(a, key, strict=True)) for a in keys)}
    front = undominated(np.array(points, dtype=np.float64).reshape(-1, 4).T, compared)
    assert sorted(map(tuple, front[compared].T)) == sorted(best)
    assert set(map(tuple, front.T)) <= set(points)


@settings(max_examples=15)
@given(problems({6: 8}, least_devices=8, many_choices=True))
def test_it_finds_what_trying_everything_finds_with_six_stages_on_eight_devices(problem: Problem) -> None:
    check_against_trying_everything(problem, prune=True)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(problems({4: 8, 5: 8, 6: 8}, least_devices=5, many_choices=True))
def test_it_finds_what_trying_everything_finds_with_up_to_six_stages_on_eight_devices(problem: Problem) -> None:
    check_against_trying_everything(problem, prune=True)


def check_against_trying_everything(problem: Problem, *, prune: bool = False) -> None:
    problem.validate()
    expected = least_step_s(problem, prune=prune)
    candidates = Search(problem, pools_of(problem.cluster), tolerance=0.0).best(MODES)
    if expected is None:
        assert candidates == []
    else:
        assert candidates[0].step_s == pytest.approx(expected, rel=1e-9)


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
    candidates = Search(problem, pools_of(problem.cluster), tolerance=0.0).best(MODES)
    assert candidates[0].step_s == pytest.approx(step_s, rel=1e-9)
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
