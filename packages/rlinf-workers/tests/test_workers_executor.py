"""The executor on a flow that can be checked by hand: every mode, granularity and number of ranks gives the
reference's numbers."""

import pytest

from rlinf_sched.cluster import Cluster
from rlinf_sched.modes import plan_for_mode
from rlinf_workers import Executor, Flow, FlowDefinitionError, LocalLauncher, RemoteError, StepContext, StepTimeout
from rlinf_workers.testing.toy_flow import FaultyStage, Number, Scale, Shift, reference_run, toy_flow

NUMBERS = [Number(index=i, value=float(i)) for i in range(10)]
NUM_STEPS = 3
CLUSTER = Cluster.cpu_slots(2)


def context(step: int) -> StepContext:
    return StepContext(step=step, phase="train", seed=0, num_items=len(NUMBERS))


def execute(tmp_path, mode, **choices):
    flow = toy_flow()
    plan = plan_for_mode(flow.graph(), CLUSTER, mode, **choices)
    with Executor(
        cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path, environment={"OMP_NUM_THREADS": "1"}
    ) as executor:
        executor.start(flow, plan)
        executor.sync_weights()
        runs = [
            executor.run(flow, context=context(step), feeds={"numbers": NUMBERS}, timeout_s=60)
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
    ],
)
def test_every_plan_gives_the_reference_numbers(tmp_path, mode, choices):
    runs = execute(tmp_path, mode, **choices)
    expected = reference_run([number.value for number in NUMBERS], NUM_STEPS)
    assert [run.metrics["learn/weight"] for run in runs] == expected


def test_collocated_stages_take_turns_and_pipelined_ones_do_not(tmp_path):
    spans = execute(tmp_path, "collocated")[-1].spans
    assert {"wait for lease", "onload", "offload", "receive weights", "publish weights"} <= {
        span.name for span in spans
    }
    computing = {name: [s for s in spans if s.name == name and s.category == "stage"] for name in ("scale", "learn")}
    assert max(s.start_s + s.duration_s for s in computing["scale"]) <= min(
        s.start_s for s in computing["learn"] if s.num_items
    )
    assert not [s for s in execute(tmp_path, "disaggregated")[-1].spans if s.category == "lease"]


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


def test_an_error_in_a_stage_reaches_the_driver_with_its_traceback(tmp_path):
    flow = Flow("faulty").worker("fault", FaultyStage)
    flow.stage("fault", FaultyStage.fail, reads="numbers", writes="out", needs_device=False)
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated"))
        with pytest.raises(RemoteError, match="fault/0: ValueError: bad item") as caught:
            executor.run(flow, context=context(0), feeds={"numbers": NUMBERS}, timeout_s=30)
        assert "toy_flow.py" in caught.value.remote_traceback


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


def test_two_readers_of_one_channel_are_refused(tmp_path):
    flow = Flow("twice").worker("scale", Scale)
    flow.stage("one", Scale.scale, worker="scale", reads="numbers", writes="a")
    flow.stage("two", Scale.scale, worker="scale", reads="numbers", writes="b")
    plan = plan_for_mode(flow.graph(), CLUSTER, "collocated")
    message = r"'numbers' has several readers, \['one', 'two'\]"
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
            FlowDefinitionError, match=r"'scale' runs on devices \[0\] in 1 ranks; the plan wants \[0, 1\]"
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
        executor.run(train, context=context(0), feeds={"numbers": NUMBERS}, timeout_s=30)
        run = executor.run(evaluate, context=context(1), feeds={"numbers": NUMBERS}, timeout_s=30)
    weight = reference_run([number.value for number in NUMBERS], 1)[0]
    assert run.collected["scaled"] == [Number(index=i, value=i * weight) for i in range(10)]
