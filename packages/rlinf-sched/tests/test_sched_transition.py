"""Transitions: what they consist of, that no overlap of them can deadlock, and what is refused."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_sched import (
    Cluster,
    FlowGraph,
    InstanceProfile,
    Links,
    Plan,
    PlanError,
    Problem,
    Profiles,
    Stage,
    StagePlan,
    StageProfile,
    TimePoint,
)
from rlinf_sched.derive import grpo as derived_grpo
from rlinf_sched.dynamic import Action, Transition, check_transitions, execute, make_transition, transition_seconds
from rlinf_sched.planner import plan


def flow(num_groups: int) -> FlowGraph:
    names = [f"s{i}" for i in range(num_groups)]
    return FlowGraph(
        name="chain",
        stages=tuple(
            Stage(name=name, worker=name, role="reference", reads=(f"c{i}",), writes=(f"c{i + 1}",))
            for i, name in enumerate(names)
        ),
        feeds=("c0",),
        collects=(f"c{num_groups}",),
    )


def plan_of(graph: FlowGraph, owners: list[int]) -> Plan:
    """Device i belongs to group owners[i] alone."""
    stages = tuple(
        StagePlan(
            stage=stage.name,
            devices=(own := tuple(d for d, owner in enumerate(owners) if owner == i)),
            num_ranks=len(own),
            granularity=1,
            offload=False,
            turn=i,
        )
        for i, stage in enumerate(graph.stages)
    )
    return Plan(flow=graph.name, mode="hybrid", stages=stages, reason="drawn")


def random_owners(graph: FlowGraph, num_devices: int, draw: random.Random) -> list[int]:
    """Every group has at least one device."""
    groups = range(len(graph.stages))
    owners = [*groups, *(draw.choice(groups) for _ in range(num_devices - len(groups)))]
    draw.shuffle(owners)
    return owners


def overlapping(seed: int) -> list[Transition]:
    """Two to five transitions of three to six groups on 8 to 32 devices; each moves one to four devices of the
    plan before it to another group."""
    draw = random.Random(seed)
    graph = flow(draw.randint(3, 6))
    owners = random_owners(graph, draw.choice([8, 16, 32]), draw)
    plans = [plan_of(graph, owners)]
    for _ in range(draw.randint(2, 5)):
        for device in draw.sample(range(len(owners)), draw.randint(1, 4)):
            if owners.count(owners[device]) > 1:
                owners[device] = draw.choice([g for g in range(len(graph.stages)) if g != owners[device]])
        plans.append(plan_of(graph, owners))
    return [make_transition(graph, *plans[i : i + 2], number=i) for i in range(len(plans) - 1)]


def test_a_thousand_overlapping_transitions_end_in_the_global_order_and_many_do_not_in_each_groups_own():
    stuck = 0
    for seed in range(1000):
        transitions = overlapping(seed)
        check_transitions(transitions)
        outcome = execute(transitions, seed=seed)
        assert outcome.finished, outcome.waiting
        stuck += not execute(transitions, order="component", seed=seed).finished
    assert stuck > 200, "the trial can tell a deadlock"


@given(seed=st.integers(0, 1 << 30), interleaving=st.integers(0, 1 << 30))
def test_a_transition_leaves_each_group_with_its_new_devices(seed, interleaving):
    draw = random.Random(seed)
    graph = flow(4)
    before, after = (plan_of(graph, random_owners(graph, 12, draw)) for _ in range(2))
    transition = make_transition(graph, before, after, number=3)
    for stage in graph.stages:
        held = set(before.stage(stage.name).devices)
        for action in transition.actions:
            if action.worker == stage.worker and action.kind in ("release", "acquire"):
                assert held.issuperset(action.devices) == (action.kind == "release")
                held = held - set(action.devices) if action.kind == "release" else held | set(action.devices)
        assert held == set(after.stage(stage.name).devices)
    assert execute([transition], seed=interleaving).finished


def test_a_swap_of_two_groups():
    graph = flow(2)
    before, after = plan_of(graph, [0, 1]), plan_of(graph, [1, 0])
    transition = make_transition(graph, before, after, number=0)
    kinds = [action.kind for action in transition.actions]
    assert kinds == [kind for kind in ("leave", "offload", "release", "acquire", "onload", "join") for _ in range(2)]
    stuck = execute([transition], order="component")
    assert not stuck.finished
    assert stuck.waiting == ("s0 waits for device 1 in transition 0", "s1 waits for device 0 in transition 0")
    assert make_transition(graph, before, before, number=0).actions == ()


def test_what_is_refused():
    release = Action(kind="release", worker="a", devices=(0,))
    acquire = Action(kind="acquire", worker="a", devices=(1,))
    with pytest.raises(PlanError, match="release of a comes after acquire; put it before"):
        check_transitions([Transition(number=0, actions=(acquire, release))])
    one = Transition(number=1, actions=(release, acquire))
    with pytest.raises(PlanError, match=r"number=1 must be above 1(?s:.)*releases device 0, which it does not hold"):
        check_transitions([one, one])
    with pytest.raises(PlanError, match="names a device twice"):
        check_transitions([Transition(number=0, actions=(Action(kind="acquire", worker="a", devices=(1, 1)),))])


def test_the_cost_is_of_the_slowest_group():
    problem = derived_grpo(num_devices=16, num_prompts=64)
    before = plan(problem, modes=["disaggregated"])
    after = plan(problem, modes=["collocated"])
    assert transition_seconds(problem, before, before, restart_s=9) == 0
    cost = transition_seconds(problem, before, after)
    assert 0 < cost < 10
    assert transition_seconds(problem, before, after, restart_s=9) == pytest.approx(cost + 9)


def test_the_cost_is_that_of_the_profile_for_these_devices():
    """A swap of one device each: 3 bytes off, 3 on at 1 byte/s, weights of 4 bytes at 2 bytes/s."""
    graph = flow(2)
    here, elsewhere = (
        InstanceProfile(points=(TimePoint(num_items=1, seconds=1.0),), device_name=name, state_bytes=num_bytes)
        for name, num_bytes in (("", 3), ("other", 1000))
    )
    stage = StageProfile(instances=(here, elsewhere), weights_bytes=4)
    problem = Problem(
        flow=graph,
        profiles=Profiles(stages={"s0": stage, "s1": stage}),
        cluster=Cluster(
            devices=Cluster.cuda_nodes(1, 4, name="gpu", memory_bytes=1 << 30).devices,
            links=Links(host_bytes_per_s=1, network_bytes_per_s=2),
        ),
        num_items=4,
    )
    before, after = plan_of(graph, [0, 1]), plan_of(graph, [1, 0])
    assert transition_seconds(problem, before, after) == 3 + 3 + 4 / 2
    wide = StagePlan(stage="s1", devices=(2, 3), num_ranks=1, granularity=1, offload=False, turn=1)
    with pytest.raises(PlanError, match=r"plan\.s1\.num_ranks=1: an instance spans 2 of its 2 devices"):
        transition_seconds(problem, before, replace(after, stages=(after.stages[0], wide)))
