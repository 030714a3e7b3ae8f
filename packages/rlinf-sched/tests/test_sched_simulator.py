"""Small plans whose timelines are worked out by hand, what is refused, and that equal inputs give equal timelines."""

import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from rlinf_sched import (
    Cluster,
    FlowGraph,
    InstanceProfile,
    ItemCosts,
    Links,
    Plan,
    PlanError,
    Problem,
    ProblemError,
    Profiles,
    SchedError,
    Stage,
    StagePlan,
    StageProfile,
    TimePoint,
    WeightEdge,
)
from rlinf_sched.flow_graph import Dispatch
from rlinf_sched.plan import Mode
from rlinf_sched.profile import Batching
from rlinf_sched.simulator import simulate, simulation

GIB = 1 << 30


def cluster(num_devices: int, latency_s: float = 0.0) -> Cluster:
    devices = Cluster.cuda_nodes(1, num_devices, name="gpu", memory_bytes=80 * GIB).devices
    return Cluster(devices=devices, links=Links(host_bytes_per_s=GIB, node_bytes_per_s=4, latency_s=latency_s))


def profile(
    seconds: float, batching: Batching = "sum", costs=None, rounds=1, weights_bytes=0, **fields
) -> StageProfile:
    """A profile of `seconds` for each item."""
    instance = InstanceProfile(points=(TimePoint(num_items=1, seconds=seconds),), **fields)
    costs = costs or ItemCosts()
    return StageProfile(
        instances=(instance,), batching=batching, costs=costs, rounds=rounds, weights_bytes=weights_bytes
    )


def two_stages(max_staleness=0, item_bytes=0) -> FlowGraph:
    return FlowGraph(
        name="f",
        stages=(
            Stage(name="rollout", worker="rollout", role="rollout", reads=("prompts",), writes=("samples",)),
            Stage(name="actor", worker="actor", role="actor", reads=("samples",), trains=True),
        ),
        weight_edges=(WeightEdge(source="actor", target="rollout"),),
        feeds=("prompts",),
        item_bytes={"samples": item_bytes},
        max_staleness=max_staleness,
    )


def plan_of(mode: Mode = "hybrid", **stages) -> Plan:
    """Each stage as (devices, ranks, granularity, offload, turn)."""
    fields = ("devices", "num_ranks", "granularity", "offload", "turn")
    return Plan(
        flow="f",
        mode=mode,
        stages=tuple(StagePlan(stage=name, **dict(zip(fields, row, strict=True))) for name, row in stages.items()),
        reason="by hand",
    )


def problem_of(flow: FlowGraph, num_devices: int, num_items: int, latency_s=0.0, **profiles: StageProfile) -> Problem:
    return Problem(
        flow=flow, profiles=Profiles(stages=profiles), cluster=cluster(num_devices, latency_s), num_items=num_items
    )


def times(timeline, stage, kind="compute"):
    spans = timeline.of(stage, kind)
    return [(timeline.start_s[i], timeline.end_s[i]) for i in spans]


def test_a_turn_that_waited_for_devices_waited_for_who_had_them():
    """The actor's first hand-over lies ready at 1 s, and at 4 s the rollout is done with one of the actor's devices;
    the rank on the other one waited for it too."""
    problem = problem_of(two_stages(), 2, 4, rollout=profile(1), actor=profile(2))
    timeline = simulate(problem, plan_of(rollout=((0,), 1, 1, False, 0), actor=((0, 1), 2, 1, False, 1)))
    for span in timeline.of("actor")[:2]:
        assert timeline.end_s[timeline.cause[span]] == timeline.start_s[span] == 4
    segments = timeline.critical_path
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(segments))
    assert [(s.start_s, s.end_s) for s in segments if s.stage == "rollout"] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_a_pipeline_of_two_stages():
    """Hand-overs of 2 take 2 s in the rollout, 4 s in the actor, and 0.5 s + 2 x 2 bytes / (4 bytes/s) between."""
    problem = problem_of(two_stages(item_bytes=2), 2, 6, latency_s=0.5, rollout=profile(1), actor=profile(2, step_s=3))
    plan = plan_of("disaggregated", rollout=((0,), 1, 2, False, 0), actor=((1,), 1, 2, False, 1))
    timeline = simulate(problem, plan)
    assert times(timeline, "rollout") == [(0, 2), (2, 4), (4, 6)]
    assert times(timeline, "rollout", "transfer") == [(2, 3.5), (4, 5.5), (6, 7.5)]
    assert times(timeline, "actor") == [(3.5, 7.5), (7.5, 11.5), (11.5, 15.5)]
    assert times(timeline, "actor", "step") == [(15.5, 18.5)]
    assert timeline.step_s == 19  # the weight sync takes the latency
    path = [(segment.stage, segment.kind, segment.start_s, segment.end_s) for segment in timeline.critical_path]
    assert path[:3] == [("rollout", "compute", 0, 2), ("rollout", "transfer", 2, 3.5), ("actor", "compute", 3.5, 7.5)]
    assert path[-1] == ("actor", "sync", 18.5, 19)
    assert timeline.num_events == 2 * 7


def test_collocated_stages_pay_for_switching():
    """Offload of 2 GiB (rollout) and 4 GiB (actor) at 1 GiB/s; the actor's onload is given."""
    problem = problem_of(
        two_stages(),
        1,
        4,
        rollout=profile(1, state_bytes=2 * GIB, item_work_bytes=GIB),
        actor=profile(2, state_bytes=4 * GIB, work_bytes=GIB, onload_s=1.0),
    )
    plan = plan_of("collocated", rollout=((0,), 1, 0, True, 0), actor=((0,), 1, 0, True, 1))
    timeline = simulate(problem, plan)
    assert times(timeline, "rollout", "onload") == [(0, 2)]
    assert times(timeline, "rollout") == [(2, 6)]
    assert times(timeline, "rollout", "offload") == [(6, 8)]
    assert times(timeline, "actor", "onload") == [(8, 9)]
    assert times(timeline, "actor") == [(9, 17)]
    assert times(timeline, "actor", "offload") == [(17, 21)]
    assert timeline.step_s == 21
    memory = timeline.memory(0)
    assert memory.times_s.tolist() == [0, 2, 6, 8, 9, 17, 21]
    assert (memory.num_bytes / GIB).tolist() == [2, 6, 2, 4, 5, 4, 0]
    assert memory.peak_bytes == 6 * GIB
    assert [segment.kind for segment in timeline.critical_path] == ["onload", "compute", "offload"] * 2


def test_a_turn_keeps_its_devices_while_it_has_work_and_gives_them_up_when_it_waits():
    """The rollout has a device of its own; critic and actor share the other. The critic waits 1 s after each item."""
    flow = FlowGraph(
        name="f",
        stages=(
            Stage(name="rollout", worker="rollout", role="rollout", reads=("prompts",), writes=("samples",)),
            Stage(name="critic", worker="critic", role="critic", reads=("samples",), writes=("values",)),
            Stage(name="actor", worker="actor", role="actor", reads=("values",), trains=True),
        ),
        feeds=("prompts",),
    )
    problem = problem_of(flow, 2, 3, rollout=profile(2), critic=profile(1), actor=profile(1))
    plan = plan_of(
        rollout=((0,), 1, 1, False, 0), critic=((1,), 1, 1, False, 1), actor=((1,), 1, 1, False, 2)
    )  # fmt: skip
    timeline = simulate(problem, plan)
    assert times(timeline, "critic") == [(2, 3), (4, 5), (6, 7)]
    assert times(timeline, "actor") == [(3, 4), (5, 6), (7, 8)]


def embodied(env_dispatch: Dispatch = "key") -> FlowGraph:
    return FlowGraph(
        name="f",
        stages=(
            Stage(name="env", worker="env", role="env", reads=("act",), writes=("obs",), dispatch=env_dispatch),
            Stage(name="policy", worker="policy", role="rollout", reads=("obs",), writes=("act", "episodes")),
        ),
        collects=("episodes",),
    )


def test_items_go_round_a_cycle_and_stay_with_their_instance():
    """Two groups of environments take turns with one policy: while one computes the other is decided on."""
    problem = problem_of(embodied(), 3, 4, env=profile(1, rounds=2), policy=profile(1, rounds=2))
    plan = plan_of(env=((0, 1), 2, 2, False, 0), policy=((2,), 1, 2, False, 0))
    timeline = simulate(problem, plan)
    assert times(timeline, "env") == [(0, 2), (0, 2), (4, 6), (6, 8)]
    assert times(timeline, "policy") == [(2, 4), (4, 6), (6, 8), (8, 10)]
    assert timeline.rank[timeline.of("env")].tolist() == [0, 1, 0, 1]
    assert timeline.step_s == 10


def test_stages_of_a_cycle_that_share_a_device_compute_one_at_a_time():
    problem = problem_of(embodied("any"), 1, 2, env=profile(1, rounds=2), policy=profile(2, rounds=2))
    plan = plan_of("collocated", env=((0,), 1, 1, False, 0), policy=((0,), 1, 1, False, 0))
    timeline = simulate(problem, plan)
    assert times(timeline, "env") == [(0, 1), (1, 2), (4, 5), (7, 8)]
    assert times(timeline, "policy") == [(2, 4), (5, 7), (8, 10), (10, 12)]


def test_a_cycle_that_starves_takes_what_there_is():
    """Hand-overs of three and of two: at 5 s two items lie with env, one with policy, and nothing moves."""
    problem = problem_of(embodied("any"), 2, 3, env=profile(1, rounds=2), policy=profile(1, rounds=2))
    plan = plan_of(env=((0,), 1, 3, False, 0), policy=((1,), 1, 2, False, 0))
    timeline = simulate(problem, plan)
    assert times(timeline, "env") == [(0, 3), (5, 7), (9, 10)]
    assert times(timeline, "policy") == [(3, 5), (7, 9), (10, 12)]
    assert timeline.num_items[timeline.of("env")].tolist() == [3, 2, 1]
    assert timeline.num_items[timeline.of("policy")].tolist() == [2, 2, 2]


def test_an_instance_waits_for_no_more_items_than_it_owns():
    """Two of three items belong to rank 0 and one to rank 1, which begins with that one though hand-overs hold two."""
    problem = problem_of(embodied(), 3, 3, env=profile(1, rounds=2), policy=profile(1, rounds=2))
    plan = plan_of(env=((0, 1), 2, 2, False, 0), policy=((2,), 1, 1, False, 0))
    assert times(simulate(problem, plan), "env")[:2] == [(0, 2), (0, 1)]


def test_a_cycle_waits_for_what_is_still_to_come():
    """An item every 3 s; the cycle takes two at a time, so it begins with the second."""
    flow = FlowGraph(
        name="f",
        stages=(
            Stage(name="source", worker="source", role="env", reads=("in",), writes=("new",)),
            Stage(name="agent", worker="agent", role="rollout", reads=("new", "again"), writes=("again", "out")),
        ),
        feeds=("in",),
        collects=("out",),
    )
    problem = problem_of(flow, 2, 2, source=profile(3), agent=profile(1, rounds=2))
    plan = plan_of(source=((0,), 1, 1, False, 0), agent=((1,), 1, 2, False, 1))
    assert times(simulate(problem, plan), "agent") == [(6, 8), (8, 10)]


def test_continuous_batching_of_three_items():
    """Items of costs 0.5, 1 and 1.5 in some order. n items in the engine take n seconds, so each of three advances at a
    third, of two at half."""
    costs = ItemCosts(spread="samples", samples=(1, 2, 3))
    order = costs.typical(3).tolist()
    problem = problem_of(two_stages(), 2, 3, rollout=profile(1, "continuous", costs, max_items=3), actor=profile(0.125))
    plan = plan_of("disaggregated", rollout=((0,), 1, 1, False, 0), actor=((1,), 1, 1, False, 1))
    timeline = simulate(problem, plan)
    assert sorted(order) == [0.5, 1.0, 1.5]
    assert times(timeline, "rollout") == [(0, 3)]
    assert times(timeline, "actor") == [(1.5, 1.625), (2.5, 2.625), (3, 3.125)]  # 3 x 0.5, 2 x 0.5, 0.5 later
    assert timeline.width[timeline.of("rollout")].tolist() == [3]

    crowded = replace(problem, profiles=Profiles(stages={
        "rollout": profile(1, "continuous", costs, max_items=1), "actor": profile(0.125)
    }))  # fmt: skip
    assert [start for start, _ in times(simulate(crowded, plan), "actor")] == pytest.approx(np.cumsum(order))


def test_staleness_1_overlaps_the_next_generation_with_training():
    """Rollout 4 s, actor 6 s, sync 1 s. Synchronous: 11 s. With k = 1 the actor never waits: 6 s."""
    profiles = {"rollout": profile(4), "actor": profile(6, weights_bytes=4)}
    plan = plan_of("disaggregated", rollout=((0,), 1, 0, False, 0), actor=((1,), 1, 0, False, 1))
    assert simulate(problem_of(two_stages(), 2, 1, 0.0, **profiles), plan).step_s == 11
    timeline = simulate(problem_of(two_stages(max_staleness=1), 2, 1, 0.0, **profiles), plan)
    assert timeline.num_steps == 24
    assert times(timeline, "rollout")[:6] == [(0, 4), (4, 8), (11, 15), (17, 21), (23, 27), (29, 33)]
    assert times(timeline, "actor")[:6] == [(4, 10), (10, 16), (16, 22), (22, 28), (28, 34), (34, 40)]
    assert timeline.step_s == 6


def test_an_engine_takes_in_the_next_steps_items_beside_the_last_of_a_step():
    """Room for two; of the two items of a step the first takes 0.5 s and the other 1.5 s, alone or not. Training takes
    0.5 s and begins when both are there."""
    engine = InstanceProfile(points=(TimePoint(num_items=1, seconds=1), TimePoint(num_items=2, seconds=1)), max_items=2)
    costs = ItemCosts(spread="samples", samples=(1, 3))
    assert costs.typical(2).tolist() == [0.5, 1.5]
    rollout = StageProfile(instances=(engine,), batching="continuous", costs=costs)
    plan = plan_of("disaggregated", rollout=((0,), 1, 2, False, 0), actor=((1,), 1, 2, False, 1))
    problem = problem_of(two_stages(max_staleness=1), 2, 2, rollout=rollout, actor=profile(0.25))
    timeline = simulate(problem, plan)
    # Step 0 is inside until 1.5, step 1 from 0.5 until 2.5; step 2 enters when step 0 ends.
    assert times(timeline, "rollout")[:4] == [(0, 0.5), (0.5, 2), (2, 3), (3, 4.5)]
    assert times(timeline, "actor")[:4] == [(1.5, 2), (2.5, 3), (4, 4.5), (5, 5.5)]
    assert timeline.num_items[timeline.of("rollout")].tolist() == [2] * 24
    assert timeline.step_s == 1.25


def test_stages_of_one_worker_group_share_their_state():
    """The policy stays on the device with 2 GiB, once, while it first scores and then trains."""
    flow = FlowGraph(
        name="f",
        stages=(
            Stage(name="score", worker="policy", role="actor", reads=("in",), writes=("scored",)),
            Stage(name="train", worker="policy", role="actor", reads=("scored",), trains=True),
        ),
        feeds=("in",),
    )
    score, train = profile(1, state_bytes=2 * GIB), profile(1, state_bytes=2 * GIB, work_bytes=GIB)
    problem = problem_of(flow, 1, 2, score=score, train=train)
    timeline = simulate(problem, plan_of(score=((0,), 1, 0, False, 0), train=((0,), 1, 0, False, 1)))
    assert (timeline.memory(0).num_bytes / GIB).tolist() == [2, 3, 2]
    assert timeline.memory(0).times_s.tolist() == [0, 2, 4]


def test_the_profile_of_the_product_counts():
    problem = problem_of(two_stages(), 2, 1, rollout=profile(1), actor=profile(1))
    plain = problem.profiles.stages["actor"]
    here = replace(plain.instances[0], device_name="gpu", points=(TimePoint(num_items=1, seconds=7),))
    elsewhere = replace(here, device_name="other", points=(TimePoint(num_items=1, seconds=9),))
    both = Profiles(
        stages={
            **problem.profiles.stages,
            "actor": replace(plain, instances=(*plain.instances, here, elsewhere)),
        }
    )
    plan = plan_of("disaggregated", rollout=((0,), 1, 1, False, 0), actor=((1,), 1, 1, False, 1))
    assert simulate(replace(problem, profiles=both), plan).step_s == 8


def test_devices_of_several_products_need_times_that_hold_for_all():
    problem = problem_of(two_stages(), 3, 1, rollout=profile(1), actor=profile(1))
    devices = (*problem.cluster.devices[:2], replace(problem.cluster.devices[2], name="other"))
    problem = replace(problem, cluster=replace(problem.cluster, devices=devices))
    for_all = problem.profiles.stages["actor"]
    named = replace(for_all.instances[0], device_name="gpu", points=(TimePoint(num_items=1, seconds=7),))

    def with_actor(*instances: InstanceProfile) -> Problem:
        stages = {**problem.profiles.stages, "actor": replace(for_all, instances=instances)}
        return replace(problem, profiles=Profiles(stages=stages))

    plan = plan_of("disaggregated", rollout=((0,), 1, 1, False, 0), actor=((1, 2), 2, 1, False, 1))
    with pytest.raises(PlanError) as raised:
        simulate(with_actor(named, replace(named, device_name="other")), plan)
    assert str(raised.value) == (
        "plan.actor.devices are of several products (gpu, other), but profiles.stages.actor.instances hold for one "
        "each (gpu, other); use devices of one product, or give an instance without device_name and with "
        "num_devices=1, whose times hold for all"
    )
    assert simulate(with_actor(named, *for_all.instances), plan).step_s == 2, "not that of the one"


def test_equal_inputs_give_equal_timelines_and_a_seed_others():
    costs = ItemCosts(spread="lognormal", sigma=1.0)
    problem = problem_of(two_stages(), 4, 64, rollout=profile(1, "continuous", costs), actor=profile(1, costs=costs))
    plan = plan_of("disaggregated", rollout=((0, 1, 2), 3, 1, False, 0), actor=((3,), 1, 4, False, 1))
    one, two, drawn = simulate(problem, plan), simulate(problem, plan), simulate(problem, plan, seed=3)
    for name in ("stage", "rank", "kind", "num_items", "start_s", "end_s", "cause", "step_end_s"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
    assert drawn.step_s == simulate(problem, plan, seed=3).step_s
    assert drawn.step_s != one.step_s


def test_wrong_plans_and_problems_are_refused():
    problem = problem_of(two_stages(), 2, 6, rollout=profile(1), actor=profile(2))
    good = plan_of("disaggregated", rollout=((0,), 1, 2, False, 0), actor=((1,), 1, 2, False, 1))
    with pytest.raises(PlanError, match=r"device 7 does not exist"):
        simulate(problem, plan_of(rollout=((7,), 1, 2, False, 0), actor=((1,), 1, 2, False, 1)))
    with pytest.raises(PlanError, match=r"plan\.rollout\.num_ranks=1: an instance spans 2 of its 2 devices, but"):
        simulate(problem, plan_of(rollout=((0, 1), 1, 2, False, 0), actor=((1,), 1, 2, False, 1)))
    few = replace(problem.profiles.stages["rollout"], max_instances=1)
    limited = replace(problem, profiles=Profiles(stages={**problem.profiles.stages, "rollout": few}))
    with pytest.raises(PlanError, match=r"num_ranks=2 is more than profiles\.stages\.rollout\.max_instances=1"):
        simulate(limited, plan_of(rollout=((0, 1), 2, 2, False, 0), actor=((1,), 1, 2, False, 1)))
    with pytest.raises(ProblemError, match="actor is missing"):
        simulate(replace(problem, profiles=Profiles(stages={"rollout": profile(1)})), good)
    with pytest.raises(SchedError, match="num_steps=0"):
        simulate(problem, good, num_steps=0)
    with pytest.raises(SchedError, match="seed=-1 must not be negative; None takes typical costs"):
        simulate(problem, good, seed=-1)
    with pytest.raises(SchedError, match="no stage 'acter'; did you mean 'actor'"):
        simulate(problem, good).of("acter")


def test_a_standstill_names_who_waits_for_what(monkeypatch):
    """No valid plan stands still, so the flow is broken below the validation: the actor waits for itself."""
    lower = simulation.lower

    def broken(*args, **kwargs):
        lowered = lower(*args, **kwargs)
        lowered.arrays["edge_source"][0] = 1
        return lowered

    monkeypatch.setattr(simulation, "lower", broken)
    problem = problem_of(two_stages(), 2, 6, rollout=profile(1), actor=profile(2))
    plan = plan_of("disaggregated", rollout=((0,), 1, 2, False, 0), actor=((1,), 1, 2, False, 1))
    with pytest.raises(SchedError, match="stands still at 6 s:\n  - actor waits for items of step 0: 0 of 2 are there"):
        simulate(problem, plan)


def test_importing_the_package_loads_no_native_code():
    code = "import sys, rlinf_sched, rlinf_sched.simulator; print('rlinf_sched._C' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_neighbouring_seeds_share_no_draws():
    costs = ItemCosts(spread="lognormal", sigma=1.0)
    drawn = [costs.draw(8, seed, step).tolist() for seed in (3, 4) for step in (0, 1)]
    assert len(set().union(*drawn)) == 4 * 8
    assert drawn[0] == costs.draw(8, 3).tolist()
