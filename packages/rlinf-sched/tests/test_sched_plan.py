"""Plans: validation against flow and cluster, JSON."""

import json
from dataclasses import replace

import pytest

from rlinf_sched import Cluster, Device, FlowGraph, Plan, PlanError, Stage, StagePlan, plan_for_mode

TWO = Cluster.cpu_slots(2, memory_bytes=1 << 30)
FOUR = Cluster.cpu_slots(4, memory_bytes=1 << 30)


def change(plan, name, **fields):
    return replace(plan, stages=tuple(replace(s, **fields) if s.stage == name else s for s in plan.stages))


def mistake(plan, graph, cluster):
    with pytest.raises(PlanError) as caught:
        plan.validate(graph, cluster)
    return str(caught.value)


@pytest.fixture
def collocated(grpo):
    return plan_for_mode(grpo, TWO, "collocated")


def test_a_device_that_does_not_exist(grpo, collocated):
    hybrid = replace(change(collocated, "actor", devices=(0, 4), num_ranks=2), mode="hybrid")
    text = "plan.actor.devices=[0, 4]: device 4 does not exist; this cluster has 2 devices (0, 1)"
    assert text == mistake(hybrid, grpo, TWO)
    one = Cluster.cpu_slots(1, memory_bytes=1)
    assert "this cluster has 1 device (0)" in mistake(hybrid, grpo, one)
    many = Cluster.cpu_slots(64, memory_bytes=1)
    assert "64 devices (0 to 63)" in mistake(change(hybrid, "actor", devices=(0, 64)), grpo, many)
    assert "device -1 does not exist" in mistake(change(hybrid, "actor", devices=(0, -1)), grpo, TWO)


@pytest.mark.parametrize(
    ("stage", "fields", "text"),
    [
        ("actor", {"devices": ()}, "plan.actor.devices=[]: the stage needs a device"),
        ("reward", {"devices": (0,)}, "plan.reward.devices=[0]: the stage has needs_device=False"),
        ("actor", {"devices": (1, 1)}, "device 1 is named 2 times"),
        ("actor", {"num_ranks": 0}, "plan.actor.num_ranks=0 must be at least 1"),
        ("actor", {"num_ranks_per_replica": 0}, "plan.actor.num_ranks_per_replica=0 must be at least 1"),
        (
            "actor",
            {"num_ranks": 4, "num_ranks_per_replica": 3},
            "plan.actor.num_ranks_per_replica=3 does not divide num_ranks=4; use 1 or 2 or 4",
        ),
        ("actor", {"num_ranks": 3}, "use 2 (one rank per device) or 4 or 1"),
        ("actor", {"granularity": -4}, "plan.actor.granularity=-4 must not be negative"),
        ("actor", {"granularity": 6}, "granularity=6 is not a multiple of the stage's item_multiple=4; use 4 or 8"),
        ("actor", {"granularity": 2}, "use 4, or 0 for the whole batch"),
        ("rollout", {"turn": -1}, "plan.rollout.turn=-1 must not be negative"),
        ("actor", {"turn": 1}, "plan.actor.turn=1 equals plan.reference.turn, but both use device 0"),
        ("rollout", {"turn": 9}, "plan.reference.turn=1 comes before plan.rollout.turn=9, but 'reference' reads what"),
        ("actor", {"devices": (0,)}, "plan.mode='collocated', but worker group 'actor' has devices [0]"),
    ],
)
def test_mistakes_in_one_stage(grpo, collocated, stage, fields, text):
    assert text in mistake(change(collocated, stage, **fields), grpo, TWO)


def test_coverage(grpo, collocated):
    assert "plan.actor is missing" in mistake(replace(collocated, stages=collocated.stages[:-1]), grpo, TWO)
    twice = replace(collocated, stages=(*collocated.stages, collocated.stages[0]))
    assert "plan.rollout is there 2 times" in mistake(twice, grpo, TWO)
    renamed = mistake(change(collocated, "actor", stage="actr"), grpo, TWO)
    assert "plan.actr: the flow has no such stage; did you mean 'actor'?" in renamed
    assert "plan.flow='other', but the flow is 'grpo'" in mistake(replace(collocated, flow="other"), grpo, TWO)
    assert "plan.mode='colocated'; did you mean 'collocated'?" in mistake(
        replace(collocated, mode="colocated"), grpo, TWO
    )


def test_stages_of_one_worker_group_share_devices_and_ranks():
    graph = FlowGraph(
        name="f",
        stages=(
            Stage(name="logprobs", worker="actor", role="actor", reads=("a",), writes=("b",)),
            Stage(name="train", worker="actor", role="actor", reads=("b",), trains=True),
        ),
        feeds=("a",),
    )
    plan = plan_for_mode(graph, TWO, "hybrid")
    text = mistake(change(plan, "train", devices=(0,), num_ranks=1), graph, TWO)
    assert "plan.train.devices=[0] differs from plan.logprobs.devices=[0, 1]; both run in the processes of" in text
    assert "plan.train.num_ranks=1 differs from plan.logprobs.num_ranks=2" in text
    text = mistake(change(plan, "train", num_ranks_per_replica=2), graph, TWO)
    assert "plan.train.num_ranks_per_replica=2 differs from plan.logprobs.num_ranks_per_replica=1" in text
    both = change(change(plan, "train", num_ranks_per_replica=2), "logprobs", num_ranks_per_replica=2)
    assert "worker group 'actor' has the stages logprobs, train, whose chunks" in mistake(both, graph, TWO)


def test_ranks_may_share_devices_or_span_them(grpo):
    plan = plan_for_mode(grpo, FOUR, "collocated")
    for num_ranks in (1, 2, 4, 8, 12):
        change(plan, "rollout", num_ranks=num_ranks).validate(grpo, FOUR)
    for num_ranks, near in [(3, "2 or 1"), (5, "2 or 8"), (6, "8 or 2"), (11, "12 or 8")]:
        assert mistake(change(plan, "rollout", num_ranks=num_ranks), grpo, FOUR) == (
            f"plan.rollout.num_ranks={num_ranks} is neither a multiple nor a divisor of its 4 devices; "
            f"use 4 (one rank per device) or {near}"
        )


def test_suggested_numbers_of_ranks_divide_the_parts_of_a_stage(grpo):
    stages = tuple(replace(stage, num_parts=6, dispatch="key") if stage.trains else stage for stage in grpo.stages)
    in_parts = replace(grpo, stages=stages)
    plan = plan_for_mode(in_parts, FOUR, "collocated")
    assert mistake(change(plan, "actor", num_ranks=3), in_parts, FOUR) == (
        "plan.actor.num_ranks=3 is neither a multiple nor a divisor of its 4 devices; use 2 or 1, because the ranks "
        "also have to divide its 6 parts"
    )


def test_replicas_are_consecutive_ranks_each_on_its_devices(grpo):
    plan = plan_for_mode(grpo, FOUR, "collocated", num_ranks_per_replica={"actor": 2, "reward": 3})
    assert [plan.stage(name).num_replicas for name in ("rollout", "actor", "reward")] == [4, 2, 1]
    assert plan.stage("reward").num_ranks == 3, "on the host as many as a replica has"
    assert [plan.stage("actor").devices_of(rank) for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    wide = plan_for_mode(grpo, FOUR, "collocated", num_ranks={"actor": 2}, num_ranks_per_replica={"actor": 2})
    assert [wide.stage("actor").devices_of(rank) for rank in range(2)] == [(0, 1), (2, 3)]
    assert Plan.from_json(plan.to_json()) == plan
    assert "num_ranks_per_replica.actor=2" in plan.reason


def spanning(grpo, span: int):
    """The flow with a rollout whose ranks compute on so many devices each."""
    stages = (replace(s, devices_per_rank=span) if s.name == "rollout" else s for s in grpo.stages)
    return replace(grpo, stages=tuple(stages))


def test_a_rank_has_as_many_devices_as_its_stage_computes_on(grpo):
    engines = spanning(grpo, 2)
    plan = plan_for_mode(engines, FOUR, "collocated")
    assert [plan.stage("rollout").devices_of(rank) for rank in range(2)] == [(0, 1), (2, 3)]
    assert plan.stage("actor").num_ranks == 4, "of the rollout alone"
    assert mistake(change(plan, "rollout", num_ranks=4), engines, FOUR) == (
        "plan.rollout.num_ranks=4 on 4 devices, but a rank computes on 2 of them; use 2"
    )
    assert mistake(change(plan, "rollout", num_ranks=1), engines, FOUR).endswith("a rank computes on 2 of them; use 2")
    odd = change(plan_for_mode(engines, FOUR, "hybrid"), "rollout", devices=(0, 1, 2), num_ranks=3)
    assert "3 devices are not a multiple of the 2 that a rank computes on; use 2 or 4" in mistake(odd, engines, FOUR)
    change(plan_for_mode(spanning(grpo, 1), FOUR, "collocated"), "rollout", num_ranks=8).validate(
        spanning(grpo, 1), FOUR
    )


def test_a_group_computes_on_one_kind_of_device(grpo):
    mixed = Cluster(
        devices=(
            Device(index=0, kind="cuda", name="gpu", memory_bytes=1),
            Device(index=1, kind="cpu", name="cpu:0", memory_bytes=1),
        )
    )
    plan = plan_for_mode(grpo, mixed, "collocated")
    assert plan.stage("actor").devices == (0,)
    text = mistake(replace(change(plan, "actor", devices=(0, 1)), mode="hybrid"), grpo, mixed)
    assert "plan.actor.devices=[0, 1] mixes cpu and cuda devices" in text
    replace(change(plan, "actor", devices=(1,)), mode="hybrid").validate(grpo, mixed)


def test_disaggregated_means_that_training_and_generation_share_nothing(grpo):
    plan = plan_for_mode(grpo, FOUR, "disaggregated")
    moved = change(plan, "actor", devices=(1, 2, 3), num_ranks=3)
    assert "worker groups 'actor' (training) and 'reference' (generation) share device 1;" in mistake(moved, grpo, FOUR)
    replace(moved, mode="hybrid").validate(grpo, FOUR)


def test_a_cycle_shares_a_turn_and_hands_over_before_the_batch_is_whole(embodied):
    plan = plan_for_mode(embodied, TWO, "collocated")
    assert "they feed each other in a cycle" in mistake(
        change(change(plan, "policy", turn=1), "actor", turn=2), embodied, TWO
    )
    text = mistake(change(plan, "env", granularity=0), embodied, TWO)
    assert "part of the cycle env <-> policy and cannot wait for the whole batch" in text
    assert "plan.actor.granularity=3: the stage has whole_batch=True; use 0" in mistake(
        change(plan, "actor", granularity=3), embodied, TWO
    )


def test_turns_on_disjoint_devices_cannot_close_a_circle_of_waiting():
    """Device 0 serves d before a, device 1 serves b before c, while b waits for a and d for c."""
    graph = FlowGraph(
        name="f",
        stages=tuple(
            Stage(name=name, worker=name, role=name, reads=reads, writes=writes)
            for name, reads, writes in [
                ("a", ("in",), ("ab",)),
                ("b", ("ab",), ("out",)),
                ("c", ("in",), ("cd",)),
                ("d", ("cd",), ("out",)),
            ]
        ),
        feeds=("in",),
        collects=("out",),
    )
    place = {"a": (0, 1), "d": (0, 0), "b": (1, 0), "c": (1, 1)}
    stages = tuple(
        StagePlan(stage=s, devices=(device,), num_ranks=1, granularity=1, offload=True, turn=turn)
        for s, (device, turn) in place.items()
    )
    plan = Plan(flow="f", mode="hybrid", stages=stages, reason="by hand")
    assert "turns must not decrease along the flow" in mistake(plan, graph, TWO)


def test_an_unknown_stage_is_named_with_the_nearest(collocated):
    with pytest.raises(PlanError, match="plan has no stage 'acter'; did you mean 'actor'"):
        collocated.stage("acter")


def test_json_round_trip_is_exact_and_stable(grpo):
    plan = plan_for_mode(grpo, FOUR, "hybrid")
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    tree = json.loads(text)
    assert tree["format"] == 1
    assert list(tree) == sorted(tree)
    assert list(tree["stages"][0]) == sorted(tree["stages"][0])
    assert tree["stages"][0]["devices"] == [0, 1]
    assert text.endswith("}\n")


def edit(plan, **changes):
    """The plan's JSON with `stages[2]` changed (None removes the key)."""
    tree = json.loads(plan.to_json())
    for key, value in changes.items():
        if value is None:
            del tree["stages"][2][key]
        else:
            tree["stages"][2][key] = value
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"granularity": "one"}, "plan.stages[2].granularity='one' is a string; expected an integer"),
        ({"granularity": 1.5}, "plan.stages[2].granularity=1.5 is a number with a fraction; expected an integer"),
        ({"granularity": True}, "plan.stages[2].granularity=True is true or false; expected an integer"),
        ({"offload": 1}, "plan.stages[2].offload=1 is an integer; expected true or false"),
        ({"devices": 0}, "plan.stages[2].devices=0 is an integer; expected a list"),
        ({"devices": [0, "1"]}, "plan.stages[2].devices[1]='1' is a string; expected an integer"),
        ({"turns": 3}, "plan.stages[2].turns is not a known key; did you mean 'turn'?"),
        ({"turn": None}, "plan.stages[2].turn is missing"),
    ],
)
def test_json_names_the_place_of_a_mistake(collocated, changes, text):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(edit(collocated, **changes))
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan is not valid JSON: Expecting value at line 1, column 1"),
        ('{"format": 1,\n "flow" "x"}', "plan is not valid JSON: Expecting ':' delimiter at line 2"),
        ("[]", "plan is a list; expected an object"),
        ("{}", "plan.format is missing"),
        ('{"format": 2}', "plan.format=2: this version of rlinf-sched reads format 1"),
        ('{"format": true}', "plan.format=True"),
        ('{"format": 1, "flow": null}', "plan.flow=None is null; expected a string"),
        ('{"format": 1, "flow": "f", "mode": "x"}', "plan.mode='x' is not allowed; use one of collocated, "),
        ('{"format": 1, "flow": "f", "flow": "g"}', "the key 'flow' occurs twice"),
        ('{"format": 1, "flow": "f", "mode": "hybrid", "stages": [3]}', "plan.stages[0] is an integer; expected an"),
    ],
)
def test_json_that_is_no_plan(text, message):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    assert message in str(caught.value)
