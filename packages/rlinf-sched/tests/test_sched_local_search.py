"""Plans that the search over cuts does not propose, and that local search finds."""

import pytest

from rlinf_sched import (
    Cluster,
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
from rlinf_sched.planner import plan
from rlinf_sched.profile import Batching
from rlinf_sched.simulator import simulate

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
    found = plan(crowded)
    assert set(found.stage("rollout").devices) == set(found.stage("actor").devices)
    assert set(found.stage("score").devices) == set(found.stage("value").devices)
    assert found.prediction is not None and found.prediction.estimate_s is None


def test_what_is_not_allowed_is_not_tried(crowded: Problem):
    for stage in plan(crowded).stages:
        assert not stage.offload
    assert plan(crowded, ["disaggregated"]).mode == "disaggregated"


def test_a_plan_for_drawn_steps_is_shorter_on_them_and_predicts_their_mean(crowded: Problem):
    typical, drawn = plan(crowded), plan(crowded, num_draws=20)
    takes_s = [simulate(crowded, made, seed=0, num_steps=20).step_s for made in (typical, drawn)]
    assert drawn.prediction is not None and typical.prediction is not None
    assert (drawn.prediction.step_s, drawn.prediction.num_draws) == (takes_s[1], 20)
    assert takes_s[1] < takes_s[0]
    assert typical.prediction.step_s <= simulate(crowded, drawn).step_s


def test_draws_cannot_be_negative(crowded: Problem):
    with pytest.raises(ProblemError, match=r"num_draws=-1 must be 0 \(typical costs\) or more"):
        plan(crowded, num_draws=-1)
