"""Profiling: spans made by hand, whose law is known, come back as that law; and the spans of a real flow are enough."""

from dataclasses import replace

import pytest

from rlinf_sched import Cluster, FlowGraph, Stage, WeightEdge, plan_for_mode, simulate
from rlinf_workers import Executor, FlowDefinitionError, FlowRun, LocalLauncher, StepContext
from rlinf_workers.profiling import Profiler, probe_plans
from rlinf_workers.spans import COMPUTE_SPAN, LEASE, SYNC_SPAN, Span
from rlinf_workers.testing.toy_flow import Number, reference_run, toy_flow

pytestmark = pytest.mark.usefixtures("forked_workers")

CLUSTER = Cluster.cpu_slots(2)
GRAPH = FlowGraph(
    name="grpo",
    stages=(
        Stage(name="rollout", worker="rollout", role="rollout", reads=("prompts",), writes=("samples",)),
        Stage(
            name="reward", worker="reward", role="reward", reads=("samples",), writes=("scored",), needs_device=False
        ),
        Stage(name="actor", worker="actor", role="actor", reads=("scored",), trains=True),
    ),
    weight_edges=(WeightEdge(source="actor", target="rollout"),),
    feeds=("prompts",),
)
CYCLE = FlowGraph(
    name="ppo",
    stages=(
        Stage(name="env", worker="env", role="env", reads=("actions",), writes=("observations",), dispatch="key"),
        Stage(
            name="policy",
            worker="policy",
            role="rollout",
            reads=("observations",),
            writes=("actions", "trajectories"),
            dispatch="key",
        ),
        Stage(name="actor", worker="actor", role="actor", reads=("trajectories",), trains=True, whole_batch=True),
    ),
)


class Group:
    def call(self, method):
        assert method == "memory_bytes"
        return [(100, 150), (120, 130)]


class Running:
    """What the profiler asks of an executor."""

    def group(self, name):
        return Group()

    def weights_bytes(self, edge):
        return 8000


class Steps:
    """Spans of one step, laid out by hand."""

    def __init__(self):
        self.spans = []

    def add(self, worker, name, start_s, duration_s, num_items=0, category=COMPUTE_SPAN, collective_s=0.0, devices=()):
        span = Span(
            name=name,
            category=category,
            worker=worker,
            devices=devices,
            start_ns=round(start_s * 1e9),
            duration_ns=round(duration_s * 1e9),
            num_items=num_items,
            collective_ns=round(collective_s * 1e9),
        )
        self.spans.append(span)
        return start_s + duration_s

    def run(self):
        return FlowRun(metrics={}, collected={}, shown_rows=[], spans=self.spans, start_s=0.0, duration_s=1.0)


def grpo_step(granularity):
    """Two ranks, 8 items each: a hand-over of n takes 1 + n s (rollout), 0.1 n s (reward), 2 n s and 3 s (actor)."""
    steps = Steps()
    end_s = 0.0
    for rank, slower in ((0, 1.0), (1, 1.25)):
        now_s = steps.add(f"rollout/{rank}", "wait for lease", 0.0, 0.2, category=LEASE)
        now_s = steps.add(f"rollout/{rank}", "onload", now_s, 0.3, category=LEASE)
        now_s = steps.add(f"rollout/{rank}", "receive weights", now_s, 0.5, category=SYNC_SPAN)
        for _ in range(8 // granularity):
            now_s = steps.add(f"rollout/{rank}", "rollout", now_s, (1 + granularity) * slower, granularity)
        end_s = now_s
    end_s = steps.add("reward/0", "reward", end_s + 0.25, 1.6, 16)
    for rank in (0, 1):  # the rollout leaves when the actor comes
        steps.add(f"rollout/{rank}", "offload", end_s + 0.01, 0.05, category=LEASE)
        now_s = steps.add(f"actor/{rank}", "wait for lease", end_s, 0.13, category=LEASE)
        now_s = steps.add(f"actor/{rank}", "onload", now_s, 0.02, category=LEASE)
        now_s = steps.add(f"actor/{rank}", "actor", now_s, 16.0, 8)
        now_s = steps.add(f"actor/{rank}", "actor", now_s, 3.0)
        steps.add(f"actor/{rank}", "publish weights", now_s, 0.3, category=SYNC_SPAN)
    return steps.run()


@pytest.fixture(scope="module")
def measured():
    plan = plan_for_mode(GRAPH, CLUSTER, "collocated")
    profiler = Profiler(GRAPH, CLUSTER, 16)
    for granularity in (8, 4, 2):
        profiler.observe(grpo_step(granularity), plan)
    profiler.observe_memory(Running(), plan)  # pyright: ignore[reportArgumentType]
    return profiler.measured()


def test_a_stage_takes_what_its_slowest_rank_took(measured):
    (rollout,) = measured.problem.profiles.stages["rollout"].instances
    for granularity in (2, 4, 8, 16):
        assert rollout.seconds(granularity) == pytest.approx(1.25 * (1 + granularity))
    assert measured.fits["rollout", 2].left_out == pytest.approx(0)


def test_what_comes_after_the_last_item_is_once_a_step(measured):
    (actor,) = measured.problem.profiles.stages["actor"].instances
    assert (actor.seconds(8), actor.step_s) == (pytest.approx(16.0), pytest.approx(3.0))


def test_switches_syncs_hops_and_memory_are_in_the_problem(measured):
    problem = measured.problem
    (rollout,) = problem.profiles.stages["rollout"].instances
    assert (rollout.onload_s, rollout.offload_s) == (pytest.approx(0.5), pytest.approx(0.05))
    assert problem.synced_bytes(GRAPH.weight_edges[0]) / problem.cluster.links.node_bytes_per_s == pytest.approx(0.8)
    assert problem.cluster.links.latency_s == pytest.approx(0.25)
    assert (rollout.state_bytes, rollout.work_bytes) == (120, 30)


def test_a_wait_for_a_lease_while_others_compute_is_no_switch():
    """The actor asks for its two devices at once; the rollout computes on one of them for 8 s more, and leaves."""
    plan = plan_for_mode(GRAPH, CLUSTER, "hybrid")
    steps = Steps()
    steps.add("rollout/0", "rollout", 0.0, 9.0, 16, devices=("cpu:0",))
    steps.add("rollout/0", "offload", 9.1, 0.3, category=LEASE, devices=("cpu:0",))
    steps.add("reward/0", "reward", 1.0, 8.1, 16)
    for rank in (0, 1):
        own = (f"cpu:{rank}",)
        now_s = steps.add(f"actor/{rank}", "wait for lease", 1.0, 8.5, category=LEASE, devices=own)
        now_s = steps.add(f"actor/{rank}", "onload", now_s, 0.2, category=LEASE, devices=own)
        steps.add(f"actor/{rank}", "actor", now_s, 16.0, 8, devices=own)
    profiler = Profiler(GRAPH, CLUSTER, 16)
    profiler.observe(steps.run(), plan)
    profiler.observe_memory(Running(), plan)  # pyright: ignore[reportArgumentType]
    (actor,) = profiler.measured().problem.profiles.stages["actor"].instances
    assert actor.onload_s == pytest.approx(0.2 + 0.5 - 0.3)


def test_the_problem_predicts_the_step_that_it_was_made_of(measured):
    plan = plan_for_mode(GRAPH, CLUSTER, "collocated")
    # rollout 11.25, reward 1.6, actor 19, two onloads, an offload on the way, two hops, the sync
    assert simulate(measured.problem, plan).step_s == pytest.approx(31.85 + 0.6 + 0.05 + 0.5 + 0.8, abs=0.3)


def test_the_source_names_machine_date_and_error(measured):
    source = measured.problem.profiles.stages["rollout"].source
    assert "measured on 1 node, 2 devices: 2 x CPU slot" in source
    assert "a size left out is predicted within 0.0%" in source


def test_a_cycle_is_timed_with_the_way_between_its_processes():
    steps, plan = Steps(), plan_for_mode(CYCLE, CLUSTER, "collocated", granularity={"env": 2, "policy": 2})
    now_s = 0.0
    for _ in range(10):  # rounds of two groups on each rank
        for rank in (0, 1):
            steps.add(f"env/{rank}", "env", now_s, 0.5, 2)
            steps.add(f"policy/{rank}", "policy", now_s + 0.6, 0.3, 2)
        now_s += 1.0
    for rank in (0, 1):
        steps.add(f"actor/{rank}", "actor", now_s, 0.0, 2)
        steps.add(f"actor/{rank}", "actor", now_s, 4.0)
    profiler = Profiler(CYCLE, CLUSTER, 4)
    profiler.observe(steps.run(), plan)
    profiler.observe_memory(Running(), plan)  # pyright: ignore[reportArgumentType]
    problem = profiler.measured().problem
    stages = {name: stage.instances[0] for name, stage in problem.profiles.stages.items()}
    assert {name: stage.rounds for name, stage in problem.profiles.stages.items()} == {
        "env": 10,
        "policy": 10,
        "actor": 1,
    }
    # 19 waits of 0.1 s lie between 20 hand-overs; each stage carries its own
    assert stages["env"].seconds(2) == pytest.approx(0.5 + 1.9 / 20)
    assert stages["env"].seconds(1) == pytest.approx(0.25 + 1.9 / 20)
    assert stages["policy"].seconds(2) == pytest.approx(0.3 + 1.9 / 20)
    assert (stages["actor"].seconds(2), stages["actor"].step_s) == (4.0, 0.0)
    assert simulate(problem, plan).step_s == pytest.approx(now_s + 4.0, rel=0.02)


def test_the_stages_of_a_cycle_are_timed_on_the_rank_that_went_round_longest():
    """On rank 0 the env is slow and the policy quick, on rank 1 the other way round: no rank has both slow."""
    steps, plan = Steps(), plan_for_mode(CYCLE, CLUSTER, "collocated", granularity={"env": 2, "policy": 2})
    for rank, env_s, policy_s in ((0, 0.8, 0.1), (1, 0.3, 0.7)):
        now_s = 0.0
        for _ in range(10):
            now_s = steps.add(f"env/{rank}", "env", now_s, env_s, 2)
            now_s = steps.add(f"policy/{rank}", "policy", now_s, policy_s, 2)
    for rank in (0, 1):
        steps.add(f"actor/{rank}", "actor", 10.0, 4.0, 2)
    profiler = Profiler(CYCLE, CLUSTER, 4)
    profiler.observe(steps.run(), plan)
    profiler.observe_memory(Running(), plan)  # pyright: ignore[reportArgumentType]
    problem = profiler.measured().problem
    assert simulate(problem, plan).step_s == pytest.approx(10.0 + 4.0, rel=0.01)


def test_stages_of_a_cycle_that_overlap_on_one_device_share_its_time():
    """Two groups of environments go round on one device; while the policy acts for one, the other is simulated."""
    steps, plan = Steps(), plan_for_mode(CYCLE, CLUSTER, "disaggregated", granularity={"env": 1, "policy": 1})
    assert plan.stage("env").devices == plan.stage("policy").devices == (0,)
    for step in range(20):  # both processes compute all the time, each at half the speed
        steps.add("env/0", "env", step * 1.0, 1.0, 1)
        steps.add("policy/0", "policy", step * 1.0, 1.0, 1)
    steps.add("actor/0", "actor", 20.0, 4.0, 2)
    profiler = Profiler(CYCLE, CLUSTER, 2)
    profiler.observe(steps.run(), plan)
    profiler.observe_memory(Running(), plan)  # pyright: ignore[reportArgumentType]
    problem = profiler.measured().problem
    assert problem.profiles.stages["env"].instances[0].seconds(1) == pytest.approx(0.5)
    assert simulate(problem, plan).step_s == pytest.approx(24.0, rel=0.01)


def test_times_of_two_placements_are_told_apart_by_their_ranks():
    whole = {"rollout": 0, "reward": 0, "actor": 0}
    together, apart = (
        plan_for_mode(GRAPH, CLUSTER, mode, granularity=whole) for mode in ("collocated", "disaggregated")
    )
    profiler = Profiler(GRAPH, CLUSTER, 16)
    profiler.observe(grpo_step(8), together)
    profiler.observe_memory(Running(), together)  # pyright: ignore[reportArgumentType]
    steps = Steps()
    now_s = steps.add("rollout/0", "rollout", 0.0, 10.0, 16)
    now_s = steps.add("reward/0", "reward", now_s, 1.6, 16)
    now_s = steps.add("actor/0", "actor", now_s, 20.0, 16)
    steps.add("actor/0", "actor", now_s, 1.0)
    profiler.observe(steps.run(), apart)
    profiler.observe_memory(Running(), apart)  # pyright: ignore[reportArgumentType]
    measured = profiler.measured()
    one, two = measured.problem.profiles.stages["actor"].instances
    assert (one.num_ranks, one.seconds(16), one.step_s) == (1, pytest.approx(20.0), pytest.approx(1.0))
    assert (two.num_ranks, two.seconds(8), two.step_s) == (2, pytest.approx(16.0), pytest.approx(3.0))
    assert simulate(measured.problem, apart).step_s == pytest.approx(32.6, abs=1.5)  # two hops, and the sync
    assert one.onload_s == two.onload_s == pytest.approx(0.1), "as seen where the devices were shared"
    assert {key for key in measured.fits if key[0] == "reward"} == {("reward", 1)}


def test_a_rank_alone_takes_what_several_took_without_collectives():
    """Four ranks with 4 items each: 2 s an item and 3 s of collectives, in which quicker ranks wait for the slowest."""
    cluster = Cluster.cpu_slots(4)
    plan = plan_for_mode(GRAPH, cluster, "collocated")
    steps = Steps()
    for rank in range(4):
        now_s = steps.add(f"rollout/{rank}", "rollout", 0.0, 5.0, 4)
        steps.add(f"actor/{rank}", "actor", now_s + 1.6, 11.0, 4, collective_s=3.0 if rank == 1 else 4.0)
    steps.add("reward/0", "reward", now_s, 1.6, 16)
    profiler = Profiler(GRAPH, cluster, 16)
    profiler.observe(steps.run(), plan)
    profiler.observe_memory(Running(), plan)  # pyright: ignore[reportArgumentType]
    stages = profiler.measured().problem.profiles.stages
    seconds = {one.num_ranks: one.seconds(16 // one.num_ranks) for one in stages["actor"].instances}
    assert seconds == {1: pytest.approx(16 * 2), 2: pytest.approx(8 * 2 + 3), 4: pytest.approx(4 * 2 + 3)}
    assert "1 rank: 4 ranks without their collectives" in stages["actor"].source
    assert [one.num_ranks for one in stages["rollout"].instances] == [4], "its ranks compute each for itself"


def test_a_rank_on_two_devices_and_then_on_one_is_known_on_both():
    together = plan_for_mode(GRAPH, CLUSTER, "collocated", num_ranks={"actor": 1})
    apart = plan_for_mode(GRAPH, CLUSTER, "disaggregated")
    profiler = Profiler(GRAPH, CLUSTER, 16)
    for plan in (together, apart):
        profiler.observe(grpo_step(8), plan)
        profiler.observe_memory(Running(), plan)  # pyright: ignore[reportArgumentType]
    problem = profiler.measured().problem
    for plan in (together, apart):
        assert simulate(problem, plan).step_s > 0
    assert [(i.num_devices, i.num_ranks) for i in problem.profiles.stages["actor"].instances] == [(1, 1), (2, 1)]


def test_a_rank_that_was_given_two_devices_takes_as_long_on_one():
    plan = plan_for_mode(GRAPH, CLUSTER, "collocated", num_ranks={"actor": 1})
    profiler = Profiler(GRAPH, CLUSTER, 16)
    profiler.observe(grpo_step(8), plan)
    profiler.observe_memory(Running(), plan)  # pyright: ignore[reportArgumentType]
    stages = profiler.measured().problem.profiles.stages
    one, two = stages["actor"].instances
    assert (one.num_devices, two.num_devices) == (1, 2)
    assert one.points == two.points
    assert [instance.num_devices for instance in stages["rollout"].instances] == [1]
    assert [instance.num_devices for instance in stages["reward"].instances] == [0]


def test_an_engine_over_two_devices_is_not_known_on_one():
    stages = (replace(s, devices_per_rank=2) if s.name == "rollout" else s for s in GRAPH.stages)
    graph = replace(GRAPH, stages=tuple(stages))
    plan = plan_for_mode(graph, CLUSTER, "collocated")
    profiler = Profiler(graph, CLUSTER, 16)
    profiler.observe(grpo_step(8), plan)
    profiler.observe_memory(Running(), plan)  # pyright: ignore[reportArgumentType]
    assert [one.num_devices for one in profiler.measured().problem.profiles.stages["rollout"].instances] == [2]


def test_probes_halve_the_share_and_keep_cycles_whole_batches_and_multiples():
    plan = plan_for_mode(GRAPH, CLUSTER, "collocated")
    stages = [replace(stage, granularities=(32, 0) if stage.name == "actor" else ()) for stage in GRAPH.stages]
    probes = probe_plans(replace(GRAPH, stages=tuple(stages)), plan, 64)
    seen = [[probe.stage(name).granularity for name in ("rollout", "reward", "actor")] for probe in probes]
    assert seen == [[0, 0, 0], [16, 32, 0], [8, 16, 0]]
    plan = plan_for_mode(CYCLE, CLUSTER, "collocated", granularity={"env": 2, "policy": 2})
    assert probe_plans(CYCLE, plan, 4) == [plan]


# -- on a real flow ----------------------------------------------------------------------------------------------------


def test_probing_a_running_flow_changes_no_number_and_gives_a_problem(tmp_path):
    numbers = [Number(index=i, value=float(i)) for i in range(8)]
    flow = toy_flow()
    graph = flow.graph()
    plan = plan_for_mode(graph, CLUSTER, "collocated")
    probes = probe_plans(graph, plan, len(numbers))
    assert len(probes) > 1
    with Executor(
        cluster=CLUSTER,
        launcher=LocalLauncher(pins_slots=True),
        log_folder=tmp_path,
        env_vars={"OMP_NUM_THREADS": "1"},
    ) as executor:
        executor.start(flow, plan)
        executor.sync_weights()
        profiler = Profiler(graph, CLUSTER, len(numbers))
        weights = []
        for step, probe in enumerate(probes):
            executor.replan(flow, probe)
            context = StepContext(step=step, phase="train", seed=0, num_items=len(numbers))
            run = executor.run(flow, context=context, feeds={"numbers": numbers}, timeout_s=600)
            profiler.observe(run, probe)
            weights.append(run.metrics["learn/weight"])
        profiler.observe_memory(executor, plan)
        measured = profiler.measured()
        with pytest.raises(FlowDefinitionError, match="the plan wants"):
            executor.replan(flow, plan_for_mode(graph, CLUSTER, "disaggregated"))
    assert weights == reference_run([number.value for number in numbers], len(probes))
    assert set(measured.fits) == {(stage.name, plan.stage(stage.name).num_ranks) for stage in graph.stages}
    assert simulate(measured.problem, plan).step_s > 0
    assert all(profile.instances[0].state_bytes > 0 for profile in measured.problem.profiles.stages.values())
    assert measured.problem == replace(measured.problem)
