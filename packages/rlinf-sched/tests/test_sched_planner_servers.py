"""The cost model of a published planner: 128 GPUs, 512 prompts, on all of them 224 s of rollout, 10 s of inference and
101 s of training.

On g of M devices, s = M / g, training and inference take c s / (1 + clip(s / 10, 0.1, 0.9)), and c on all of them:
fewer are used better. Rollout, where requests queue, takes c s. Source: toolkits/auto_placement/node.py of RLinf.
"""

import pytest
from sched_planner_problems import chain, gpus

from rlinf_sched import InstanceProfile, Plan, Problem, StageProfile, TimePoint
from rlinf_sched.planner import best_plan

NUM_DEVICES, NUM_ITEMS = 128, 512
SECONDS = {"rollout": 224.0, "inference": 10.0, "actor": 101.0}
COUNTS = range(1, NUM_DEVICES + 1)
MOST_GAINED = 1.9
"""How much better the smallest numbers of devices are used."""


def seconds(stage: str, count: int) -> float:
    """Of all items, on so many devices together."""
    s = NUM_DEVICES / count
    gained = 1.0 if stage == "rollout" or count == NUM_DEVICES else 1 + min(max(s / 10, 0.1), 0.9)
    return SECONDS[stage] * s / gained


def problem(most_servers: int) -> Problem:
    """Args:
    most_servers: of each stage; 0: any number. A server spans any number of devices.
    """

    def profile(stage: str) -> StageProfile:
        instances = tuple(
            InstanceProfile(
                num_devices=count, points=(TimePoint(num_items=1, seconds=seconds(stage, count) / NUM_ITEMS),)
            )
            for count in COUNTS
        )
        return StageProfile(instances=instances, max_instances=most_servers)

    return chain({stage: profile(stage) for stage in SECONDS}, gpus(NUM_DEVICES), num_items=NUM_ITEMS)


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


@pytest.mark.slow
def test_with_several_servers_a_stage_no_plan_can_be_better():
    """Every device is busy all the time, and used as well as it can be. Asked were 289.1 s."""
    least_s = SECONDS["rollout"] + (SECONDS["inference"] + SECONDS["actor"]) / MOST_GAINED
    assert step_s(best_plan(problem(0))) == pytest.approx(least_s, rel=1e-3)


@pytest.mark.slow
def test_with_one_server_a_stage_the_devices_are_shared_out_best():
    """Against all ways to share them out among the three, and rollout on all of them before the other two share. Asked
    were 321.0 s of one replica."""
    apart = min(
        max(seconds("rollout", first), seconds("inference", second), seconds("actor", NUM_DEVICES - first - second))
        for first in COUNTS
        for second in range(1, NUM_DEVICES - first)
    )
    after = SECONDS["rollout"] + min(
        max(seconds("inference", count), seconds("actor", NUM_DEVICES - count)) for count in COUNTS[:-1]
    )
    assert step_s(best_plan(problem(1))) <= 1.01 * min(apart, after)
