"""Weights to the ranks of another host: they cross once, and whoever dies there is noticed."""

import gc
import os
import secrets
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlinf_comm import WeightTimeout
from rlinf_comm.weights import Layout, reshard_plan
from rlinf_comm.wire import SECRET_VARIABLE, address, this_host
from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, StepContext, Worker
from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.testing.launchers import NOTICE_S, START_S, launched, start
from rlinf_workers.testing.toy_flow import Number, reference_run, toy_flow
from rlinf_workers.testing.weight_sync import ROWS, SPECS
from rlinf_workers.weight_sync.base import WeightPort
from rlinf_workers.weight_sync.per_node import sync as per_node
from rlinf_workers.weight_sync.per_node.sync import PerNodeWeightSync

NUM_RANKS = 3
EACH = Layout.replicated(SPECS, NUM_RANKS)


class Elsewhere(Worker):
    """A serving rank of another host."""

    def open(self, port: WeightPort) -> int:
        there = replace(this_host(), boot_id="there")
        address.this_host = lambda: there
        self._receiver = PerNodeWeightSync.open_receiver(port)
        self._held = {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in SPECS.items()}
        return os.getpid()

    def receive(self, version: int) -> dict[str, Any]:
        self._receiver.receive(self._held, version, START_S)()
        return self._held


def shard(version: int, rank: int) -> dict[str, torch.Tensor]:
    """Rows of a version."""
    rows = slice(0, 3) if rank == 0 else slice(3, None)
    return {name: tensor[rows].clone() for name, tensor in whole(version).items()}


def whole(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {"a": torch.randn(5, 4, generator=generator), "b": torch.arange(6) + 100 * version}


def counted(sender, sent_reports):
    """Its ways put down what they send."""
    for way in sender._ways:
        publish = way._sender.publish

        def published(*arguments, publish=publish, **named):
            reports = publish(*arguments, **named)
            sent_reports.extend(reports)
            return reports

        way._sender.publish = published


@pytest.mark.slow
def test_each_byte_crosses_once_and_deaths_are_noticed(tmp_path):
    reshard = reshard_plan(ROWS, EACH)
    sync = PerNodeWeightSync("edge", reshard, nodes=[1] * NUM_RANKS)
    port = WeightPort(edge="edge", side="send", rank=0, reshard=reshard, weight_sync="per_node", address=sync.address)
    reports: list[Any] = []
    with launched(LocalLauncher) as launcher:
        ranks = start(launcher, tmp_path, Elsewhere, num_ranks=NUM_RANKS).handles
        senders = [PerNodeWeightSync.open_sender(replace(port, rank=rank)) for rank in range(2)]
        opening = [handle.call("open", replace(port, side="receive", rank=rank)) for rank, handle in enumerate(ranks)]
        pids = [opened.result(START_S) for opened in opening]
        for sender in senders:
            counted(sender, reports)

        def publish(version):
            for rank, sender in enumerate(senders):
                sender.publish(shard(version, rank), version)

        publish(1)
        for taken in [handle.call("receive", 1) for handle in ranks]:
            for name, tensor in taken.result(START_S).items():
                assert torch.equal(tensor, whole(1)[name]), name
        assert sum(report.sent_bytes for report in reports) == sum(spec.num_bytes for spec in SPECS.values())
        assert senders[0]._peer.transport_to("edge, receive 0").name == "tcp"

        os.kill(pids[2], signal.SIGKILL)
        for version in (2, 3):
            publish(version)
            for handle in ranks[:2]:
                handle.call("receive", version).result(START_S)
        publish(4)
        error = ranks[0].call("receive", 4).exception(START_S)
        assert "process of receiver 2 died before it took version 2" in str(error)
        os.kill(pids[0], signal.SIGKILL)
        error = ranks[1].call("receive", 4).exception(NOTICE_S)
        assert "process of sender 0 died before it published version 4" in str(error)


def test_a_node_that_no_trainer_comes_to_says_what_it_waited_for():
    """Also its other ranks, which were not told yet where the memory is."""
    reshard = reshard_plan(ROWS, Layout.replicated(SPECS, 2))
    sync = PerNodeWeightSync("edge", reshard)
    port = WeightPort(
        edge="edge", side="receive", rank=1, reshard=reshard, weight_sync="per_node", address=sync.address
    )
    tensors = {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in SPECS.items()}
    for rank, text in ((1, "version 3: the first rank of this node has not said"), (0, "version 3 has not come")):
        receiver = PerNodeWeightSync.open_receiver(replace(port, rank=rank))
        with pytest.raises(WeightTimeout, match=text):
            receiver.receive(tensors, 3, 0.2)


def test_what_a_node_keeps_goes_with_its_receiver(monkeypatch):
    monkeypatch.setattr(per_node, "LOOK_S", 0.1)
    reshard = reshard_plan(ROWS, Layout.replicated(SPECS, 1))
    sync = PerNodeWeightSync("kept", reshard)
    port = WeightPort(
        edge="kept", side="receive", rank=0, reshard=reshard, weight_sync="per_node", address=sync.address
    )
    receiver = PerNodeWeightSync.open_receiver(port)
    (keeping,) = (thread for thread in threading.enumerate() if thread.name == "weights kept")
    del receiver
    gc.collect()
    keeping.join(START_S)
    assert not keeping.is_alive()
    PerNodeWeightSync.open_receiver(port)  # its name is free


@pytest.mark.slow
def test_a_run_takes_it_for_several_ranks_of_another_node(tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, secrets.token_hex(32))
    slots = Cluster.cpu_slots(3).devices
    cluster = Cluster(devices=tuple(replace(slot, node=node) for slot, node in zip(slots, (0, 0, 1), strict=True)))
    flow, numbers = toy_flow(), [Number(index=i, value=float(i)) for i in range(10)]
    placed = plan_for_mode(flow.graph(), cluster, "disaggregated", num_ranks={"scale": 2}, granularity={"scale": 1})
    assert (placed.stage("scale").devices, placed.stage("learn").devices) == ((0, 1), (2,))
    expected = reference_run([number.value for number in numbers], 2)
    with Executor(cluster=cluster, log_folder=tmp_path, env_vars={"OMP_NUM_THREADS": "1"}) as executor:
        executor.start(flow, placed)
        executor.sync_weights()
        for step in range(2):
            context = StepContext(step=step, phase="train", seed=0, num_items=len(numbers))
            run = executor.run(flow, context=context, feeds={"numbers": numbers}, timeout_s=600)
            assert run.metrics["learn/weight"] == expected[step]
        ((sync,),) = executor._weights.weight_syncs.values()
        assert isinstance(sync, PerNodeWeightSync) and list(sync.address[1]) == [0, 0]
