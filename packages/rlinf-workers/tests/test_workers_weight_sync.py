"""The shipped weight sync keeps its promises, and edges choose theirs by where their ends are."""

import ctypes
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from comm_host_device import HostDevice

from rlinf_comm import LayoutError, WeightTimeout
from rlinf_comm.weights import reshard_plan
from rlinf_workers.addresses import own_address
from rlinf_workers.errors import FlowDefinitionError
from rlinf_workers.testing.weight_sync import (
    CHECKS,
    WHOLE,
    check_a_flipped_byte,
    check_a_missing_version,
    check_versions,
)
from rlinf_workers.weight_sync.base import WeightPort
from rlinf_workers.weight_sync.choose import choose
from rlinf_workers.weight_sync.per_node.sync import PerNodeWeightSync
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync
from rlinf_workers.weight_sync.spec import EdgeEnds, WeightSyncSpec
from rlinf_workers.weight_sync.streams import sync as streams_sync
from rlinf_workers.weight_sync.streams.sync import StreamsWeightSync

pytestmark = pytest.mark.usefixtures("forked_workers")

MOST_CHECKS = [pytest.param(one, marks=pytest.mark.slow) if one is check_versions else one for one in CHECKS]
"""Resharding is the same for all weight syncs."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_shared_memory_conforms(check):
    check(SharedWeightSync)


def test_shared_memory_refuses_a_flipped_byte():
    def flip(sync):
        ctypes.c_uint8.from_address(sync._store.slots_pointer).value ^= 1

    check_a_flipped_byte(SharedWeightSync, flip)


@pytest.mark.parametrize("check", MOST_CHECKS, ids=lambda check: check.__name__)
def test_streams_conform(check):
    check(StreamsWeightSync)


class OnDevice(StreamsWeightSync):
    """All tensors are on a device."""

    @staticmethod
    def find_device():
        return HostDevice()


@pytest.mark.slow
def test_streams_between_devices_conform():
    check_versions(OnDevice)


def test_streams_without_deltas_conform():
    check_a_missing_version(StreamsWeightSync, deltas=False)


@pytest.mark.parametrize("check", MOST_CHECKS, ids=lambda check: check.__name__)
def test_once_for_each_node_conforms(check):
    check(PerNodeWeightSync)


@pytest.mark.slow
def test_a_node_for_each_rank_conforms():
    check_versions(OfTwoNodes)


class OfTwoNodes(PerNodeWeightSync):
    """The serving ranks, one or two, are on as many nodes."""

    def __init__(self, edge, reshard):
        super().__init__(edge, reshard, nodes=[4, 2][: reshard.num_dst_ranks])


class FlippingSync(StreamsWeightSync):
    """Its receiver finds a flipped bit in the first version's bytes."""

    @classmethod
    def open_receiver(cls, port):
        opened = StreamsWeightSync.open_receiver(port)
        _flip_once(opened)
        return opened


def _flip_once(stream: Any) -> None:
    data_of, is_flipped = stream._receiver._data_of, []

    def flipped(message, *rest):
        data = data_of(message, *rest)
        if not is_flipped:
            is_flipped.append(True)
            data = np.array(data)
            data[3] ^= 8
        return data

    stream._receiver._data_of = flipped


def test_streams_refuse_a_flipped_byte():
    check_a_flipped_byte(FlippingSync, lambda sync: None)


class FlippingOnItsWay(PerNodeWeightSync):
    """A bit flips before the first version's bytes are in the memory of the node."""

    @staticmethod
    def open_receiver(port):
        opened: Any = PerNodeWeightSync.open_receiver(port)
        _flip_once(opened._keeper._stream)
        return opened


class FlippingInANode(PerNodeWeightSync):
    """A bit flips in the memory of the node, after the ranks have been told what is there."""

    @staticmethod
    def open_receiver(port):
        opened: Any = PerNodeWeightSync.open_receiver(port)
        copy, is_flipped = opened._receiver._copy, []

        def flipped(*arguments):
            if not is_flipped:
                is_flipped.append(True)
                ctypes.c_uint8.from_address(opened._keeper.store.slots_pointer).value ^= 1
            return copy(*arguments)

        opened._receiver._copy = flipped
        return opened


@pytest.mark.parametrize("sync", [FlippingOnItsWay, pytest.param(FlippingInANode, marks=pytest.mark.slow)])
def test_once_for_each_node_refuses_a_flipped_byte_on_both_ways(sync):
    check_a_flipped_byte(sync, lambda sync: None)


@pytest.fixture
def sender():
    """A sender whose receiver never comes."""
    reshard = reshard_plan(WHOLE, WHOLE)
    sync = StreamsWeightSync("edge", reshard)
    port = WeightPort(edge="edge", side="send", rank=0, reshard=reshard, weight_sync="streams", address=sync.address)
    sender = StreamsWeightSync.open_sender(port)
    yield sender
    sender._peer.close()
    sync._peer.close()


def test_a_port_that_another_process_took_meanwhile_is_not_the_end(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        free_port = streams_sync._free_port
        answers = iter([taken, free_port("127.0.0.1")])
        monkeypatch.setattr(streams_sync, "_free_port", lambda host: next(answers))
        sync = StreamsWeightSync("edge", reshard_plan(WHOLE, WHOLE))
        sync._peer.close()
    assert sync.address[0] != f"127.0.0.1:{taken}"


TENSORS = {"a": torch.ones(5, 4), "b": torch.arange(6)}


def test_a_sender_of_streams_keeps_two_versions_and_then_says_who_is_late(sender, monkeypatch):
    monkeypatch.setattr("rlinf_workers.weight_sync.streams.sync.ROOM_S", 0.05)
    sender.publish(TENSORS, 0)
    sender.publish(TENSORS, 1)
    with pytest.raises(WeightTimeout, match=r"edge, receive 0 has not taken the last 2 versions .* version 2 needs"):
        sender.publish(TENSORS, 2)


def test_no_third_version_is_copied_before_there_is_room(sender, monkeypatch):
    copies = []

    class Watched(torch.Tensor):
        def detach(self):
            copies.append(self)
            return torch.ones(5, 4)

    def publish(version):
        sender.publish({**TENSORS, "a": torch.ones(5, 4).as_subclass(Watched)}, version)

    monkeypatch.setattr("rlinf_workers.weight_sync.streams.sync.ROOM_S", 0.05)
    for version in range(2):
        publish(version)
    assert len(copies) == 2
    with pytest.raises(WeightTimeout):
        publish(2)
    assert len(copies) == 2


def test_what_keeps_a_version_from_going_is_raised_by_the_next(sender):
    sender.publish({"a": torch.ones(3, 4), "b": torch.arange(6)}, 0)
    end_s = time.monotonic() + 30
    while sender._ways[0]._failure is None:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    with pytest.raises(LayoutError, match="a: has the shape"):
        sender.publish(TENSORS, 1)


def test_who_waits_for_room_is_told_what_failed(sender, monkeypatch):
    monkeypatch.setattr("rlinf_workers.weight_sync.streams.sync.ROOM_S", 10.0)
    is_full = threading.Event()

    def fails(*_):
        is_full.wait()
        raise LayoutError("broken")

    monkeypatch.setattr(sender._ways[0], "_is_taken", fails)
    sender.publish(TENSORS, 0)
    sender.publish(TENSORS, 1)
    threading.Timer(0.1, is_full.set).start()
    with pytest.raises(LayoutError, match="broken"):
        sender.publish(TENSORS, 2)


class PacedSpec(WeightSyncSpec):
    """A custom weight sync that derives an option from where the ends are."""

    def settings(self, ends):
        return {"pace": len(ends.targets)}


PACED = PacedSpec(name="paced", implementation=StreamsWeightSync)


def ends(sources, targets, *, on_gpus):
    return EdgeEnds(sources=sources, targets=targets, on_gpus=on_gpus)


def test_auto_chooses_by_where_the_ends_are():
    streams = ("streams", {"host": own_address()})
    assert choose("auto", {}, ends([0], [0, 0], on_gpus=False)) == [("shared", {})]
    assert choose("auto", {}, ends([0], [0], on_gpus=True)) == [("device", {}), ("shared", {})]
    assert (
        choose("auto", {}, ends([0], [1, 0], on_gpus=True))
        == choose("auto", {}, ends([0], [1, 0], on_gpus=False))
        == [streams]
    )
    assert choose("auto", {}, ends([0], [1, 1], on_gpus=True)) == [streams]
    once = ("per_node", {"host": own_address(), "nodes": [1, 1, 0]})
    assert choose("auto", {}, ends([0], [1, 1, 0], on_gpus=False)) == [once]
    assert (
        choose("auto", {}, ends([1], [1], on_gpus=True))
        == choose("auto", {}, ends([1], [1], on_gpus=False))
        == [streams]
    )
    assert choose("auto", {}, ends([1], [1, 1], on_gpus=False))[0][0] == "per_node", "the driver is elsewhere"
    assert choose("per_node", {}, ends([0], [1, 1, 0], on_gpus=True)) == [once]
    assert choose("per_node", {"deltas": False}, ends([0], [0], on_gpus=True)) == [
        ("per_node", {"nodes": [0], "deltas": False})
    ]
    apart = replace(ends([0], [1, 1], on_gpus=False), same_versions=False)
    assert choose("auto", {}, apart) == [streams], "ranks of a node take different versions"
    with pytest.raises(FlowDefinitionError, match=r"these may take different ones .*; use weight sync streams"):
        choose("per_node", {}, apart)
    own = f"{__name__}:OnDevice"
    assert choose(own, {"pace": 2}, ends([0], [1], on_gpus=True)) == [(own, {"pace": 2})]
    own = f"{__name__}:PACED"
    assert choose(own, {}, ends([0], [1], on_gpus=True)) == [(own, {"pace": 1})]
    assert choose(own, {"pace": 2}, ends([0], [1], on_gpus=True)) == [(own, {"pace": 2})]
    assert choose("streams", {}, ends([0], [1], on_gpus=True)) == [streams]
    assert choose("streams", {"host": "b"}, ends([0], [1], on_gpus=True)) == [("streams", {"host": "b"})]
