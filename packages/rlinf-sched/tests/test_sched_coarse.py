"""A part of a large problem, and its plans for all of it."""

from dataclasses import replace

import pytest
from sched_planner_problems import chain, gpus, profile

from rlinf_sched import ItemCosts, Problem
from rlinf_sched.planner import best_plan
from rlinf_sched.planner.coarse import coarsened, refined
from rlinf_sched.planner.placements import placements_of, plan_of
from rlinf_sched.planner.pools import pools_of
from rlinf_sched.simulator import simulate

pytestmark = pytest.mark.usefixtures("brief_search")

GIB = 1 << 30


def large() -> Problem:
    return chain(
        {
            "rollout": profile(1.0, num_devices=2, state_bytes=20 * GIB),
            "reward": profile(0.05, num_devices=0),
            "actor": profile(0.5, state_bytes=10 * GIB, sharded_state_bytes=64 * 40 * GIB),
        },
        gpus(64),
        num_items=256,
    )


@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_a_plan_of_a_part_is_one_of_the_whole_that_takes_as_long(mode: str):
    problem = large()
    pools = pools_of(problem.cluster)
    part = coarsened(problem, pools, 8)
    assert part is not None
    assert (part.cluster.num_devices, part.cluster.num_nodes, part.num_items) == (8, 1, 32)
    of_part = best_plan(part, [mode])  # pyright: ignore[reportArgumentType]
    placements = refined(placements_of(part, of_part), part, pools, 8)
    of_all = plan_of(problem, placements, of_part.mode, "")
    timeline = simulate(problem, of_all)
    for small, big in zip(of_part.stages, of_all.stages, strict=True):
        assert (len(big.devices), big.num_ranks) == (8 * len(small.devices), 8 * small.num_ranks)
        assert (big.stage, big.granularity, big.offload) == (small.stage, small.granularity, small.offload)
    assert of_part.prediction is not None
    assert timeline.step_s == pytest.approx(of_part.prediction.step_s, rel=0.02)
    assert all(timeline.memory(device).peak_bytes <= 80 * GIB for device in range(64))


def test_the_longest_item_is_in_the_part():
    problem = large()
    profiles = dict(problem.profiles.stages)
    costs = ItemCosts(spread="lognormal", sigma=0.8)
    profiles["rollout"] = replace(profiles["rollout"], costs=costs)
    problem = replace(problem, profiles=replace(problem.profiles, stages=profiles))
    part = coarsened(problem, pools_of(problem.cluster), 8)
    assert part is not None
    of_all, of_part = costs.quantiles(256), part.profile("rollout").costs.quantiles(32)
    assert of_part.mean() == pytest.approx(1.0)
    assert of_part[-1] / of_part[0] == pytest.approx(of_all[-1] / of_all[7])


def test_what_cannot_be_divided_has_no_part():
    problem, pools = large(), pools_of(gpus(64))
    assert coarsened(replace(problem, num_items=257), pools, 8) is None
    assert coarsened(replace(problem, pinned_devices={"actor": 12}), pools, 8) is None
    assert coarsened(problem, pools, 16) is None  # of eight nodes
    stages = tuple(replace(stage, num_parts=4) for stage in problem.flow.stages)
    assert coarsened(replace(problem, flow=replace(problem.flow, stages=stages)), pools, 8) is None
