"""Runs of a flow that overlap: generation is ahead of training by at most `max_staleness` runs, and uses the weights
that are due whatever the timing."""

import itertools
import time
from pathlib import Path

import pytest

from rlinf_comm.weights import ReshardPlan
from rlinf_sched import Cluster, Mode, plan_for_mode
from rlinf_workers import (
    Executor,
    Flow,
    FlowDefinitionError,
    FlowRun,
    Reader,
    RemoteError,
    StepContext,
    StepTimeout,
    Writer,
)
from rlinf_workers.explaining import explain
from rlinf_workers.explaining.text import graph_lines
from rlinf_workers.testing.toy_flow import Learn, Number, Scale, Shift, reference_run, toy_flow
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync

pytestmark = pytest.mark.usefixtures("forked_workers")

NUMBERS = [Number(index=i, value=float(i)) for i in range(17)]  # with their mean of 8 all weights are exact
VALUES = [number.value for number in NUMBERS]
CLUSTER = Cluster.cpu_slots(2)
NUM_STEPS = 6
PAUSE_S = 0.1


class SlowScale(Scale):
    """Takes its time for each run."""

    def scale(self, numbers: Reader[Number], scaled: Writer[Number]) -> None:
        time.sleep(PAUSE_S)
        super().scale(numbers, scaled)


class SlowLearn(Learn):
    """Takes its time for each run, once it has all items."""

    def learn(self, shifted: Reader[Number]) -> None:
        super().learn(shifted)
        time.sleep(PAUSE_S)


class ReportingScale(Scale):
    """Leaves a file for each run in which it has generated."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def scale(self, numbers: Reader[Number], scaled: Writer[Number]) -> None:
        super().scale(numbers, scaled)
        (self._folder / f"generated-{self.step.step}").touch()


class WaitingLearn(Learn):
    """Goes on when the run after its own has generated."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def learn(self, shifted: Reader[Number]) -> None:
        super().learn(shifted)
        following = self.step.step + 1
        while following < NUM_STEPS and not (self._folder / f"generated-{following}").exists():
            time.sleep(0.01)


class LeadingScale(Scale):
    """Each run ends when the next one has begun with its own weights."""

    computes_at_once = True

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)
        self._weights: dict[int, float] = {}
        """Steps that came before newer weights -> theirs."""

    def before_new_weights(self) -> None:
        for step in range(self.step.step):
            self._weights.setdefault(step, float(self._weight))

    def scale(self, numbers: Reader[Number], scaled: Writer[Number]) -> None:
        present, following = float(self._weight), self.step.step + 1  # by now perhaps those of the next run
        weight = self._weights.get(self.step.step, present)
        (self._folder / f"begun-{self.step.step}").touch()
        until_s = time.monotonic() + 60
        while following < NUM_STEPS and not (self._folder / f"begun-{following}").exists():
            assert time.monotonic() < until_s, "the next run waits for this one"
            time.sleep(0.01)
        for chunk in numbers:
            scaled.put_many([(item.index, Number(index=item.index, value=item.value * weight)) for item in chunk])


class TakingScale(Scale):
    """Each rank takes the newest weights in the middle of every second run, the ranks in turns."""

    def is_due(self) -> bool:
        return self.step.step > 0 and (self.step.step + self.rank) % 2 == 1

    def scale(self, numbers: Reader[Number], scaled: Writer[Number]) -> None:
        for number, chunk in enumerate(numbers):
            if not number and self.is_due():
                self.take_weights(self.step.step)
            for item in chunk:
                product = Number(index=item.index, value=item.value * float(self._weight))
                scaled.put(product, key=item.index)


class HopefulScale(Scale):
    """Waits for weights that nobody trains."""

    def scale(self, numbers: Reader[Number], scaled: Writer[Number]) -> None:
        next(iter(numbers))
        self.take_weights(NUM_STEPS)


def flow_of(
    scale: type[Scale],
    learn: type[Learn],
    max_staleness: int,
    *arguments: str,
    offers: bool = False,
    ahead: bool = False,
) -> Flow:
    """The toy flow, with other workers; `arguments` are for those that have any."""
    flow, of_learn = Flow("toy", max_staleness=max_staleness), arguments if learn is not Learn else ()
    flow.worker("scale", scale, *arguments).worker("shift", Shift).worker("learn", learn, *of_learn)
    flow.stage("scale", scale.scale, reads="numbers", writes="scaled", ahead=ahead)
    flow.stage("shift", Shift.shift, reads="scaled", writes="shifted", needs_device=False)
    flow.stage("learn", learn.learn, reads="shifted", dispatch="key", trains=True)
    return flow.weights("learn", to="scale", offers=offers)


def overlapped(executor: Executor, flow: Flow, first: int, end: int) -> list[FlowRun]:
    """The runs from `first` to `end`, each begun as early as the bound allows; none is under way afterwards."""
    begun, runs = first, []
    for step in range(first, end):
        while begun < min(end, step + flow.max_staleness + 1):
            context = StepContext(step=begun, phase="train", seed=0, num_items=len(NUMBERS))
            executor.begin(flow, context=context, feeds={"numbers": NUMBERS})
            begun += 1
        runs.append(executor.finish(60.0))
    return runs


def weights_of(
    tmp_path, flow: Flow, num_steps: int, mode: Mode = "disaggregated", weight_sync="auto", **choices
) -> list[float]:
    plan = plan_for_mode(flow.graph(), CLUSTER, mode, **choices)
    with Executor(cluster=CLUSTER, log_folder=tmp_path, weight_sync=weight_sync) as executor:
        executor.start(flow, plan)
        executor.sync_weights()
        return [run.metrics["learn/weight"] for run in overlapped(executor, flow, 0, num_steps)]


@pytest.mark.parametrize(("max_staleness", "slow"), [(1, "scale"), (1, "learn"), (3, "scale"), (3, "learn")])
def test_each_run_serves_the_weights_that_are_due_whatever_the_timing(tmp_path, max_staleness, slow):
    scale, learn = (SlowScale, Learn) if slow == "scale" else (Scale, SlowLearn)
    weights = weights_of(tmp_path, flow_of(scale, learn, max_staleness), NUM_STEPS)
    assert weights == reference_run(VALUES, NUM_STEPS, max_staleness=max_staleness)


@pytest.mark.parametrize(
    ("mode", "choices"),
    [
        ("disaggregated", {"weight_sync": "streams"}),
        ("disaggregated", {"granularity": {"scale": 2, "shift": 3, "learn": 5}, "num_ranks": {"scale": 2}}),
        ("collocated", {}),
    ],
)
def test_every_plan_gives_the_reference_numbers(tmp_path, mode, choices):
    assert weights_of(tmp_path, toy_flow(max_staleness=2), NUM_STEPS, mode, **choices) == reference_run(
        VALUES, NUM_STEPS, max_staleness=2
    )


@pytest.mark.parametrize("weight_sync", ["shared", "streams"])
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stage_takes_newer_weights_and_later_runs_serve_no_older_ones(tmp_path, weight_sync, num_ranks):
    flow, weights = flow_of(TakingScale, Learn, 3, offers=True), [1.0]
    served, num_takes = [0] * num_ranks, 0
    for step in range(NUM_STEPS):
        takers = [rank for rank in range(num_ranks) if step > 0 and (step + rank) % 2]
        served, num_takes = (
            [step if rank in takers else served[rank] for rank in range(num_ranks)],
            num_takes + len(takers),
        )
        items = [value * weights[served[i % num_ranks]] + 1.0 for i, value in enumerate(VALUES)]
        weights.append(weights[-1] + sum(items) / len(items) / 8)
    choices = {"granularity": {"scale": 0}, "num_ranks": {"scale": num_ranks}}
    with Executor(cluster=Cluster.cpu_slots(3), log_folder=tmp_path, weight_sync=weight_sync) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), Cluster.cpu_slots(3), "disaggregated", **choices))
        executor.sync_weights()
        runs = overlapped(executor, flow, 0, NUM_STEPS)
    assert [run.metrics["learn/weight"] for run in runs] == pytest.approx(weights[1:], rel=1e-6)
    received = [span for run in runs for span in run.spans if span.name == "receive weights"]
    assert len(received) == num_ranks + num_takes


def test_a_stage_that_waits_for_weights_leaves_its_devices_to_those_who_train_them(tmp_path):
    flow, weights = flow_of(TakingScale, Learn, 1, offers=True), [1.0]
    for step in range(4):
        served = weights[step if step % 2 else max(0, step - 1)]
        weights.append(weights[-1] + sum(value * served + 1.0 for value in VALUES) / len(VALUES) / 8)
    with Executor(cluster=Cluster.cpu_slots(1), log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), Cluster.cpu_slots(1), "collocated"))
        executor.sync_weights()
        runs = overlapped(executor, flow, 0, 4)
    assert [run.metrics["learn/weight"] for run in runs] == pytest.approx(weights[1:], rel=1e-6)


def test_a_stage_ends_that_waits_for_weights_which_will_not_come(tmp_path):
    flow = flow_of(HopefulScale, Learn, 1, offers=True)
    with Executor(cluster=CLUSTER, log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "disaggregated"))
        executor.sync_weights()
        context = StepContext(step=0, phase="train", seed=0, num_items=len(NUMBERS))
        executor.begin(flow, context=context, feeds={"numbers": NUMBERS})
        while not any(node.wait and node.wait.kind == "weights" for node in explain(executor.snapshot()).graph.nodes):
            time.sleep(PAUSE_S)
        with pytest.raises(StepTimeout, match=f"scale/0.* learn -> scale.* {NUM_STEPS}"):
            executor.finish(0.1)
        assert executor.repair() == set(), "a process was replaced"


@pytest.mark.parametrize("weight_sync", ["shared", "streams"])
def test_versions_that_nobody_receives_hold_up_no_later_run(tmp_path, weight_sync):
    flow = toy_flow(max_staleness=3)
    with Executor(cluster=CLUSTER, log_folder=tmp_path, weight_sync=weight_sync) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "disaggregated"))
        executor.sync_weights()
        ends = [0, 5, 6, 10]  # all runs have ended there, and the next one serves the newest weights
        runs = [run for first, end in itertools.pairwise(ends) for run in overlapped(executor, flow, first, end)]
    weights = [1.0]
    for step in range(10):
        served = weights[max(step - 3, *(end for end in ends if end <= step))]
        weights.append(weights[-1] + sum(value * served + 1.0 for value in VALUES) / len(VALUES) / 8)
    assert [run.metrics["learn/weight"] for run in runs] == weights[1:]


def test_a_run_generates_while_the_one_before_trains(tmp_path):
    """Training only goes on once the next run has generated: without overlap it would never end."""
    flow = flow_of(ReportingScale, WaitingLearn, 1, str(tmp_path))
    with Executor(cluster=CLUSTER, log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "disaggregated"))
        executor.sync_weights()
        runs = overlapped(executor, flow, 0, NUM_STEPS)
    assert [run.metrics["learn/weight"] for run in runs] == reference_run(VALUES, NUM_STEPS, max_staleness=1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stage_ahead_begins_while_that_of_the_run_before_goes_on(tmp_path, num_ranks):
    """The first run never waits for the third, which needs weights that the first trains."""
    flow = flow_of(LeadingScale, Learn, 2, str(tmp_path), ahead=True)
    cluster = Cluster.cpu_slots(3)
    plan = plan_for_mode(flow.graph(), cluster, "disaggregated", num_ranks={"scale": num_ranks})
    with Executor(cluster=cluster, log_folder=tmp_path) as executor:
        executor.start(flow, plan)
        executor.sync_weights()
        runs = overlapped(executor, flow, 0, NUM_STEPS)
    assert [run.metrics["learn/weight"] for run in runs] == reference_run(VALUES, NUM_STEPS, max_staleness=2)


class FailingAhead(LeadingScale):
    """The second run fails, which the first one waits for."""

    def scale(self, numbers: Reader[Number], scaled: Writer[Number]) -> None:
        if self.step.step == 1:
            raise LookupError("no such joint")
        super().scale(numbers, scaled)


def test_a_failure_in_a_later_run_ends_the_one_that_waits_for_it(tmp_path):
    flow = flow_of(FailingAhead, Learn, 1, str(tmp_path), ahead=True)
    with Executor(cluster=CLUSTER, log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "disaggregated"))
        executor.sync_weights()
        with pytest.raises(RemoteError, match="no such joint"):
            overlapped(executor, flow, 0, 2)
        (tmp_path / "begun-1").touch()


def test_a_stage_that_shares_its_device_is_not_ahead(tmp_path):
    flow = flow_of(Scale, Learn, 1, ahead=True)
    with Executor(cluster=CLUSTER, log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated"))
        executor.sync_weights()
        runs = overlapped(executor, flow, 0, NUM_STEPS)
        assert any(
            "the stages scale of a run begin when those of the run before have ended" in n for n in executor.notes
        )
    assert [run.metrics["learn/weight"] for run in runs] == reference_run(VALUES, NUM_STEPS, max_staleness=1)


def test_an_explanation_names_the_step_that_generation_waits_for(tmp_path):
    flow = flow_of(ReportingScale, WaitingLearn, 1, str(tmp_path))
    with Executor(cluster=CLUSTER, log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "disaggregated"))
        executor.sync_weights()
        texts = []
        for step in range(2):
            context = StepContext(step=step, phase="train", seed=0, num_items=len(NUMBERS))
            executor.begin(flow, context=context, feeds={"numbers": NUMBERS})
            until_s = time.monotonic() + 60
            while not (ahead := executor.snapshot().ahead) or not ahead.idle:
                assert time.monotonic() < until_s
                time.sleep(0.01)
            texts.append("\n".join(graph_lines(explain(executor.snapshot()))))
    assert "scale of step 1 waits until step 0 has been trained: a pause follows" in texts[0]
    assert "scale of step 2 waits until step 0 has been trained (max_staleness 1)" in texts[1]


def test_a_group_with_two_stages_cannot_overlap(tmp_path):
    flow = Flow("toy", max_staleness=1).worker("scale", Scale).worker("learn", Learn)
    flow.stage("scale", Scale.scale, reads="numbers", writes="scaled")
    flow.stage("again", Scale.scale, reads="scaled", writes="shifted", worker="scale")
    flow.stage("learn", Learn.learn, reads="shifted", dispatch="key", trains=True)
    flow.weights("learn", to="scale")
    with (
        Executor(cluster=CLUSTER, log_folder=tmp_path) as executor,
        pytest.raises(FlowDefinitionError, match=r"worker 'scale' has the stages \['scale', 'again'\]"),
    ):
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated"))


class TwoVersions(SharedWeightSync):
    """Has no argument for the number of versions."""

    def __init__(self, edge: str, reshard: ReshardPlan) -> None:
        super().__init__(edge, reshard)


def test_a_weight_sync_that_cannot_keep_enough_versions_is_named(tmp_path):
    flow, weight_sync = toy_flow(max_staleness=2), f"{__name__}:TwoVersions"
    with Executor(cluster=CLUSTER, log_folder=tmp_path, weight_sync=weight_sync) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "disaggregated"))
        with pytest.raises(
            FlowDefinitionError, match=r"num_versions=3 are kept, and weight sync .*TwoVersions keeps two"
        ):
            executor.sync_weights()
