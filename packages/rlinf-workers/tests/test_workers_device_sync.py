"""The device sync keeps a weight sync's promises, over host memory that stands for a device's and really crosses."""

import ctypes
import re
from typing import Any

import pytest
import torch
from comm_host_device import HostDevice

from rlinf_comm import IpcError
from rlinf_comm.weights import reshard_plan
from rlinf_comm.weights.device.memory import read_export
from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, StepContext
from rlinf_workers.errors import WeightSyncRefused
from rlinf_workers.testing.toy_flow import Number, reference_run, toy_flow
from rlinf_workers.testing.weight_sync import CHECKS, WHOLE, check_a_flipped_byte, check_a_missing_version
from rlinf_workers.weight_sync.base import WeightPort
from rlinf_workers.weight_sync.device.sync import DeviceWeightSync

pytestmark = pytest.mark.usefixtures("forked_workers")


class OnDevice(DeviceWeightSync):
    """All tensors are on the device."""

    @staticmethod
    def make_device():
        return HostDevice()


class FromHost(DeviceWeightSync):
    """All tensors are on the host, on both sides."""

    @staticmethod
    def make_device():
        return HostDevice("cuda")


class Unreadable(OnDevice):
    """A receiver cannot open what a sender has."""

    @staticmethod
    def make_device():
        return HostDevice(refuses=("import_descriptor",))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_device_memory_conforms(check):
    check(OnDevice)


def test_tensors_that_are_still_on_the_host_conform():
    check_a_missing_version(FromHost)


def test_device_memory_refuses_a_flipped_byte():
    def flip(opened):
        export = read_export(opened._store, opened._reshard, 0, 0)
        assert export is not None
        ctypes.c_uint8.from_address(export.handles[0].pointer).value ^= 1  # of the sender, which is this process

    check_a_flipped_byte(OnDevice, flip)


def test_a_device_without_room_says_what_to_do():
    reshard = reshard_plan(WHOLE, WHOLE)
    sync = OnDevice("edge", reshard)
    port = WeightPort(edge="edge", side="send", rank=0, reshard=reshard, weight_sync="device", address=sync.address)
    sender = OnDevice.open_sender(port)
    driver: Any = HostDevice().driver
    driver.refuses.add("create_mapping")
    try:
        with pytest.raises(IpcError, match=r"weights edge, version 3: no arena of 1024 .* use weight sync `sha"):
            sender.publish({"a": torch.ones(5, 4), "b": torch.arange(6)}, 3)
    finally:
        driver.refuses.discard("create_mapping")


NUMBERS = [Number(index=i, value=float(i)) for i in range(4)]


def test_without_a_gpu_the_link_says_so():
    reshard = reshard_plan(WHOLE, WHOLE)
    sync = DeviceWeightSync("edge", reshard)
    port = WeightPort(edge="edge", side="send", rank=0, reshard=reshard, weight_sync="device", address=sync.address)
    with pytest.raises(WeightSyncRefused, match=r"edge, sender 0: .*CUDA"):
        DeviceWeightSync.open_sender(port)


@pytest.mark.slow
def test_auto_takes_the_next_link_and_notes_why(tmp_path, monkeypatch):
    refused = f"{__name__}:Unreadable"
    syncs = [(refused, {}), ("shared", {})]
    monkeypatch.setattr("rlinf_workers.execution.weight_edges.choose", lambda *_, **__: syncs)
    flow, cluster = toy_flow(), Cluster.cpu_slots(2)
    environment = {"OMP_NUM_THREADS": "1"}
    with Executor(cluster=cluster, log_folder=tmp_path, env_vars=environment) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), cluster, "disaggregated"))
        executor.sync_weights()
        context = StepContext(step=0, phase="train", seed=0, num_items=len(NUMBERS))
        run = executor.run(flow, context=context, feeds={"numbers": NUMBERS}, timeout_s=600)
    assert [run.metrics["learn/weight"]] == reference_run([number.value for number in NUMBERS], 1)
    (note,) = executor.notes
    assert note.startswith(f"weights learn -> scale are sent by shared and not by {refused}: ")
    assert re.search("receiver 0: .*cannot read", note)
