"""Real hangs in small flows: each explanation names the root cause, and the stack shows where it is."""

import os
import platform
import re
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from workers_hangs import CLUSTER, FOUND_S, NUMBERS, Taker, explained, functions, running

from rlinf_sched import plan_for_mode
from rlinf_workers import Executor, Flow, Reader, StepContext, StepTimeout, Worker, Writer
from rlinf_workers.errors import WorkerLost
from rlinf_workers.execution import executor as executor_module
from rlinf_workers.explaining.text import explanation_text
from rlinf_workers.testing.toy_flow import Number
from rlinf_workers.weight_sync.base import WeightPort
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync

pytestmark = pytest.mark.usefixtures("forked_workers")

HERE = Path(__file__).stem
"""As the processes of workers import it."""


class Stuck(Worker):
    """A stage for each way to hang."""

    def never_reads(self, numbers: Reader[Number]) -> None:
        time.sleep(3600)

    def score_without_end(self, numbers: Reader[Number], out: Writer[Number]) -> None:
        for _ in numbers:
            while True:
                pass

    def keep_the_lease(self, numbers: Reader[Number], out: Writer[Number]) -> None:
        for chunk in numbers:
            out.put(chunk[0])
            time.sleep(3600)

    def meet_again_and_again(self, numbers: Reader[Number]) -> None:
        while True:
            self.ranks.sum_(torch.zeros(1))

    def meet_once_more_on_rank_0(self, numbers: Reader[Number]) -> None:
        for _ in range(2 - self.rank):
            self.ranks.sum_(torch.zeros(1))

    def broadcast_on_rank_0(self, numbers: Reader[Number]) -> None:
        for _ in range(16):
            self.ranks.sum_(torch.zeros(1))
        if self.rank == 0:
            self.ranks.broadcast_(torch.zeros(1), source=1)
        else:
            self.ranks.sum_(torch.zeros(1))

    def meet_apart(self, numbers: Reader[Number]) -> None:
        if self.rank == 0:
            self.ranks.sum_(torch.zeros(1))
        else:
            self.ranks.objects("anything")

    def gather_shards_on_rank_0(self, numbers: Reader[Number]) -> None:
        self.ranks.barrier()
        model = torch.nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (self.num_ranks,)))
        if self.rank == 1:
            time.sleep(3600)
        model(torch.zeros(1, 4))

    def read_on_other_ranks(self, numbers: Reader[Number]) -> None:
        if self.rank == 0:
            time.sleep(3600)
        for _ in numbers:
            pass

    def read_on_first_ranks(self, numbers: Reader[Number]) -> None:
        if self.rank == 1:
            time.sleep(3600)
        for _ in numbers:
            pass

    def put_a_lot(self, numbers: Reader[Number], out: Writer[torch.Tensor]) -> None:
        for chunk in numbers:
            out.put_many([(item.index, torch.zeros(150 << 10, dtype=torch.uint8)) for item in chunk])

    def read_before_it_puts(self, numbers: Reader[Number], back: Reader[Number], out: Writer[Number]) -> None:
        for chunk in back:
            out.put_many([(item.index, item) for item in chunk])


def one_stage(method: Callable[..., None], **more) -> Flow:
    flow = Flow("hangs").worker("stuck", Stuck).stage("stuck", method, reads="numbers", **more)
    if "writes" in more:
        flow.worker("taker", Taker).stage("taker", Taker.take, reads=more["writes"])
    return flow


def test_a_stage_that_never_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)  # no py-spy
    many = [Number(index=i, value=0.0) for i in range(5000)]
    flow = one_stage(Stuck.never_reads)
    with running(tmp_path, flow, items=many, num_ranks={"stuck": 1}, granularity={"stuck": 1}) as executor:
        explanation = explained(executor, "stuck/0 stuck", inside="never_reads", asleep=True)
    look = explanation.looks["stuck/0"]
    assert explanation.nodes["driver: feeds numbers"].whose_move == ("stuck/0 stuck",)
    assert look.stacks is not None and look.stacks.source == "faulthandler"
    text = explanation_text(explanation)
    assert text.startswith("flow 'hangs', step 4 (train), under way for ")
    assert (
        f"\nroot cause: stuck/0 stuck (process {look.record.pid}) waits for nobody and stands still: sleeping" in text
    )
    assert "test_workers_hangs.py" in text


@pytest.mark.slow
def test_a_stuck_reward(tmp_path):
    with running(tmp_path, one_stage(Stuck.score_without_end, writes="scored")) as executor:
        explanation = explained(executor, "stuck/0 stuck", inside="score_without_end")
    assert explanation.nodes["taker/0 taker"].whose_move == ("stuck/0 stuck",)
    text = explanation_text(explanation)
    assert " and computes: running" in text
    assert "score_without_end" in text and "_bootstrap" not in text


@pytest.mark.slow
def test_a_lease_that_is_never_released(tmp_path):
    flow, one = one_stage(Stuck.keep_the_lease, writes="kept"), {"stuck": 1, "taker": 1}
    with running(tmp_path, flow, mode="collocated", num_ranks=one, granularity=one) as executor:
        explanation = explained(executor, "stuck/0 stuck", inside="keep_the_lease")
        while (wait := explanation.nodes["taker/0 taker"].wait) is None or wait.kind != "lease":
            explanation = explained(executor, "stuck/0 stuck", inside="keep_the_lease")
    assert explanation.nodes["taker/0 taker"].whose_move == ("stuck/0 stuck",)
    assert f"it has devices that turn {wait.number} waits for" in explanation_text(explanation)


@pytest.mark.slow
def test_a_stopped_rank(tmp_path):
    flow = one_stage(Stuck.meet_again_and_again)
    with running(tmp_path, flow, num_ranks={"stuck": 2}) as executor:
        while not any(wait.kind == "collective" and wait.number for wait in executor.snapshot().waits):
            time.sleep(0.1)
        pid = next(one.pid for one in executor.snapshot().processes if one.name == "stuck/1")
        os.kill(pid, signal.SIGSTOP)
        explanation = explained(executor, "stuck/1 stuck", cause="stopped")
    wait = explanation.nodes["stuck/0 stuck"].wait
    assert wait and wait.operation.replace("_", "-") == "all-reduce"  # as it was told, or seen in the stack
    text = explanation_text(explanation)
    assert f"root cause: stuck/1 stuck (process {pid}) is stopped; " in text
    assert f"kill -CONT {pid}" in text


def test_a_rank_that_makes_one_collective_less(tmp_path):
    with running(tmp_path, one_stage(Stuck.meet_once_more_on_rank_0), num_ranks={"stuck": 2}) as executor:
        explanation = explained(executor, "stuck/0 stuck", cause="mismatch")
    assert (
        "collectives that do not fit: stuck/0 stuck waits for all-reduce 2 of all ranks, but "
        "stuck/1 stuck has ended its stage"
    ) in explanation_text(explanation)


def test_two_channels_in_a_deadlock(tmp_path):
    flow = Flow("hangs").worker("stuck", Stuck).worker("taker", Taker)
    ports = {"reads": ("numbers", "back"), "writes": "there"}
    flow.stage("stuck", Stuck.read_before_it_puts, **ports, needs_device=False)
    flow.stage("taker", Taker.answer, reads="there", writes="back", needs_device=False)
    with running(tmp_path, flow) as executor:
        explanation = explained(executor, "stuck/0 stuck", "taker/0 taker", cause="deadlock")
    assert (
        "root cause: deadlock: stuck/0 stuck waits for channel back, taker/0 taker waits for channel there"
    ) in explanation_text(explanation)


def test_a_lost_worker_and_a_deadline_leave_an_explanation(tmp_path):
    flow = one_stage(Stuck.score_without_end, writes="scored")
    plan = plan_for_mode(flow.graph(), CLUSTER, "disaggregated")
    context = StepContext(step=0, phase="train", seed=0, num_items=len(NUMBERS))
    with Executor(cluster=CLUSTER, log_folder=tmp_path / "a") as executor:
        executor.start(flow, plan)
        for name in ("taker", "stuck"):  # so that both have started, however busy the machine is
            executor.group(name).call("current_waits")
        with pytest.raises(StepTimeout, match=r"root cause: stuck/0 stuck \(process \d+\) waits for nobody"):
            executor.run(flow, context=context, feeds={"numbers": NUMBERS}, timeout_s=5)
        assert executor.explanation is not None
        assert "score_without_end" in functions(executor.explanation, "stuck/0")
    with Executor(cluster=CLUSTER, log_folder=tmp_path / "b") as executor, ThreadPoolExecutor(1) as thread:
        executor.start(flow, plan)
        run = thread.submit(executor.run, flow, context=context, feeds={"numbers": NUMBERS}, timeout_s=600)
        explained(executor, "stuck/0 stuck", inside="score_without_end")
        victim = executor.snapshot().processes[1]
        os.kill(victim.pid, signal.SIGKILL)
        assert isinstance(run.exception(), WorkerLost)
        assert executor.explanation is not None
        first = executor.explanation.graph.root_causes[0]
        assert (first.cause, first.nodes) == ("gone", (f"{victim.name} stuck",))


class Trainer(Worker):
    """Publishes after each run; its versions can be counted up without one."""

    def __init__(self) -> None:
        self._weight = torch.zeros(4)
        self._version = 0

    def train(self, numbers: Reader[Number]) -> None:
        for _ in numbers:
            pass
        self._version += 1

    def count_up(self) -> None:
        self._version += 1

    def weights(self) -> dict[str, torch.Tensor]:
        return {"weight": self._weight}

    @property
    def policy_version(self) -> int:
        return self._version


class Server(Worker):
    """Serves the trainer's weights, when it gets to it."""

    def __init__(self) -> None:
        self._weight = torch.zeros(4)

    def serve(self, orders: Reader[Number]) -> None:
        for _ in orders:
            pass

    def never_serves(self, orders: Reader[Number]) -> None:
        time.sleep(3600)

    def weights(self) -> dict[str, torch.Tensor]:
        return {"weight": self._weight}


class SilentSync(SharedWeightSync):
    """What was published never comes."""

    @staticmethod
    def open_receiver(port: WeightPort) -> Any:
        return SilentSync.Receiver()

    class Receiver:
        def receive(self, tensors, policy_version, timeout_s=60.0):
            time.sleep(3600)


def served_flow(method: Callable[..., None]) -> Flow:
    flow = Flow("hangs").worker("trainer", Trainer).worker("server", Server)
    flow.stage("trainer", Trainer.train, reads="numbers", trains=True)
    flow.stage("server", method, reads="orders")
    return flow.weights("trainer", to="server")


@pytest.mark.slow
def test_a_silent_weight_sync(tmp_path):
    with running(tmp_path, served_flow(Server.serve), weight_sync=f"{HERE}:SilentSync") as executor:
        explanation = explained(executor, "trainer/0 sends weights to server")
    wait = explanation.nodes["server/0 server"].wait
    assert wait is not None and wait.target == "weights trainer -> server version 0"
    assert "root cause: trainer/0 sends weights to server (process " in explanation_text(explanation)


@pytest.mark.slow
def test_a_server_that_never_takes_weights(tmp_path):
    def publish_again(executor: Executor) -> None:
        executor.group("trainer").call("count_up")
        executor.sync_weights()

    with running(tmp_path, served_flow(Server.never_serves), before=publish_again) as executor:
        explanation = explained(executor, "server/0 server", inside="never_serves")
        while (wait := explanation.nodes["trainer/0 trainer"].wait) is None or wait.kind != "room for weights":
            explanation = explained(executor, "server/0 server", inside="never_serves")
    assert explanation.nodes["trainer/0 trainer"].whose_move == ("server/0 server",)


@pytest.mark.slow
def test_a_first_rank_that_hangs_alone(tmp_path):
    two = {"stuck": 2}
    flow = one_stage(Stuck.read_on_other_ranks)
    with running(tmp_path, flow, num_ranks=two, num_ranks_per_replica=two) as executor:
        explanation = explained(executor, "stuck/0 stuck", inside="read_on_other_ranks")
    wait = explanation.nodes["stuck/1 stuck"].wait
    assert wait is not None and wait.kind == "first rank"


@pytest.mark.slow
def test_other_ranks_that_hear_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(executor_module, "CHANNEL_ITEMS", 2)
    one, two = {"stuck": 1}, {"stuck": 2}
    flow = one_stage(Stuck.read_on_first_ranks)
    with running(tmp_path, flow, num_ranks=two, num_ranks_per_replica=two, granularity=one) as executor:
        explanation = explained(executor, "stuck/1 stuck", inside="read_on_first_ranks")
    wait = explanation.nodes["stuck/0 stuck"].wait
    assert wait is not None and wait.kind == "other ranks"


@pytest.mark.slow
def test_a_pool_that_is_full(tmp_path, monkeypatch):
    """A channel's memory, not its number of items."""
    monkeypatch.setattr(executor_module, "CHANNEL_BYTES", 1 << 20)
    flow, one = one_stage(Stuck.put_a_lot, writes="large"), {"stuck": 1, "taker": 1}
    flow.stages["taker"] = replace(flow.stages["taker"], method="never_takes")
    with running(tmp_path, flow, granularity=one, num_ranks=one) as executor:
        explanation = explained(executor, "taker/0 taker", inside="never_takes")
    wait, remark = explanation.nodes["stuck/0 stuck"].wait, explanation.nodes["stuck/0 stuck"].remark
    assert wait is not None and wait.target == "room in channel large"
    entries, num_bytes = (int(number) for number in re.findall(r"(\d+) (?:entries|of 1048576 bytes)", remark))
    assert entries < 10 and num_bytes > (1 << 20) - (200 << 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "first", "second"),
    [
        (Stuck.broadcast_on_rank_0, "broadcast 17", "all-reduce 17"),
        (Stuck.meet_apart, "all-reduce 1", "all-gather 1"),
    ],
)
def test_collectives_that_do_not_fit(tmp_path, method, first, second):
    with running(tmp_path, one_stage(method), num_ranks={"stuck": 2}) as executor:
        explanation = explained(executor, "stuck/0 stuck", "stuck/1 stuck", cause="mismatch")
    assert (
        f"root cause: collectives that do not fit: stuck/0 stuck waits for {first} of all ranks, "
        f"stuck/1 stuck waits for {second} of all ranks\n"
    ) in explanation_text(explanation)


@pytest.mark.slow
@pytest.mark.parametrize("has_py_spy", [True, False])
def test_a_rank_that_is_missing_in_a_collective_of_its_backend(tmp_path, monkeypatch, has_py_spy):
    """FSDP2 gathers its shards without telling anybody."""
    if not has_py_spy:
        monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with running(tmp_path, one_stage(Stuck.gather_shards_on_rank_0), num_ranks={"stuck": 2}) as executor:
        explanation = explained(executor, "stuck/1 stuck", inside="gather_shards_on_rank_0")
    wait = explanation.nodes["stuck/0 stuck"].wait
    assert wait is not None and wait.kind == "backend collective"
    assert explanation.nodes["stuck/0 stuck"].whose_move == ("stuck/1 stuck",)
    assert "stuck/0 stuck waits for the other ranks inside torch.distributed (" in explanation_text(explanation)


class FarStuck(Stuck):
    """On another host, for all that it says."""

    def __init__(self) -> None:
        platform.node = lambda: "elsewhere"


@pytest.mark.slow
def test_a_rank_on_another_host_is_seen_by_one_of_that_host(tmp_path):
    flow = Flow("hangs").worker("stuck", FarStuck).stage("stuck", Stuck.meet_again_and_again, reads="numbers")
    with running(tmp_path, flow, num_ranks={"stuck": 2}) as executor:
        while not any(wait.kind == "collective" and wait.number for wait in executor.snapshot().waits):
            time.sleep(0.1)
        pid = next(one.pid for one in executor.snapshot().processes if one.name == "stuck/0")
        os.kill(pid, signal.SIGSTOP)
        explanation, deadline = executor.explain(executor.snapshot()), time.monotonic() + FOUND_S
        while explanation.graph.root_causes[0].cause != "stopped":  # nobody there had the time to look
            assert time.monotonic() < deadline, explanation_text(explanation)
            explanation = executor.explain(executor.snapshot())
    assert {one.host for one in explanation.snapshot.processes} == {platform.node(), "elsewhere"}
    assert explanation.graph.root_causes[0].nodes == ("stuck/0 stuck",), "stuck/1 has seen it"
    assert f"root cause: stuck/0 stuck (process {pid}) is stopped" in explanation_text(explanation)
