"""Peers that hand over tensors in device memory by IPC, against a device of host memory; no GPU."""

import contextlib
import itertools
import os
import time
from typing import Any

import numpy as np
import pytest
import torch
from comm_device_peer import accelerator
from comm_fake_accelerator import FakeAccelerator, nccl_transport
from comm_nurseries import Nursery, kill, wait_until

from rlinf_comm.errors import NoTransport, PeerLost, PeerTimeout, UnsupportedValueError
from rlinf_comm.ipc import IpcArena, leases, opened
from rlinf_comm.peers import Peer
from rlinf_comm.peers.transports.base import Unusable
from rlinf_comm.peers.transports.cuda_ipc import CudaIpcTransport
from rlinf_comm.testing import TRANSPORT_CHECKS, PeersOver, assert_bitwise_equal
from rlinf_comm.wire.deadline import Deadline

HANG_S = 60.0


@pytest.fixture
def ipc(monkeypatch):
    """make(): the transport for peers of this process, each of whose ends takes the others for other processes."""
    monkeypatch.setattr(opened, "is_own", lambda handle: False)
    monkeypatch.setattr(leases, "_is_here", lambda process: False)
    namespaces = itertools.count(1)
    accelerators = []

    def make(**options):
        def open_accelerator():
            accelerators.append(FakeAccelerator(namespace=next(namespaces), **options))
            return accelerators[-1]

        return CudaIpcTransport(open_accelerator)

    make.made = accelerators
    return make


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_ipc_conforms(check, ipc):
    with PeersOver(ipc()) as peers:
        check(peers)


def outgoing_to(peer: Peer, name: str) -> Any:
    """The sending end of the link, met if it was not; whose it is, the test knows."""
    peer.transport_to(name)
    link = peer._links.get(name)
    assert link is not None
    return link.outgoing


def receive_until_lost(peer, from_):
    while True:
        peer.receive(from_, timeout_s=HANG_S)


def send_until_lost(peer, to):
    end_s = time.monotonic() + HANG_S
    while time.monotonic() < end_s:
        peer.send(to, torch.ones(1000), timeout_s=HANG_S)


# --- between two processes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery():
    with Nursery("torch") as nursery:
        yield nursery


@pytest.fixture
def echo(nursery):
    """(a peer with the fake device, pid of another process that sends everything back)"""
    with Peer.listen("parent", transports=(CudaIpcTransport(accelerator), "shared")) as me:
        child = nursery.start("device_echo", me.address)
        first = me.receive("echo", timeout_s=HANG_S)
        assert first == "here"
        yield me, child


def test_tensors_cross_to_another_process_and_back_bit_for_bit(echo):
    me, _ = echo
    chosen = me.transport_to("echo")
    assert chosen.name == "ipc" and chosen.refused == ()
    assert "both on GPU-41414141-" in chosen.reason and "through a descriptor handle" in chosen.reason
    base = torch.randn(64, 48, generator=torch.Generator().manual_seed(3))
    values = [
        {"w": base.bfloat16()[3:40, 5:].t(), "host": np.arange(5), "n": 3},
        [base[:0], torch.tensor(2.5), (base, base)],
        torch.arange(30_000_000, dtype=torch.int32),  # larger than the capacity
        "no tensor",
        *(torch.full((1 << 20,), i % 100, dtype=torch.uint8) for i in range(100)),  # more than leases and capacity
    ]
    for value in values:
        me.send("echo", value, timeout_s=HANG_S)
        assert_bitwise_equal(me.receive("echo", timeout_s=HANG_S), value)


def test_a_tensor_in_an_arena_crosses_without_a_copy_and_its_room_comes_back(echo):
    me, _ = echo
    link = outgoing_to(me, "echo")
    device = link._accelerator
    arena = IpcArena.create(0, 1 << 20, driver=device.driver)
    memory = arena.reserve(4096)
    tensor = device.tensor_over(memory, (32, 32), (32, 1), torch.float32)
    tensor.copy_(torch.arange(1024.0).view(32, 32))
    view = tensor[4:20, 1::3]
    for _ in range(3):
        me.send("echo", view, timeout_s=HANG_S)
        assert_bitwise_equal(me.receive("echo", timeout_s=HANG_S), view.contiguous())
    assert link._arenas == []
    me.send("echo", torch.zeros(10), timeout_s=HANG_S)
    me.receive("echo", timeout_s=HANG_S)
    assert len(link._arenas) == 1
    me.send("echo", torch.zeros(10), timeout_s=HANG_S)
    me.receive("echo", timeout_s=HANG_S)
    assert link._take_back(Deadline(HANG_S))
    assert link._arenas[0]._ranges.num_free() == link._arenas[0].handle.num_bytes


def test_a_tensor_of_the_link_s_arena_may_follow_one_of_another_that_nobody_has_received(ipc):
    with PeersOver(ipc()) as peers:
        a, b = peers.make("a", "b")
        a.send("b", "first", timeout_s=HANG_S)
        device = outgoing_to(a, "b")._accelerator
        arena = IpcArena.create(0, 4096, driver=device.driver)
        a.send("b", device.tensor_over(arena.reserve(64), (4, 4), (4, 1), torch.float32).fill_(1.0), timeout_s=HANG_S)
        a.send("b", torch.full((3,), 2.0), timeout_s=HANG_S)
        assert b.receive("a", timeout_s=HANG_S) == "first"
        assert (b.receive("a", timeout_s=HANG_S) == 1).all()
        assert (b.receive("a", timeout_s=HANG_S) == 2).all()


def test_events_are_recorded_after_the_value_is_on_its_way_and_waited_for_by_the_reader(echo):
    me, _ = echo
    me.send("echo", torch.ones(3), timeout_s=HANG_S)
    me.receive("echo", timeout_s=HANG_S)
    names = [call[0] for call in outgoing_to(me, "echo")._accelerator.driver.calls]
    assert "record_event" in names
    me.send("echo", torch.ones(3), timeout_s=HANG_S)
    names = [call[0] for call in outgoing_to(me, "echo")._accelerator.driver.calls]
    assert names[-2:] == ["wait_for_event", "record_event"], "the room of the first was taken over before it was read"


def test_a_killed_process_is_a_lost_peer_on_both_sides(echo):
    me, child = echo
    me.send("echo", torch.ones(3), timeout_s=HANG_S)
    me.receive("echo", timeout_s=HANG_S)
    me.send("echo", ("keep", torch.ones(1000)), timeout_s=HANG_S)
    kill(child)
    with pytest.raises(PeerLost, match="'echo'"):
        receive_until_lost(me, "echo")
    with pytest.raises(PeerLost, match="'echo'"):
        send_until_lost(me, "echo")


def test_values_that_wait_when_the_sender_closes_still_arrive_and_its_memory_ends_with_them(ipc):
    transport = ipc()
    before = len(os.listdir("/proc/self/fd"))
    with Peer.listen("b", transports=(transport,)) as b:
        a = Peer.listen("a", transports=(transport,))
        a.connect(b.address, timeout_s=HANG_S)
        for index in range(5):
            a.send("b", torch.full((1000,), index), timeout_s=HANG_S)
        a.close()
        for index in range(5):
            assert (b.receive("a", timeout_s=HANG_S) == index).all()
        with pytest.raises(PeerLost, match="'a' has left"):
            b.receive("a", timeout_s=HANG_S)
    wait_until(lambda: not any(each.driver.live for each in ipc.made))
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)  # the servers of segments and descriptors


def test_a_full_arena_waits_and_says_for_what(ipc):
    transport = ipc()
    with (
        Peer.listen("a", transports=(transport,), capacity_bytes=1 << 20) as a,
        Peer.listen("b", transports=(transport,)) as b,
    ):
        a.connect(b.address, timeout_s=HANG_S)
        half = torch.zeros(1 << 19, dtype=torch.uint8)
        a.send("b", half + 1, timeout_s=HANG_S)
        a.send("b", half + 2, timeout_s=HANG_S)
        with pytest.raises(PeerTimeout, match=r"2 values in device memory wait for the receiver.*over CUDA IPC"):
            a.send("b", half + 3, timeout_s=0.2)
        assert (b.receive("a", timeout_s=HANG_S) == 1).all()
        a.send("b", half + 4, timeout_s=HANG_S)
        assert [int(b.receive("a", timeout_s=HANG_S)[0]) for _ in range(2)] == [2, 4]


@pytest.mark.parametrize("over", ["ipc", "nccl"])
def test_sender_and_receiver_do_not_see_each_other_s_later_writes(over, ipc):
    with PeersOver(ipc() if over == "ipc" else nccl_transport()) as peers:
        a, b = peers.make("a", "b")
        tensor = torch.ones(1000)
        a.send("b", [tensor, tensor[::2]], timeout_s=HANG_S)
        tensor.fill_(2.0)
        received = b.receive("a", timeout_s=HANG_S)
        assert (received[0] == 1).all() and (received[1] == 1).all()
        a.send("b", torch.full((1000,), 3.0), timeout_s=HANG_S)  # takes the room of the first
        received[1].fill_(4.0)
        assert (received[0] == 1).all()
        assert (b.receive("a", timeout_s=HANG_S) == 3).all()


@pytest.mark.parametrize("over", ["ipc", "nccl"])
def test_a_value_that_the_host_link_does_not_take_in_time_leaves_nothing_behind(over, ipc):
    with PeersOver(ipc() if over == "ipc" else nccl_transport()) as peers:
        a, b = peers.make("a", "b")
        num_sent = 0
        for size in (100_000, 10):  # until not even the form of a tensor has room
            with contextlib.suppress(PeerTimeout):
                while True:
                    a.send("b", np.zeros(size), timeout_s=0.2)
                    num_sent += 1
        for _ in range(3):
            with pytest.raises(PeerTimeout, match="'b'"):
                a.send("b", torch.zeros(5), timeout_s=0.05)
        for _ in range(num_sent):
            b.receive("a", timeout_s=HANG_S)
        for index in range(3):
            a.send("b", torch.full((5,), index), timeout_s=HANG_S)
            assert (b.receive("a", timeout_s=HANG_S) == index).all()


def test_a_receiver_that_closes_lets_go_of_what_it_has_not_received(ipc):
    transport = ipc()
    with Peer.listen("a", transports=(transport,)) as a:
        with Peer.listen("b", transports=(transport,)) as b:
            a.connect(b.address, timeout_s=HANG_S)
            for index in range(3):
                a.send("b", torch.full((1000,), index), timeout_s=HANG_S)
        a.close()
    wait_until(lambda: not any(each.driver.live for each in ipc.made))


# --- which transport, and why not -------------------------------------------------------------------------------------


def no_device():
    raise Unusable("this process has not used a CUDA device")


def test_without_a_device_the_next_transport_is_taken_and_the_reason_is_kept(ipc):
    with Peer.listen("a") as a, Peer.listen("b", transports=("ipc", "nccl", "tcp")) as b:
        chosen = a.connect(b.address, timeout_s=HANG_S)
        reasons = dict(chosen.refused)
        assert chosen.name == "tcp"
        assert "has not used a CUDA device" in reasons["ipc"] and "through host memory" in reasons["nccl"]
    mine, theirs = ipc(), CudaIpcTransport(no_device)
    with Peer.listen("a", transports=(mine, "shared")) as a, Peer.listen("b", transports=(theirs, "shared")) as b:
        chosen = a.connect(b.address, timeout_s=HANG_S)
        assert (chosen.name, chosen.refused) == ("shared", (("ipc", "this process has not used a CUDA device"),))
        a.send("b", torch.ones(3), timeout_s=HANG_S)
        assert_bitwise_equal(b.receive("a", timeout_s=HANG_S), torch.ones(3))


def test_the_refusal_of_every_handle_kind_is_named(ipc):
    transport = ipc(refuses=["import_descriptor"])
    with (
        Peer.listen("a", transports=(transport,)) as a,
        Peer.listen("b", transports=(transport,)) as b,
        pytest.raises(NoTransport, match=r"ipc: legacy handle: no arena .*; descriptor handle: .*CUDA error 801"),
    ):
        a.connect(b.address, timeout_s=HANG_S)
    assert all(each.driver.live == {} for each in ipc.made)


def test_bytes_that_come_back_wrong_are_noticed(ipc, monkeypatch):
    monkeypatch.setattr("rlinf_comm.peers.transports.cuda_ipc.invert", lambda *_: None)
    transport = ipc()
    with (
        Peer.listen("a", transports=(transport,)) as a,
        Peer.listen("b", transports=(transport,)) as b,
        pytest.raises(NoTransport, match="4096 bytes of device memory came back wrong through a descriptor"),
    ):
        a.connect(b.address, timeout_s=HANG_S)


# --- arrays of other libraries ----------------------------------------------------------------------------------------


class ForeignArray:
    """What CuPy's arrays offer, in host memory."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("over", ["ipc", "nccl", "shared", "tcp"])
def test_arrays_of_other_libraries_arrive_as_tensors_and_go_on_by_dlpack(over, ipc):
    transport = {"ipc": ipc, "nccl": nccl_transport}.get(over, lambda: over)()
    with PeersOver(transport) as peers:
        a, b = peers.make("a", "b")
        tensor = torch.arange(12.0).view(3, 4)
        a.send("b", [{"x": ForeignArray(tensor.T)}], timeout_s=HANG_S)
        (received,) = b.receive("a", timeout_s=HANG_S)
        assert_bitwise_equal(received["x"], tensor.T)
        assert np.array_equal(np.from_dlpack(received["x"]), tensor.T.numpy())


class Unwilling:
    def __dlpack__(self, **_):
        raise BufferError("read-only")

    def __dlpack_device__(self):
        return 1, 0


@pytest.mark.parametrize("over", ["nccl", "shared"])
def test_an_array_that_torch_cannot_take_is_refused_with_its_reason(over):
    with PeersOver(nccl_transport() if over == "nccl" else over) as peers:
        a, _ = peers.make("a", "b")
        with pytest.raises(UnsupportedValueError, match="Unwilling that torch cannot take: read-only"):
            a.send("b", {"x": Unwilling()}, timeout_s=HANG_S)
