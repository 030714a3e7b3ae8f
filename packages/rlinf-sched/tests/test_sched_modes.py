"""The three rules, their overrides, and random flows: every mode's plan validates, round trips and cannot deadlock."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from rlinf_sched import Cluster, FlowGraph, Plan, PlanError, Stage, flow_diagram, plan_for_mode


def cluster(num_devices):
    return Cluster.cpu_slots(num_devices, memory_bytes=1 << 30)


def devices(plan):
    return {s.stage: s.devices for s in plan.stages}


def test_collocated(grpo):
    plan = plan_for_mode(grpo, cluster(2), "collocated")
    assert devices(plan) == {"rollout": (0, 1), "reference": (0, 1), "reward": (), "actor": (0, 1)}
    assert {s.stage: s.num_ranks for s in plan.stages} == {"rollout": 2, "reference": 2, "reward": 1, "actor": 2}
    assert {s.granularity for s in plan.stages} == {0}
    assert {s.stage: s.offload for s in plan.stages} == {
        "rollout": True, "reference": True, "reward": False, "actor": True,
    }  # fmt: skip
    assert [s.turn for s in plan.stages] == [0, 1, 2, 3]


def test_collocated_cycle_hands_over_item_by_item(embodied):
    plan = plan_for_mode(embodied, cluster(1), "collocated")
    assert {s.stage: (s.granularity, s.turn) for s in plan.stages} == {"env": (1, 0), "policy": (1, 0), "actor": (0, 1)}


@pytest.mark.parametrize(
    ("num_devices", "rollout", "reference", "actor"),
    [
        (2, (0,), (0,), (1,)),
        (3, (0,), (1,), (2,)),
        (4, (0,), (1,), (2, 3)),
        (5, (0, 1), (2,), (3, 4)),
        (8, (0, 1), (2, 3), (4, 5, 6, 7)),
    ],
)
def test_disaggregated(grpo, num_devices, rollout, reference, actor):
    plan = plan_for_mode(grpo, cluster(num_devices), "disaggregated")
    assert devices(plan) == {"rollout": rollout, "reference": reference, "reward": (), "actor": actor}
    assert {s.stage: s.granularity for s in plan.stages} == {"rollout": 1, "reference": 1, "reward": 1, "actor": 4}
    assert not any(s.offload for s in plan.stages)


def test_disaggregated_moves_the_cut_so_that_every_group_has_a_device_of_its_own(grpo):
    critic = Stage(name="critic", worker="critic", role="critic", reads=("scored",), trains=True)
    critic2 = Stage(name="critic2", worker="critic2", role="critic", reads=("scored",))
    graph = replace(grpo, stages=(*grpo.stages, critic, critic2))
    assert graph.training_groups == ("actor", "critic", "critic2")
    plan = plan_for_mode(graph, cluster(5), "disaggregated")
    assert sorted(d for s in plan.stages for d in s.devices) == [0, 1, 2, 3, 4]
    assert plan.stage("rollout").devices == (0,)


def test_a_flow_with_one_side_only_gets_all_devices():
    graph = FlowGraph(
        name="eval",
        stages=(Stage(name="rollout", worker="rollout", role="rollout", reads=("in",), writes=("out",)),),
        feeds=("in",),
        collects=("out",),
    )
    for mode in ("disaggregated", "hybrid"):
        plan = plan_for_mode(graph, cluster(4), mode)
        assert plan.stage("rollout").devices == (0, 1, 2, 3)
        assert plan.stage("rollout").offload is False
    train = replace(graph, stages=(replace(graph.stages[0], trains=True),))
    assert plan_for_mode(train, cluster(4), "disaggregated").stage("rollout").devices == (0, 1, 2, 3)


def test_hybrid_spreads_generation_and_trains_everywhere(embodied):
    plan = plan_for_mode(embodied, cluster(5), "hybrid")
    assert devices(plan) == {"env": (0, 1, 2), "policy": (3, 4), "actor": (0, 1, 2, 3, 4)}
    assert {s.stage: (s.granularity, s.turn, s.offload) for s in plan.stages} == {
        "env": (1, 0, True),
        "policy": (1, 0, True),
        "actor": (0, 1, True),
    }


def test_hybrid_with_one_generation_group_gives_it_half(grpo):
    graph = replace(grpo, stages=tuple(s for s in grpo.stages if s.name != "reference"))
    graph = replace(graph, stages=(replace(graph.stages[0], writes=("referenced",)), *graph.stages[1:]))
    plan = plan_for_mode(graph, cluster(4), "hybrid")
    assert devices(plan) == {"rollout": (0, 1), "reward": (), "actor": (0, 1, 2, 3)}


def test_hybrid_with_more_groups_than_devices_goes_round_robin(grpo):
    judge = Stage(name="judge", worker="judge", role="judge", reads=("scored",), writes=("judged",))
    graph = replace(grpo, stages=(*grpo.stages[:3], judge, replace(grpo.stages[3], reads=("judged",))))
    plan = plan_for_mode(graph, cluster(2), "hybrid")
    assert devices(plan)["judge"] == devices(plan)["rollout"] == (0,)
    assert devices(plan)["reference"] == (1,)


@pytest.mark.parametrize("mode", ["disaggregated", "hybrid"])
def test_one_device_is_not_enough_to_part(grpo, mode):
    with pytest.raises(PlanError, match=r"needs at least 2 devices, this cluster has 1 .* use mode 'collocated'"):
        plan_for_mode(grpo, cluster(1), mode)


def test_overrides_replace_the_rule_and_are_told_in_the_reason(grpo):
    plan = plan_for_mode(
        grpo,
        cluster(4),
        "hybrid",
        granularity={"actor": 8},
        devices={"rollout": [3]},
        num_ranks={"reward": 3, "actor": 2},
    )
    assert plan.stage("rollout").devices == (3,)
    assert plan.stage("rollout").num_ranks == 1
    assert plan.stage("reference").devices == (2, 3)
    assert plan.stage("actor").granularity == 8
    assert plan.stage("actor").num_ranks == 2
    assert plan.stage("reward").num_ranks == 3
    assert plan.reason.endswith(
        "; chosen by the user: devices.rollout=[3], num_ranks.actor=2, num_ranks.reward=3, granularity.actor=8"
    )


def test_an_override_can_take_a_group_off_the_shared_devices(grpo):
    plan = plan_for_mode(
        grpo,
        cluster(4),
        "hybrid",
        devices={"rollout": [0], "reference": [1], "actor": [1, 2, 3]},
        num_ranks={"actor": 3},
    )
    assert {s.stage: s.offload for s in plan.stages} == {
        "rollout": False, "reference": True, "reward": False, "actor": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"granularity": {"actr": 4}}, "granularity.actr: the flow has no stage 'actr'; did you mean 'actor'?"),
        ({"devices": {"rolout": [0]}}, "devices.rolout: the flow has no worker group 'rolout'; did you mean"),
        ({"num_ranks_per_replica": {"x": 1}}, "num_ranks_per_replica.x: the flow has no worker group 'x'"),
        ({"num_ranks": {"x": 1}}, "num_ranks.x: the flow has no worker group 'x'; allowed: rollout, reference"),
        ({"granularity": {"actor": 6}}, "plan.actor.granularity=6 is not a multiple"),
        ({"devices": {"actor": [0, 7]}}, "plan.actor.devices=[0, 7]: device 7 does not exist"),
        ({"devices": {"reward": [0]}}, "plan.reward.devices=[0]: the stage has needs_device=False"),
        ({"num_ranks": {"rollout": 3}}, "plan.rollout.num_ranks=3 is neither a multiple nor a divisor"),
        ({"devices": {"actor": [0]}}, "plan.mode='collocated', but worker group 'actor' has devices [0]"),
    ],
)
def test_overrides_are_validated(grpo, overrides, text):
    with pytest.raises(PlanError) as caught:
        plan_for_mode(grpo, cluster(2), "collocated", **overrides)
    assert text in str(caught.value)


def test_an_unknown_mode(grpo):
    with pytest.raises(PlanError, match="mode='hybird'; did you mean 'hybrid'"):
        plan_for_mode(grpo, cluster(2), "hybird")  # type: ignore[arg-type]


@st.composite
def flows(draw):
    """Random valid flows: every channel with an end missing is given to the driver."""
    num_stages = draw(st.integers(1, 6))
    channels = [f"c{i}" for i in range(draw(st.integers(1, 7)))]
    some = st.lists(st.sampled_from(channels), max_size=3, unique=True).map(tuple)
    group_needs_device = draw(st.lists(st.booleans(), min_size=4, max_size=4))
    stages = []
    for i in range(num_stages):
        group = draw(st.integers(0, 3))
        reads, writes = draw(some), draw(some)
        stages.append(
            Stage(
                name=f"s{i}",
                worker=f"w{group}",
                role=draw(st.sampled_from(["actor", "rollout", "critic", "env"])),
                reads=reads if reads or writes else (channels[0],),
                writes=writes,
                needs_device=group_needs_device[group],
                trains=draw(st.booleans()),
                item_multiple=draw(st.integers(1, 4)),
            )
        )
    reads = {c for s in stages for c in s.reads}
    writes = {c for s in stages for c in s.writes}
    graph = FlowGraph(
        name="random", stages=tuple(stages), feeds=tuple(sorted(reads - writes)), collects=tuple(sorted(writes - reads))
    )
    cyclic = {name for cycle in graph.cycles() for name in cycle}
    whole = draw(st.lists(st.booleans(), min_size=num_stages, max_size=num_stages))
    return replace(
        graph,
        stages=tuple(
            replace(s, whole_batch=w and s.name not in cyclic) for s, w in zip(graph.stages, whole, strict=True)
        ),
    )


@given(flows(), st.integers(2, 9), st.sampled_from(["collocated", "disaggregated", "hybrid"]))
def test_every_mode_plans_every_flow(graph, num_devices, mode):
    plan = plan_for_mode(graph, cluster(num_devices), mode)
    plan.validate(graph, cluster(num_devices))
    assert Plan.from_json(plan.to_json()) == plan
    assert FlowGraph.from_json(graph.to_json()) == graph
    for group, names in graph.workers.items():
        assert (plan.stage(names[0]).devices == ()) == (not graph.stage(names[0]).needs_device), group
    used = {d for s in plan.stages for d in s.devices}
    if graph.training_groups or mode == "collocated":
        assert used in (set(), set(range(num_devices)))
    assert flow_diagram(graph).startswith("flowchart LR\n")


@given(flows(), st.integers(2, 9), st.sampled_from(["collocated", "disaggregated", "hybrid"]))
def test_no_plan_can_deadlock_on_devices(graph, num_devices, mode):
    """Plays the plan: a stage runs once it has its inputs' writers finished and no earlier turn left on its devices."""
    plan = plan_for_mode(graph, cluster(num_devices), mode)
    together = {name: set(turn) for turn in graph.turns() for name in turn}
    successors = graph.successors()
    left = {s.stage for s in plan.stages}
    while left:
        ready = {
            name
            for name in left
            if not any(
                other in left - together[name]
                and (
                    any(target in together[name] for target in successors[other])
                    or (
                        plan.stage(other).turn < plan.stage(name).turn
                        and set(plan.stage(other).devices) & {d for n in together[name] for d in plan.stage(n).devices}
                    )
                )
                for other in left
            )
        }
        assert ready, f"stuck with {left}"
        left -= ready
