"""A flow whose worker is lost in the middle of a run goes on with another one, to the reference's numbers."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, LocalLauncher, Reader, StepContext, StepTimeout, WorkerLost, Writer
from rlinf_workers.testing.toy_flow import Learn, Number, Scale, Shift, reference_run

pytestmark = pytest.mark.usefixtures("forked_workers")

NUMBERS = [Number(index=i, value=float(i)) for i in range(10)]
CLUSTER = Cluster.cpu_slots(2)


class HeldShift(Shift):
    """Does not come back from a chunk while the file is there."""

    def __init__(self, file: str) -> None:
        self._file = file

    def shift(self, scaled: Reader[Number], shifted: Writer[Number]) -> None:
        for chunk in scaled:
            while os.path.exists(self._file):
                time.sleep(0.01)
            shifted.put_many([(item.index, Number(index=item.index, value=item.value + 1.0)) for item in chunk])


def held_flow(file: Path) -> Flow:
    """The toy flow, which a file holds up."""
    flow = Flow("toy")
    flow.worker("scale", Scale)
    flow.worker("shift", HeldShift, str(file))
    flow.worker("learn", Learn)
    flow.stage("scale", Scale.scale, reads="numbers", writes="scaled")
    flow.stage("shift", HeldShift.shift, reads="scaled", writes="shifted", needs_device=False)
    flow.stage("learn", Learn.learn, reads="shifted", dispatch="key", trains=True)
    flow.weights("learn", to="scale")
    return flow


def run(executor: Executor, flow: Flow, step: int, timeout_s: float = 60.0) -> float:
    context = StepContext(step=step, phase="train", seed=0, num_items=len(NUMBERS))
    done = executor.run(flow, context=context, feeds={"numbers": NUMBERS}, timeout_s=timeout_s)
    return done.metrics["learn/weight"]


def process_id(executor: Executor, worker: str) -> int:
    name, _, rank = worker.partition("/")
    return executor.group(name).call("process", ranks=[int(rank)])[0][1]


@pytest.mark.parametrize(
    ("victim", "mode", "choices", "sync"),
    [
        ("scale/1", "collocated", {"num_ranks": {"scale": 2}}, "auto"),
        ("scale/0", "disaggregated", {}, "streams"),
        ("shift/0", "disaggregated", {"granularity": {"scale": 2, "shift": 1, "learn": 10}}, "auto"),
    ],
)
def test_a_run_is_made_again_with_a_new_worker(tmp_path, victim, mode, choices, sync):
    flow = held_flow(file := tmp_path / "hold")
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path, weight_sync=sync) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, mode, **choices))
        executor.sync_weights()
        expected = reference_run([number.value for number in NUMBERS], 3)
        assert run(executor, flow, 0) == expected[0]
        for attempt in range(2):
            learner_pid = process_id(executor, "learn/0")
            file.touch()
            threading.Timer(0.3, os.kill, (process_id(executor, victim), signal.SIGKILL)).start()
            with pytest.raises(WorkerLost, match=victim):
                run(executor, flow, 1 + attempt)
            file.unlink()
            assert executor.repair() == {victim[:-2]}
            executor.sync_weights()
            assert process_id(executor, "learn/0") == learner_pid, "a worker that lives stays"
            assert run(executor, flow, 1 + attempt) == expected[1 + attempt]


def test_ranks_that_make_collectives_are_replaced_together(tmp_path):
    flow = held_flow(tmp_path / "hold")
    plan = plan_for_mode(flow.graph(), CLUSTER, "collocated", num_ranks={"learn": 2})
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan)
        executor.sync_weights()
        expected = reference_run([number.value for number in NUMBERS], 1)
        assert run(executor, flow, 0) == expected[0]
        os.kill(process_id(executor, "learn/1"), signal.SIGKILL)
        with pytest.raises(WorkerLost, match="learn/1"):
            run(executor, flow, 1)
        assert executor.repair() == {"learn"}
        executor.sync_weights()
        assert run(executor, flow, 0) == expected[0], "both ranks are new, and begin with the first weight"


def test_a_worker_that_does_not_come_back_is_replaced(tmp_path):
    flow = held_flow(file := tmp_path / "hold")
    file.touch()
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "disaggregated"))
        executor.sync_weights()
        process_id(executor, "shift/0")  # it is up
        with pytest.raises(StepTimeout, match="shift/0"):
            run(executor, flow, 0, timeout_s=5.0)
        assert executor.repair(settle_s=8.0) == {"shift"}
        file.unlink()
        executor.sync_weights()
        assert run(executor, flow, 0) == reference_run([number.value for number in NUMBERS], 1)[0]
