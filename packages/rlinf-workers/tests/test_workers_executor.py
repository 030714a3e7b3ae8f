"""The executor on a flow that can be checked by hand: every mode, granularity and number of ranks gives the
reference's numbers."""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from rlinf_comm.weights import Layout, TensorSpec, specs_of
from rlinf_sched import Cluster, Prediction, StagePlan, plan_for_mode
from rlinf_workers import (
    Executor,
    Flow,
    FlowDefinitionError,
    LocalLauncher,
    Reader,
    RemoteError,
    StepContext,
    StepTimeout,
    Worker,
    WorkerLost,
    Writer,
)
from rlinf_workers.execution.groups import visible_devices
from rlinf_workers.testing.toy_flow import (
    LEARNING_RATE,
    Learn,
    Number,
    Scale,
    Shift,
    reference_run,
    toy_flow,
)

pytestmark = pytest.mark.usefixtures("forked_workers")

NUMBERS = [Number(index=i, value=float(i)) for i in range(10)]
NUM_STEPS = 3
TWO = ("scale", "learn")
CLUSTER = Cluster.cpu_slots(2)


def context(step: int) -> StepContext:
    return StepContext(step=step, phase="train", seed=0, num_items=len(NUMBERS))


def execute(tmp_path, mode, weight_sync="auto", **choices):
    flow = toy_flow()
    plan = plan_for_mode(flow.graph(), CLUSTER, mode, **choices)
    with Executor(
        cluster=CLUSTER,
        launcher=LocalLauncher(),
        log_folder=tmp_path,
        env_vars={"OMP_NUM_THREADS": "1"},
        weight_sync=weight_sync,
    ) as executor:
        executor.start(flow, plan)
        executor.sync_weights()
        runs = [
            executor.run(flow, context=context(step), feeds={"numbers": NUMBERS}, timeout_s=600)
            for step in range(NUM_STEPS)
        ]
    return runs


@pytest.mark.parametrize(
    ("mode", "choices"),
    [
        ("collocated", {}),
        ("collocated", {"granularity": {"scale": 3, "shift": 2, "learn": 4}}),
        ("disaggregated", {"granularity": {"scale": 5}}),
        ("hybrid", {"num_ranks": {"learn": 2}}),
        ("collocated", {"num_ranks": {"learn": 2, "scale": 2}, "weight_sync": "streams"}),
        (
            "collocated",
            {
                "num_ranks": {"scale": 4, "learn": 4},
                "num_ranks_per_replica": {"scale": 2, "learn": 2},
                "granularity": {"scale": 2, "learn": 2},
            },
        ),
        ("disaggregated", {"num_ranks_per_replica": {"scale": 2, "shift": 2, "learn": 2}}),
    ],
)
def test_every_plan_gives_the_reference_numbers(tmp_path, mode, choices):
    runs = execute(tmp_path, mode, **choices)
    expected = reference_run([number.value for number in NUMBERS], NUM_STEPS)
    assert [run.metrics["learn/weight"] for run in runs] == expected


class HalfLearn(Learn):
    """Each rank of a replica holds one of the two numbers of the weight, and trains it."""

    def __init__(self) -> None:
        super().__init__()
        self._weight += self.identity.rank_in_replica

    def layout(self) -> Layout:
        halves = Layout.sharded({"weight": TensorSpec((2,), "float32")}, self.identity.num_ranks_per_replica)
        return Layout(halves.specs, halves.ranks * self.identity.num_replicas)


class WholeScale(Scale):
    """Serves both numbers, one to the even items and one to the odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self._both = torch.zeros(2)

    def scale(self, numbers: Reader[Number], scaled: Writer[Number]) -> None:
        for chunk in numbers:
            for item in chunk:
                value = item.value * float(self._both[item.index % 2])
                scaled.put(Number(index=item.index, value=value), key=item.index)

    def weights(self) -> dict[str, torch.Tensor]:
        return {"weight": self._both}


class WrongLayout(Learn):
    """Speaks of a rank that is not there."""

    def layout(self) -> Layout:
        return Layout.replicated(specs_of(self.weights()), 2)


def flow_of(learn: type[Learn], scale: type[Scale]) -> Flow:
    """The toy flow, with other workers."""
    flow = Flow("toy").worker("scale", scale).worker("shift", Shift).worker("learn", learn)
    flow.stage("scale", scale.scale, reads="numbers", writes="scaled")
    flow.stage("shift", Shift.shift, reads="scaled", writes="shifted", needs_device=False)
    flow.stage("learn", learn.learn, reads="shifted", dispatch="key", trains=True)
    return flow.weights("learn", to="scale")


def test_trainers_that_hold_half_of_the_weights_each_send_all_of_them(tmp_path):
    flow, halves = flow_of(HalfLearn, WholeScale), [1.0, 2.0]
    ranks = {"learn": 4, "scale": 1, "shift": 1}
    plan = plan_for_mode(flow.graph(), CLUSTER, "collocated", num_ranks=ranks, num_ranks_per_replica={"learn": 2})
    with Executor(cluster=CLUSTER, log_folder=tmp_path, env_vars={"OMP_NUM_THREADS": "1"}) as executor:
        executor.start(flow, plan)
        executor.sync_weights()
        for step in range(NUM_STEPS):
            run = executor.run(flow, context=context(step), feeds={"numbers": NUMBERS}, timeout_s=600)
            mean = sum(number.value * halves[number.index % 2] + 1 for number in NUMBERS) / len(NUMBERS)
            halves = [half + LEARNING_RATE * mean for half in halves]
            assert run.metrics["learn/weight"] == halves[0]
    assert executor.weights_bytes(flow.graph().weight_edges[0]) == 8, "of the whole, not of a rank's part"


def test_a_layout_speaks_of_all_ranks(tmp_path):
    flow, cluster = flow_of(WrongLayout, Scale), Cluster.cpu_slots(1)
    with Executor(cluster=cluster, log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), cluster, "collocated"))
        with pytest.raises(FlowDefinitionError, match=r"'learn': layout\(\) describes 2 ranks, but there are 1"):
            executor.sync_weights()


class Share(Worker):
    """Checks what a replica is; dies in the middle of a run when it is told to."""

    def share(self, numbers: Reader[Number], shared: Writer[Number]) -> None:
        for chunk in numbers:
            place = torch.tensor(float(self.identity.rank_in_replica))
            if chunk[0].value < 0 and self.rank == 3:
                os._exit(7)
            assert float(self.replica_ranks.sum_(place)) == 1.0, "0 + 1, of this replica alone"
            for item in chunk:
                self.record("share/items", 1.0)
                self.record_spread("share/index", item.index)
                shared.put(Number(index=item.index, value=float(self.identity.replica)), key=item.index)
        # Sums over one rank of each of the two replicas.
        assert float(self.replicas.sum_(torch.ones(1))) == float(self.identity.num_replicas) == 2.0
        self.show({"rank": float(self.rank)})


@pytest.fixture
def replicas(tmp_path):
    """A flow of one stage in two replicas of two ranks, started."""
    flow = Flow("replicas").worker("share", Share)
    flow.stage("share", Share.share, reads="numbers", writes="shared", dispatch="key", needs_device=False)

    def plan(granularity):
        return plan_for_mode(
            flow.graph(),
            CLUSTER,
            "collocated",
            granularity={"share": granularity},
            num_ranks={"share": 4},
            num_ranks_per_replica={"share": 2},
        )

    with Executor(cluster=CLUSTER, log_folder=tmp_path, env_vars={"OMP_NUM_THREADS": "1"}) as executor:
        executor.start(flow, plan(1))
        yield executor, flow, plan


def test_items_go_to_replicas_whose_ranks_count_once(replicas):
    executor, flow, plan = replicas
    for granularity in (1, 3):
        executor.replan(flow, plan(granularity))
        run = executor.run(flow, context=context(0), feeds={"numbers": NUMBERS}, timeout_s=600)
        assert run.collected["shared"] == [Number(index=i, value=float(i % 2)) for i in range(10)]
        assert run.metrics["share/index"] == pytest.approx(torch.arange(10.0).std().item()), "ten, not twenty"
        assert [row["rank"] for row in run.shown_rows] == [0.0, 2.0]
        computing = [span for span in run.spans if span.category == "stage"]
        assert sum(span.num_items for span in computing) == len(NUMBERS)
        assert {span.worker for span in computing} == {f"share/{rank}" for rank in range(4)}
    smaller = replace(plan(1), stages=tuple(replace(s, num_ranks_per_replica=1) for s in plan(1).stages))
    with pytest.raises(FlowDefinitionError, match=r"in 4 ranks, 2 a replica; the plan wants devices \[\] in 4 ranks$"):
        executor.replan(flow, smaller)


def test_a_lost_second_rank_of_a_replica_is_reported(replicas):
    executor, flow, _ = replicas
    with pytest.raises(WorkerLost, match=r"worker share/3 on .* was lost: exited with code 7"):
        executor.run(flow, context=context(0), feeds={"numbers": [Number(index=0, value=-1.0)] * 4}, timeout_s=600)


class Listing(LocalLauncher):
    """Starts nothing, and keeps what it was asked for."""

    def __init__(self):
        super().__init__()
        self.specs = []

    def start(self, spec):
        self.specs.append(spec)
        return self

    def call(self, method, *args, lane=0):
        return Future()

    @property
    def is_lost(self):
        return False


def test_a_rank_is_started_on_the_node_of_its_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("RLINF_JOB_SECRET", "0123456789abcdef" * 4)
    cluster, flow = Cluster.cuda_nodes(2, 2, name="GPU", memory_bytes=1 << 30), toy_flow()
    plan = plan_for_mode(flow.graph(), cluster, "collocated")
    with Executor(cluster=cluster, launcher=(listing := Listing()), log_folder=tmp_path) as executor:
        executor.start(flow, plan)
    places = {spec.identity.name: (spec.node, spec.gpus) for spec in listing.specs}
    assert [places[f"scale/{rank}"] for rank in range(4)] == [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))]
    assert places["shift/0"] == (0, ()), "without devices it is with the driver"
    across = replace(plan, stages=tuple(replace(stage, num_ranks=1) for stage in plan.stages))
    with (
        Executor(cluster=cluster, launcher=Listing(), log_folder=tmp_path) as executor,
        pytest.raises(
            FlowDefinitionError, match=r"has devices \[0, 1, 2, 3\], of nodes \[0, 1\]; a process runs on one"
        ),
    ):
        executor.start(flow, across)


def test_gpus_are_named_by_their_node(monkeypatch):
    cluster = Cluster.cuda_nodes(2, 4, name="GPU", memory_bytes=1 << 30)
    placed = StagePlan(stage="s", devices=(2, 3, 6, 7), num_ranks=2, granularity=0, offload=False, turn=0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [visible_devices(cluster, placed.devices_of(rank)) for rank in (0, 1)] == ["2,3", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [visible_devices(cluster, placed.devices_of(rank)) for rank in (0, 1)] == ["6,7", "2,3"]


def test_collocated_stages_take_turns_and_pipelined_ones_do_not(tmp_path):
    first, *_, last = execute(tmp_path, "collocated")
    spans = last.spans
    assert {"wait for lease", "onload", "offload", "receive weights", "publish weights"} <= {
        span.name for span in spans
    }
    computing = {name: [s for s in spans if s.name == name and s.category == "stage"] for name in ("scale", "learn")}
    assert max(s.start_s + s.duration_s for s in computing["scale"]) <= min(
        s.start_s for s in computing["learn"] if s.num_items
    )
    assert {span.worker for span in first.spans if span.name == "offload"} == {"scale/0", "scale/1"}, "learn stays"
    assert {span.worker for span in spans if span.name == "offload"} == {f"{g}/{r}" for g in TWO for r in (0, 1)}
    waits = [span for span in spans if span.name == "wait for lease"]
    for span in (span for span in spans if span.name == "offload"):
        others = [wait for wait in waits if wait.worker.partition("/")[0] != span.worker.partition("/")[0]]
        assert any(0 <= span.start_ns - wait.start_ns <= wait.duration_ns for wait in others), "somebody waits for it"
    assert not [s for s in execute(tmp_path, "disaggregated")[-1].spans if s.category == "lease"]


def test_state_stays_over_runs_of_any_flow_until_another_group_comes(tmp_path):
    train = toy_flow()
    evaluate = Flow("evaluate").workers_of(train, "scale", "shift")
    evaluate.stage("scale", Scale.scale, reads="numbers", writes="scaled")
    evaluate.stage("shift", Shift.shift, reads="scaled", writes="shifted", needs_device=False)
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        for flow in (train, evaluate):
            executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated", granularity={"scale": 2}))
        executor.sync_weights()
        flows = (train, evaluate, evaluate, train)
        runs = [
            executor.run(flow, context=context(0), feeds={"numbers": NUMBERS}, timeout_s=600, on_items=lambda *_: None)
            for flow in flows
        ]
    moved = [{(s.name, s.worker) for s in run.spans if s.name in ("onload", "offload")} for run in runs]
    switch = lambda name, group: {(name, f"{group}/{rank}") for rank in (0, 1)}  # noqa: E731
    assert moved[0] == switch("onload", "scale") | switch("offload", "scale") | switch("onload", "learn")
    assert moved[1] == switch("offload", "learn") | switch("onload", "scale"), "although learn is not in this flow"
    assert moved[2] == set()
    assert moved[3] == switch("offload", "scale") | switch("onload", "learn")


class Clinging(Scale):
    """Its state does not leave."""

    def __init__(self) -> None:
        super().__init__()
        self._num_calls = 0

    def offload(self) -> None:
        self._num_calls += 1
        if self._num_calls > 1:  # all are sent away once when they start
            raise MemoryError("no room on the host")


def test_a_worker_whose_state_does_not_leave_ends_the_run(tmp_path):
    flow = Flow("clinging").worker("scale", Clinging).worker("learn", Learn)
    flow.stage("scale", Clinging.scale, reads="numbers", writes="shifted")
    flow.stage("learn", Learn.learn, reads="shifted", dispatch="key")
    cluster = Cluster.cpu_slots(1)
    with Executor(cluster=cluster, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), cluster, "collocated"))
        with pytest.raises(
            RemoteError, match=r"no room for learn/0: scale/0 did not take its state off .*MemoryError: no room on the"
        ):
            executor.run(flow, context=context(0), feeds={"numbers": NUMBERS}, timeout_s=600)


def test_items_can_be_taken_as_they_come(tmp_path):
    flow = Flow("shift").worker("shift", Shift)
    flow.stage("shift", Shift.shift, reads="numbers", writes="shifted", needs_device=False)
    taken = []
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated", granularity={"shift": 3}))
        arguments = {"context": context(0), "feeds": {"numbers": NUMBERS}, "timeout_s": 30}
        run = executor.run(flow, **arguments, on_items=lambda channel, items: taken.append((channel, items)))
        assert run.collected == {"shifted": []}
        assert {channel for channel, _ in taken} == {"shifted"}
        assert len(taken) > 1
        assert sorted(item.value for _, items in taken for item in items) == [number.value + 1 for number in NUMBERS]

        def fail(channel, items):
            raise OSError("the disk is full")

        with pytest.raises(OSError, match="the disk is full"):
            executor.run(flow, **arguments, on_items=fail)


class FaultyStage(Worker):
    """Stages that fail in the middle of a run, or wait for what never comes."""

    def fail(self, numbers: Reader[Number], out: Writer[Number]) -> None:
        for _ in numbers:
            raise ValueError("bad item")

    def starve(self, numbers: Reader[Number], loop_back: Reader[Number], loop: Writer[Number]) -> None:
        numbers.next_chunk(at_most=1)
        loop_back.next_chunk(at_most=1)


def test_an_error_in_a_stage_reaches_the_driver_with_its_traceback(tmp_path):
    flow = Flow("faulty").worker("fault", FaultyStage)
    flow.stage("fault", FaultyStage.fail, reads="numbers", writes="out", needs_device=False)
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated"))
        with pytest.raises(RemoteError, match="fault/0: ValueError: bad item") as caught:
            executor.run(flow, context=context(0), feeds={"numbers": NUMBERS}, timeout_s=600)
        assert "test_workers_executor.py" in caught.value.remote_traceback


def test_a_deadline_names_who_waits_for_what(tmp_path):
    flow = Flow("faulty").worker("fault", FaultyStage)
    flow.stage(
        "starve", FaultyStage.starve, worker="fault", reads=("numbers", "loop"), writes="loop", needs_device=False
    )
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated"))
        executor.group("fault").call("current_waits")  # the process is up, and beats once a second
        with pytest.raises(StepTimeout, match="fault/0 starve waits for channel loop since"):
            executor.run(flow, context=context(0), feeds={"numbers": NUMBERS}, timeout_s=6)


class Halting(Worker):
    """Passes three numbers on, and counts to five; each then waits for a file."""

    def __init__(self, file: str) -> None:
        self._file = file

    def pass_on(self, numbers: Reader[Number], halves: Writer[Number]) -> None:
        for chunk in numbers:
            for count, number in enumerate(chunk):
                self._wait(count == 3)
                halves.put(number, key=number.index)

    def count(self, halves: Reader[Number]) -> None:
        self.report_progress(5, 7, unit="micro-batches")
        self._wait(True)
        for _ in halves:
            pass

    def _wait(self, waits: bool) -> None:
        while waits and not os.path.exists(self._file):
            time.sleep(0.01)


def test_the_progress_of_running_stages_is_known(tmp_path):
    file = tmp_path / "go"
    flow = Flow("halting").worker("first", Halting, str(file)).worker("second", Halting, str(file))
    flow.stage("pass_on", Halting.pass_on, worker="first", reads="numbers", writes="halves", needs_device=False)
    flow.stage("count", Halting.count, worker="second", reads="halves", needs_device=False)
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated"))
        assert executor.progress() == []
        with ThreadPoolExecutor(1) as thread:
            feeds = {"numbers": NUMBERS}
            run = thread.submit(executor.run, flow, context=context(2), feeds=feeds, timeout_s=600)
            try:
                deadline = time.monotonic() + 60
                while [one.num_done for one in executor.progress()] != [3, 5]:
                    assert time.monotonic() < deadline and not run.done(), executor.progress()
                    time.sleep(0.05)
                first, second = executor.progress()
            finally:
                file.touch()
            run.result()
        assert executor.num_started() == (2, 2)
        assert executor.progress() == []
    assert (first.stage, first.num_items, first.unit, first.step) == ("pass_on", len(NUMBERS), "", 2)
    assert (second.stage, second.num_items, second.unit, second.phase) == ("count", 7, "micro-batches", "train")
    assert first.is_computing


def test_two_readers_of_one_channel_are_refused(tmp_path):
    flow = Flow("twice").worker("scale", Scale)
    flow.stage("one", Scale.scale, worker="scale", reads="numbers", writes="a")
    flow.stage("two", Scale.scale, worker="scale", reads="numbers", writes="b")
    plan = plan_for_mode(flow.graph(), CLUSTER, "collocated")
    message = r"'numbers' has several readers, \['one', 'two'\]"
    with Executor(cluster=CLUSTER, log_folder=tmp_path) as executor, pytest.raises(FlowDefinitionError, match=message):
        executor.start(flow, plan)


def test_a_plan_that_runs_ahead_of_training_is_refused(tmp_path):
    flow = toy_flow()
    ahead = Prediction(step_s=1.0, estimate_s=1.0, sync_s=0.0, stages={}, max_staleness=2)
    plan = replace(plan_for_mode(flow.graph(), CLUSTER, "collocated"), prediction=ahead)
    plan = type(plan).from_json(plan.to_json())  # as from a file
    message = r"run 2 steps ahead of training \(max_staleness=2\), but the flow has max_staleness=0"
    with Executor(cluster=CLUSTER, log_folder=tmp_path) as executor, pytest.raises(FlowDefinitionError, match=message):
        executor.start(flow, plan)


def test_weights_have_to_be_synced_before_the_first_run(tmp_path):
    flow = toy_flow()
    with Executor(cluster=CLUSTER, log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated"))
        with pytest.raises(FlowDefinitionError, match="learn -> scale were never synced"):
            executor.run(flow, context=context(0), feeds={"numbers": NUMBERS})


def test_a_later_flow_has_to_leave_the_groups_where_they_are(tmp_path):
    train, other = toy_flow(), Flow("other").workers_of(toy_flow(), "scale")
    other.stage("scale", Scale.scale, reads="numbers", writes="scaled")
    with Executor(cluster=CLUSTER, log_folder=tmp_path) as executor:
        executor.start(train, plan_for_mode(train.graph(), CLUSTER, "disaggregated"))
        with pytest.raises(
            FlowDefinitionError, match=r"'scale' runs on devices \[0\] in 1 ranks; the plan wants devices \[0, 1\] in 2"
        ):
            executor.start(other, plan_for_mode(other.graph(), CLUSTER, "collocated"))


def test_feeds_have_to_fit_the_flow(tmp_path):
    flow = toy_flow()
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated"))
        executor.sync_weights()
        with pytest.raises(FlowDefinitionError, match="fed through \\['numbers'\\], but got \\['prompts'\\]"):
            executor.run(flow, context=context(0), feeds={"prompts": []})


def test_an_evaluation_flow_uses_the_workers_of_the_training_flow(tmp_path):
    train = toy_flow()
    evaluate = Flow("evaluate").workers_of(train, "scale")
    evaluate.stage("scale", Scale.scale, reads="numbers", writes="scaled")
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(train, plan_for_mode(train.graph(), CLUSTER, "disaggregated"))
        executor.start(evaluate, plan_for_mode(evaluate.graph(), CLUSTER, "hybrid", devices={"scale": [0]}))
        executor.sync_weights()
        executor.run(train, context=context(0), feeds={"numbers": NUMBERS}, timeout_s=600)
        run = executor.run(evaluate, context=context(1), feeds={"numbers": NUMBERS}, timeout_s=600)
    weight = reference_run([number.value for number in NUMBERS], 1)[0]
    assert run.collected["scaled"] == [Number(index=i, value=i * weight) for i in range(10)]
