"""Syncs of an adapter: the base is moved once and stays attested, each version moves the adapter alone."""

import os
import signal
import threading
from concurrent.futures import Future

import pytest
import torch

from rlinf_comm import WeightMismatchError
from rlinf_comm.weights import Layout, reshard_plan, specs_of
from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, LocalLauncher, StepContext, WorkerLost
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers.base import Identity
from rlinf_workers.testing.toy_flow import Learn, Number, Scale, Shift, reference_run
from rlinf_workers.weight_sync.base import UnmergedLayout, WeightPort
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync
from rlinf_workers.worker import Worker

NUMBERS = [Number(index=i, value=float(i)) for i in range(10)]
CLUSTER = Cluster.cpu_slots(2)
BASE, A, B = "w.weight", "w.lora_A.weight", "w.lora_B.weight"


class AdaptedLearn(Learn):
    """Moves A of an adapter, whose base is 1."""

    def __init__(self) -> None:
        super().__init__()
        self._base, self._weight = torch.ones(1), torch.zeros(1)

    def weights(self):
        return {BASE: self._base + self._weight}

    def unmerged_weights(self):
        return {BASE: self._base, A: self._weight, B: torch.ones(1)}

    def unmerged_layout(self) -> UnmergedLayout:
        return UnmergedLayout(layout=Layout.replicated(specs_of(self.unmerged_weights()), 1), frozen=(BASE,))


class AdaptedScale(Scale):
    """Multiplies by the base plus its update, which are 0 until they are received."""

    def __init__(self) -> None:
        self._tensors = {name: torch.zeros(1) for name in (BASE, A, B)}
        self._on_device = True

    @property
    def _weight(self) -> torch.Tensor:
        return self._tensors[BASE] + self._tensors[B] * self._tensors[A]

    def weights(self):
        return self._tensors


def flow_of(server: type[Worker]) -> Flow:
    flow = Flow("toy").worker("scale", server).worker("shift", Shift).worker("learn", AdaptedLearn)
    flow.stage("scale", server.scale, reads="numbers", writes="scaled")
    flow.stage("shift", Shift.shift, reads="scaled", writes="shifted", needs_device=False)
    flow.stage("learn", AdaptedLearn.learn, reads="shifted", dispatch="key", trains=True)
    flow.weights("learn", to="scale")
    return flow


def run(executor: Executor, flow: Flow, step: int) -> float:
    context = StepContext(step=step, phase="train", seed=0, num_items=len(NUMBERS))
    done = executor.run(flow, context=context, feeds={"numbers": NUMBERS}, timeout_s=60.0)
    return done.metrics["learn/weight"] + 1.0


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("sync", ["shared", "streams"])
def test_a_version_moves_the_adapter_and_a_new_server_gets_base_and_adapter(tmp_path, sync):
    flow, expected = flow_of(AdaptedScale), reference_run([number.value for number in NUMBERS], 3)
    plan = plan_for_mode(flow.graph(), CLUSTER, "disaggregated")
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path, weight_sync=sync) as executor:
        executor.start(flow, plan)
        executor.sync_weights()
        assert [run(executor, flow, step) for step in range(2)] == expected[:2]
        assert executor.weights_bytes(flow.graph().weight_edges[0]) == 8
        assert any("a sync moves the adapter, 8 bytes; the frozen weights, 4 bytes" in note for note in executor.notes)
        victim = executor.group("scale").call("process")[0][1]
        threading.Timer(0.0, os.kill, (victim, signal.SIGKILL)).start()
        with pytest.raises(WorkerLost, match="scale/0"):
            run(executor, flow, 2)
        assert executor.repair() == {"scale"}
        executor.sync_weights()
        assert run(executor, flow, 2) == expected[2]


class MergedScale(Scale):
    """Serves no adapter."""

    def weights(self):
        return {BASE: self._weight}


@pytest.mark.usefixtures("forked_workers")
def test_a_server_without_adapters_receives_merged_weights_and_a_note_says_so(tmp_path):
    flow = flow_of(MergedScale)
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated"))
        executor.sync_weights()
        assert run(executor, flow, 0) == reference_run([number.value for number in NUMBERS], 1)[0]
        assert any("scale serves no adapter, so it is merged" in note for note in executor.notes)


def test_frozen_weights_are_compared_again_after_they_have_moved():
    specs = specs_of({BASE: torch.ones(4)})
    reshard = reshard_plan(Layout.replicated(specs, 1), Layout.replicated(specs, 1))
    sync = SharedWeightSync("learn -> scale", reshard)
    port = WeightPort(
        edge="learn -> scale",
        side="receive",
        rank=0,
        reshard=reshard,
        weight_sync="shared",
        address=sync.address,
        tensors="frozen",
    )
    host = WorkerHost(Identity(role="scale", rank=0, num_ranks=1), lambda *_, **__: Future())
    served = host.make(AdaptedScale)._tensors
    served[BASE] = torch.zeros(4)
    sender = SharedWeightSync.open_sender(port)
    sender.publish({BASE: torch.arange(4.0)}, 0)
    host.open_weights([port])
    host._receive("learn -> scale (frozen)", 0)
    (check,) = host._checks.values()
    check.result()
    host.may_discard = True
    for is_changed in (False, True):
        host.unload()
        assert host.served_versions == {"learn -> scale (frozen)": 0}
        served[BASE] = served[BASE].clone()
        served[BASE][2] += float(is_changed)
        host.load()
        (check,) = host._checks.values()
        if is_changed:
            with pytest.raises(WeightMismatchError, match=r"learn -> scale: .*w\.weight has changed"):
                check.result()
        else:
            check.result()
