"""Processes that share the cores of a node, against plans worked out by hand and against the spans themselves."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sched_generated_problems import problems
from sched_planner_problems import chain

from rlinf_sched import (
    Cluster,
    ClusterError,
    FlowGraph,
    InstanceProfile,
    ItemCosts,
    Plan,
    Problem,
    ProblemError,
    Profiles,
    SchedError,
    Stage,
    StagePlan,
    StageProfile,
    TimePoint,
    simulate,
)
from rlinf_sched.plan import ALL_MODES
from rlinf_sched.planner import best_plan
from rlinf_sched.planner.pools import pools_of
from rlinf_sched.planner.search import Search
from rlinf_sched.profile import Batching
from rlinf_sched.simulator.timeline import COMPUTE, STEP, Timeline

pytestmark = pytest.mark.usefixtures("brief_search")


def profile(
    seconds: float, batching: Batching = "sum", cores: float | None = None, num_devices: int = 0, **fields
) -> StageProfile:
    instance = InstanceProfile(num_devices=num_devices, points=(TimePoint(num_items=1, seconds=seconds),), **fields)
    return StageProfile(instances=(instance,), batching=batching, cores=cores)


def beside_each_other(num_items: int, cpu_cores: int, **profiles: StageProfile) -> Problem:
    """Stages that the driver feeds, none of which waits for another, on slots or on the host."""
    stages = tuple(
        Stage(
            name=name,
            worker=name,
            role="reward",
            reads=(f"to_{name}",),
            needs_device=one.instances[0].num_devices > 0,
        )
        for name, one in profiles.items()
    )
    return Problem(
        flow=FlowGraph(name="f", stages=stages, feeds=tuple(f"to_{name}" for name in profiles)),
        profiles=Profiles(stages=profiles),
        cluster=replace(Cluster.cpu_slots(2, 1 << 30), cpu_cores=cpu_cores),
        num_items=num_items,
    )


def plan_of(**stages) -> Plan:
    """Each stage as (devices, ranks, granularity)."""
    return Plan(
        flow="f",
        mode="hybrid",
        stages=tuple(
            StagePlan(stage=name, devices=devices, num_ranks=ranks, granularity=size, offload=False, turn=turn)
            for turn, (name, (devices, ranks, size)) in enumerate(stages.items())
        ),
        reason="by hand",
    )


def ends(timeline: Timeline, stage: str) -> list[float]:
    return sorted(float(timeline.end_s[i]) for i in timeline.of(stage))


def test_processes_that_want_more_cores_than_there_are_share_them():
    """Three processes of 2 s on two cores work at 2/3 of their pace, and take 3 s."""
    problem = beside_each_other(3, 2, check=profile(2.0))
    assert ends(simulate(problem, plan_of(check=((), 3, 1))), "check") == pytest.approx([3.0] * 3)


def test_processes_go_faster_when_others_are_done():
    """Two checks of 1 s beside two of 3 s on two cores: until 2 s all at half their pace, so that 2 s of work are left
    of the long ones, which have a core each from then on."""
    problem = beside_each_other(2, 2, short=profile(1.0), long=profile(3.0))
    timeline = simulate(problem, plan_of(short=((), 2, 1), long=((), 2, 1)))
    assert ends(timeline, "short") == pytest.approx([2.0, 2.0])
    assert ends(timeline, "long") == pytest.approx([4.0, 4.0])
    assert timeline.step_s == pytest.approx(4.0)


def test_slots_and_the_host_share_cores_and_say_how_many_they_take():
    """A slot that keeps 3 cores busy beside a process of the host that keeps one busy, on two cores: both at half their
    pace until 2 s; then the slot goes on at 2/3 with 2 s of its 3 s of work left. One that waits for others slows
    nobody."""
    heavy = profile(3.0, cores=3, num_devices=1)
    timeline = simulate(
        beside_each_other(1, 2, heavy=heavy, check=profile(1.0)), plan_of(heavy=((0,), 1, 1), check=((), 1, 1))
    )
    assert ends(timeline, "check") == pytest.approx([2.0])
    assert ends(timeline, "heavy") == pytest.approx([5.0])
    waiting = simulate(
        beside_each_other(1, 3, heavy=heavy, judge=profile(1.0, cores=0)), plan_of(heavy=((0,), 1, 1), judge=((), 1, 1))
    )
    assert ends(waiting, "judge") == [1.0]
    assert ends(waiting, "heavy") == [3.0]


def test_what_comes_after_the_items_wants_cores_too():
    """Two processes of 1 s on one core end at 2 s, and what they owe the step, 1 s each, at 4 s."""
    problem = beside_each_other(2, 1, train=profile(1.0, step_s=1.0))
    assert simulate(problem, plan_of(train=((), 2, 1))).step_s == pytest.approx(4.0)


def test_a_gpu_leaves_the_cores_alone_unless_its_profile_says_otherwise():
    flow = FlowGraph(
        name="f",
        stages=(
            Stage(name="check", worker="check", role="reward", reads=("a",), needs_device=False),
            Stage(name="score", worker="score", role="reference", reads=("b",)),
        ),
        feeds=("a", "b"),
    )
    gpus = Cluster.cuda_nodes(2, 1, name="gpu", memory_bytes=1 << 30)

    def check_s(score: StageProfile, device: int) -> float:
        problem = Problem(
            flow=flow,
            profiles=Profiles(stages={"check": profile(1.0), "score": score}),
            cluster=replace(gpus, cpu_cores=1),
            num_items=1,
        )
        return ends(simulate(problem, plan_of(check=((), 1, 1), score=((device,), 1, 1))), "check")[0]

    assert check_s(profile(4.0, num_devices=1), 0) == 1.0
    assert check_s(profile(4.0, num_devices=1, cores=1), 0) == pytest.approx(2.0)
    assert check_s(profile(4.0, num_devices=1, cores=1), 1) == 1.0, "the host's processes are on the first node"


# -- against another simulation ----------------------------------------------------------------------------------------

EIGHTHS = st.integers(1, 24).map(lambda n: n / 8)


@given(
    of_chunks=st.tuples(EIGHTHS, st.integers(1, 4), st.sampled_from([0.5, 1.0, 2.0])),
    of_engines=st.tuples(EIGHTHS, EIGHTHS, st.integers(1, 3), st.integers(1, 3)),
    num_items=st.integers(1, 9),
    cpu_cores=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_hand_overs_and_engines_against_small_steps_of_time(of_chunks, of_engines, num_items, cpu_cores):
    """Each process, and each item in an engine, does in every moment what its share of the cores allows."""
    item_s, num_processes, cores = of_chunks
    first_s, more_s, num_engines, room = of_engines
    unequal = ItemCosts(spread="samples", samples=(1, 2, 4))
    points = (TimePoint(num_items=1, seconds=first_s), TimePoint(num_items=2, seconds=first_s + more_s))
    engine = StageProfile(
        instances=(InstanceProfile(num_devices=0, points=points, max_items=room),),
        batching="continuous",
        costs=unequal,
    )
    checks = replace(profile(item_s, cores=cores), costs=unequal)
    problem = beside_each_other(num_items, cpu_cores, check=checks, answer=engine)
    timeline = simulate(problem, plan_of(check=((), num_processes, 1), answer=((), num_engines, 1)))

    costs = unequal.typical(num_items)
    expected = played(
        cpu_cores,
        checks=([float(cost * item_s) for cost in costs], num_processes, cores),
        answers=(list(map(float, costs)), num_engines, room, lambda n: first_s + more_s * (n - 1)),
        share=-(-num_items // num_engines),
    )
    assert ends(timeline, "check") == pytest.approx(expected[0])
    assert max(ends(timeline, "answer")) == pytest.approx(expected[1])


def played(cpu_cores, *, checks, answers, share) -> tuple[list[float], float]:
    """When each check and the last answer is done: from event to event, every pace anew."""
    (to_check, num_processes, cores), (to_answer, num_engines, room, seconds_of) = checks, answers
    now, last_answer, running, engines, checked = 0.0, 0.0, [], [[] for _ in range(num_engines)], []
    while True:
        while to_check and len(running) < num_processes:
            running.append(to_check.pop(0))
        while to_answer and min(map(len, engines)) < min(room, share):
            min(engines, key=len).append(to_answer.pop(0))
        demand = cores * len(running) + sum(1 for engine in engines if engine)
        pace = min(1.0, cpu_cores / demand) if demand else 1.0
        lefts = [left / pace for left in running]
        lefts += [left * seconds_of(len(engine)) / pace for engine in engines for left in engine]
        if not lefts:
            return sorted(checked), last_answer
        now += min(lefts)
        worked_s = min(lefts) * pace
        running, before = [left - worked_s for left in running if left - worked_s > 1e-9], len(running)
        checked += [now] * (before - len(running))
        for engine in filter(None, engines):
            before, each = len(engine), worked_s / seconds_of(len(engine))
            engine[:] = [left - each for left in engine if left - each > 1e-9]
            last_answer = now if len(engine) < before else last_answer


@given(problems(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_every_hand_over_gets_the_work_that_it_takes(one: tuple[Problem, Plan], cpu_cores: int):
    """The paces that follow from who computes when add up, over each span, to the seconds of its table."""
    problem, placed = one
    cluster = replace(
        problem.cluster,
        devices=tuple(replace(device, kind="cpu") for device in problem.cluster.devices),
        cpu_cores=cpu_cores,
    )
    problem = replace(problem, cluster=cluster)
    try:
        timeline = simulate(problem, placed)
    except SchedError:
        return
    nodes, cores = nodes_and_cores(problem, placed, timeline)
    working = np.flatnonzero(np.isin(timeline.kind, (COMPUTE, STEP)) & (timeline.end_s > timeline.start_s))
    times = np.unique(np.concatenate([timeline.start_s[working], timeline.end_s[working]]))
    middles = (times[1:] + times[:-1]) / 2
    busy = (timeline.start_s[working, None] < middles) & (middles < timeline.end_s[working, None])
    worked_s = np.zeros(len(working))
    for node in set(nodes[working]):
        here = nodes[working] == node
        pace = np.minimum(1.0, cpu_cores / np.maximum(cores[working][here] @ busy[here], 1e-9))
        worked_s[here] = busy[here] @ (np.diff(times) * pace)
    for span, seconds in zip(working, worked_s, strict=True):
        stage = timeline.stages[timeline.stage[span]]
        stage_profile, instance = problem.profile(stage), problem.instance(placed.stage(stage))
        if timeline.kind[span] == STEP:
            assert seconds == pytest.approx(instance.step_s)
        elif stage_profile.batching != "continuous" and stage_profile.costs.spread == "equal":
            assert seconds == pytest.approx(instance.seconds(int(timeline.num_items[span])))


def nodes_and_cores(problem: Problem, placed: Plan, timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Of each span, the node that it computes on and the cores that it wants there."""
    nodes, cores = [], []
    for stage, rank in zip(timeline.stage, timeline.rank, strict=True):
        devices = timeline.devices_of(timeline.stages[stage], max(rank, 0))
        nodes.append(problem.cluster.devices[devices[0]].node if devices else 0)
        cores.append(max(1, len(devices)))
    return np.array(nodes), np.array(cores, dtype=float)


@given(problems())
@settings(max_examples=30, deadline=None)
def test_cores_enough_change_nothing(one: tuple[Problem, Plan]):
    problem, placed = one
    try:
        expected = simulate(problem, placed).end_s
    except SchedError:
        return
    plenty = replace(problem, cluster=replace(problem.cluster, cpu_cores=1000))
    assert np.array_equal(simulate(plenty, placed).end_s, expected)


# -- what the planner makes of it --------------------------------------------------------------------------------------


def test_the_planner_has_no_more_processes_than_cores_can_run():
    free = beside_each_other(16, 0, check=profile(1.0))
    assert best_plan(free).stage("check").num_ranks == 16
    for allowed, most in ((3, 3), (12, 8)):
        limited = beside_each_other(16, 8, check=replace(profile(1.0), max_instances=allowed))
        assert limited.most_on_host("check") == most
    for cpu_cores, cores, most in ((8, None, 8), (8, 3.0, 2), (2, 3.0, 1), (2, 0.25, 8), (8, 0.0, 16)):
        problem = beside_each_other(16, cpu_cores, check=profile(1.0, cores=cores))
        assert problem.most_on_host("check") == (most if cores != 0 else 0)
        plan = best_plan(problem)
        assert plan.stage("check").num_ranks == most
        assert plan.prediction is not None
        assert plan.prediction.estimate_s == pytest.approx(plan.prediction.step_s, rel=0.5 if cores == 3.0 else 1e-9)


@pytest.mark.parametrize(("num_slots", "reward_s"), [(2, 0.05), (2, 1.0), (4, 0.2)])
def test_a_step_takes_what_the_cores_have_to_compute(num_slots: int, reward_s: float):
    """32 items of 0.5 s in the rollout and in the actor, and their checks, on two cores."""
    profiles = {
        "rollout": profile(0.5, num_devices=1),
        "reward": profile(reward_s),
        "actor": profile(0.5, num_devices=1),
    }
    problem = chain(profiles, replace(Cluster.cpu_slots(num_slots, 1 << 34), cpu_cores=2), num_items=32)
    plan = best_plan(problem)
    least_s = 32 * (0.5 + reward_s + 0.5) / 2
    estimates_s = [candidate.step_s for candidate in Search(problem, pools_of(problem.cluster)).best(ALL_MODES)]
    assert min(estimates_s) == pytest.approx(least_s, rel=0.03)
    assert plan.prediction is not None
    assert least_s <= plan.prediction.step_s * (1 + 1e-9) < 1.03 * least_s


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ClusterError, match=r"cluster\.cpu_cores=-1 must be from 0"):
        replace(Cluster.cpu_slots(1, 1), cpu_cores=-1)
    with pytest.raises(ProblemError, match=r"profiles\.stages\.check\.cores=-0\.5 must be from 0"):
        simulate(beside_each_other(1, 1, check=profile(1.0, cores=-0.5)), plan_of(check=((), 1, 1)))
