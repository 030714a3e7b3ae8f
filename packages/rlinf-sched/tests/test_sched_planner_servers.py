"""A published planner's case: 128 GPUs, a rollout of 224 s, inference of 10 s and training of 101 s, for 512 prompts.

On g of the M devices, s = M / g, a stage takes c s / (1 + clip(s / 10, 0.1, 0.9)): more of them help less and less.
"""

import pytest
from sched_planner_problems import chain, gpus

from rlinf_sched import InstanceProfile, StageProfile, TimePoint
from rlinf_sched.planner import plan

NUM_DEVICES, NUM_ITEMS = 128, 512
SECONDS = {"rollout": 224, "inference": 10, "actor": 101}


def on(stage: str, count: int, *, is_linear: bool) -> float:
    """Seconds of an item on so many devices together."""
    s = NUM_DEVICES / count
    return SECONDS[stage] * s / (1.0 if is_linear else 1 + min(max(s / 10, 0.1), 0.9)) / NUM_ITEMS


def server(stage: str, *, is_linear: bool) -> StageProfile:
    """One instance, which spans all devices of the stage."""
    instances = tuple(
        InstanceProfile(
            num_devices=count, points=(TimePoint(num_items=1, seconds=on(stage, count, is_linear=is_linear)),)
        )
        for count in range(1, NUM_DEVICES + 1)
    )
    return StageProfile(instances=instances, max_instances=1)


def ranks(stage: str, *, is_linear: bool) -> StageProfile:
    """An instance on each device, which share the items."""
    instances = tuple(
        InstanceProfile(
            num_ranks=count, points=(TimePoint(num_items=1, seconds=count * on(stage, count, is_linear=is_linear)),)
        )
        for count in range(1, NUM_DEVICES + 1)
    )
    return StageProfile(instances=instances)


@pytest.mark.parametrize(
    ("make", "linear", "step_s"),
    [
        (server, (), 289.1),
        (ranks, (), 321.0),
        (server, ("rollout",), 303.2),  # devices that share the work without loss and wait for nobody take 300
        (ranks, ("rollout",), 325.0),  # 224 s of rollout in four rounds, which only 128 devices can do, and the rest
    ],
    ids=["servers", "ranks", "servers, linear rollout", "ranks, linear rollout"],
)
def test_a_published_planners_case(make, linear: tuple[str, ...], step_s: float):
    profiles = {stage: make(stage, is_linear=stage in linear) for stage in SECONDS}
    found = plan(chain(profiles, gpus(NUM_DEVICES), num_items=NUM_ITEMS)).prediction
    assert found is not None
    assert found.step_s <= step_s
