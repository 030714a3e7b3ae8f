"""Times of one stage on its own against a plain event list, and against the simulator."""

import heapq
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sched_planner_problems import chain, gpus

from rlinf_sched import InstanceProfile, ItemCosts, Plan, StagePlan, StageProfile, TimePoint, simulate
from rlinf_sched.planner.arrivals import arriving_costs
from rlinf_sched.profile import Batching
from rlinf_sched.stage_time import hand_over_size, stage_times

INSTANCE = InstanceProfile(
    points=(TimePoint(num_items=1, seconds=1.5), TimePoint(num_items=8, seconds=5.0)), max_items=6, step_s=0.25
)


def ends_of_hand_overs(costs: list[float], batching: Batching, count: int, size: int) -> list[float]:
    free, ends = [0.0] * count, []
    for begin in range(0, len(costs), size):
        part = costs[begin : begin + size]
        scale = max(part) if batching == "longest" else sum(part) / len(part)
        end = heapq.heappop(free) + INSTANCE.seconds(len(part)) * scale
        heapq.heappush(free, end)
        ends.append(end)
    return sorted(ends)


@settings(max_examples=200)
@given(
    st.lists(st.floats(0.2, 4.0), min_size=1, max_size=40),
    st.sampled_from(["sum", "longest"]),
    st.integers(1, 9),
    st.integers(1, 40),
    st.booleans(),
)
def test_hand_overs_go_to_whoever_is_free_first(
    costs: list[float], batching: Batching, count: int, granularity: int, is_sorted: bool
) -> None:
    mean = sum(costs) / len(costs)
    costs = [cost / mean for cost in (sorted(costs) if is_sorted else costs)]
    size = hand_over_size(len(costs), count, granularity, INSTANCE.max_items)
    ends = ends_of_hand_overs(costs, batching, count, size)
    (times,) = stage_times(INSTANCE, batching, np.array(costs), [count], [granularity])
    first, middle, last, _, tail, period, _ = times
    assert first == pytest.approx(ends[0])
    num_for_half = math.ceil(len(costs) / 2 / size)
    assert middle == pytest.approx(ends[num_for_half - 1])
    assert last == pytest.approx(ends[-1] + 0.25)
    busy = sum(
        INSTANCE.seconds(len(part)) * (max(part) if batching == "longest" else sum(part) / len(part))
        for part in (costs[begin : begin + size] for begin in range(0, len(costs), size))
    )
    assert period == pytest.approx(busy / count + 0.25)
    least = INSTANCE.seconds(size) * (max(costs[-size:]) if batching == "longest" else np.mean(costs[-size:]))
    assert tail == pytest.approx(max(least, INSTANCE.seconds(size)) + 0.25)


@pytest.mark.parametrize("count", [1, 3, 8])  # engines that are crowded, and that have room for all
def test_engines_take_as_long_as_in_the_simulator(count: int) -> None:
    costs = ItemCosts(spread="lognormal", sigma=0.7)
    engine = StageProfile(instances=(INSTANCE,), batching="continuous", costs=costs)
    other = StageProfile(instances=(InstanceProfile(points=(TimePoint(num_items=1, seconds=1e-9),)),))
    problem = chain({"rollout": engine, "actor": other}, gpus(8), num_items=32)
    places = {"rollout": (tuple(range(count)), 1), "actor": ((0,), 0)}
    stages = tuple(
        StagePlan(stage=name, devices=on, num_ranks=len(on), granularity=size, offload=False, turn=turn)
        for turn, (name, (on, size)) in enumerate(places.items())
    )
    timeline = simulate(problem, Plan(flow="chain", mode="hybrid", stages=stages, reason="by hand"))
    ends = timeline.end_s[timeline.of("rollout", "compute")].max()
    last = stage_times(INSTANCE, "continuous", costs.typical(32), [count], [1])[0, 2]
    assert last == pytest.approx(ends + INSTANCE.step_s, rel=0.02 if count == 3 else 1e-6)


def test_long_answers_come_last_to_later_stages() -> None:
    costs = ItemCosts(spread="lognormal", sigma=0.7)
    profiles = {
        "rollout": StageProfile(instances=(INSTANCE,), batching="continuous", costs=costs),
        "reference": StageProfile(instances=(INSTANCE,), costs=costs),
        "actor": StageProfile(instances=(INSTANCE,), costs=costs),
    }
    arriving = arriving_costs(chain(profiles, gpus(8), num_items=32))
    assert np.array_equal(arriving["rollout"], costs.typical(32))
    assert np.array_equal(arriving["reference"], arriving["actor"])
    assert arriving["actor"][-1] == costs.typical(32).max()
    assert arriving["actor"][:16].mean() < 0.7 < 1.3 < arriving["actor"][16:].mean()
