"""Peers that hand over tensors in device memory, against a device and an NCCL of host memory; no GPU."""

import dataclasses
import itertools
import os
import time

import msgspec
import numpy as np
import pytest
import torch
from comm_device_peer import accelerator
from comm_fake_accelerator import FakeAccelerator, FakeNccl

from rlinf_comm.errors import NcclError, NoTransport, PeerLost, PeerTimeout, UnsupportedValueError
from rlinf_comm.ipc import IpcArena, leases, opened
from rlinf_comm.peers import Peer
from rlinf_comm.peers.deadline import Deadline
from rlinf_comm.peers.transports.base import Unusable
from rlinf_comm.peers.transports.cuda_ipc import CudaIpcTransport
from rlinf_comm.peers.transports.lifted import Place, lift_out, put_back
from rlinf_comm.peers.transports.nccl import NcclTransport
from rlinf_comm.testing import TRANSPORT_CHECKS, PeersOver, assert_bitwise_equal

HANG_S = 60.0
SCRIPT = "comm_device_peer.py"


@pytest.fixture
def ipc(monkeypatch):
    """make(): the transport for peers of this process, each of whose ends takes the others for other processes."""
    monkeypatch.setattr(opened, "is_own", lambda handle: False)
    monkeypatch.setattr(leases, "_is_here", lambda process: False)
    namespaces = itertools.count(1)
    made = []

    def make(**options):
        def open_accelerator():
            made.append(FakeAccelerator(namespace=next(namespaces), **options))
            return made[-1]

        return CudaIpcTransport(open_accelerator)

    make.made = made
    return make


def nccl_transport(nccl=None, uuids=None):
    numbers = itertools.count(1)

    def open_accelerator():
        return FakeAccelerator(uuid=(uuids or (lambda: next(numbers).to_bytes(16, "little")))())

    return NcclTransport(open_accelerator, nccl or FakeNccl())


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_ipc_conforms(check, ipc):
    with PeersOver(ipc()) as peers:
        check(peers)


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_nccl_conforms(check):
    with PeersOver(nccl_transport()) as peers:
        check(peers)


def receive_until_lost(peer, from_):
    while True:
        peer.receive(from_, timeout_s=HANG_S)


def wait_until(condition):
    end_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end_s, "a hang"
        time.sleep(0.01)


def send_until_lost(peer, to):
    end_s = time.monotonic() + HANG_S
    while time.monotonic() < end_s:
        peer.send(to, torch.ones(1000), timeout_s=HANG_S)


# --- between two processes --------------------------------------------------------------------------------------------


@pytest.fixture
def echo(start_peer):
    """(a peer with the fake device, another process that sends everything back)"""
    with Peer.listen("parent", transports=(CudaIpcTransport(accelerator), "shared")) as me:
        child = start_peer("echo", me.address, script=SCRIPT)
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
    me.transport_to("echo")
    link = me._links.get("echo").outgoing
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
    assert link._arenas[0].num_free_bytes() == link._arenas[0].handle.num_bytes


def test_events_are_recorded_after_the_value_is_on_its_way_and_waited_for_by_the_reader(echo):
    me, _ = echo
    me.send("echo", torch.ones(3), timeout_s=HANG_S)
    me.receive("echo", timeout_s=HANG_S)
    names = [call[0] for call in me._links.get("echo").outgoing._accelerator.driver.calls]
    assert "record_event" in names
    me.send("echo", torch.ones(3), timeout_s=HANG_S)
    names = [call[0] for call in me._links.get("echo").outgoing._accelerator.driver.calls]
    assert names[-2:] == ["wait_for_event", "record_event"], "the room of the first was taken over before it was read"


def test_a_killed_process_is_a_lost_peer_on_both_sides(echo):
    me, child = echo
    me.send("echo", torch.ones(3), timeout_s=HANG_S)
    me.receive("echo", timeout_s=HANG_S)
    me.send("echo", ("keep", torch.ones(1000)), timeout_s=HANG_S)
    child.process.kill()
    child.process.wait(HANG_S)
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


def test_nccl_s_reason_names_the_version_and_the_device_and_its_refusals_say_what_is_wrong():
    one = nccl_transport(uuids=lambda: b"A" * 16)
    with (
        Peer.listen("a", transports=(one,)) as a,
        Peer.listen("b", transports=(one,)) as b,
        pytest.raises(NoTransport, match="both on GPU-4141"),
    ):
        a.connect(b.address, timeout_s=HANG_S)
    apart = nccl_transport(FakeNccl(22800))
    with (
        Peer.listen("a", transports=(nccl_transport(),)) as a,
        Peer.listen("b", transports=(apart,)) as b,
        pytest.raises(NoTransport, match="NCCL 22907 at the sender, 22800 at the receiver"),
    ):
        a.connect(b.address, timeout_s=HANG_S)
    absent = FakeNccl()
    absent.library = NcclError("no usable NCCL")
    with Peer.listen("a", transports=(nccl_transport(absent), "tcp")) as a, Peer.listen("b") as b:
        chosen = a.connect(b.address, timeout_s=HANG_S)
        assert dict(chosen.refused) == {"nccl": "no usable NCCL; tensors in device memory go through host memory"}


# --- NCCL -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def nccl_pair():
    nccl = FakeNccl()
    transport = nccl_transport(nccl)
    with Peer.listen("a", transports=(transport,)) as a, Peer.listen("b", transports=(transport,)) as b:
        a.connect(b.address, timeout_s=HANG_S)
        b.connect(a.address, timeout_s=HANG_S)
        yield a, b, nccl


def test_the_communicator_of_a_pair_is_made_for_the_first_tensor(nccl_pair):
    a, b, nccl = nccl_pair
    assert "tensors in device memory by NCCL 22907, from GPU-" in a.transport_to("b").reason
    a.send("b", {"host": np.arange(3)}, timeout_s=HANG_S)
    b.receive("a", timeout_s=HANG_S)
    assert nccl.made == []
    for index in range(3):
        a.send("b", torch.full((5,), index), timeout_s=HANG_S)
        assert (b.receive("a", timeout_s=HANG_S) == index).all()
    assert sorted((each.name, each.rank) for each in nccl.made) == [("a to b", 0), ("a to b", 1)]


def test_both_may_send_before_either_receives_and_sends_match_in_order(nccl_pair):
    a, b, _ = nccl_pair
    values = [[torch.full((7 * i + 1,), i), i, np.full(3, i), torch.tensor(float(i))] for i in range(20)]
    for value in values:
        a.send("b", value, timeout_s=HANG_S)
        b.send("a", value, timeout_s=HANG_S)
    for value in values:
        assert_bitwise_equal(b.receive("a", timeout_s=HANG_S), value)
        assert_bitwise_equal(a.receive("b", timeout_s=HANG_S), value)


def test_a_receive_that_runs_out_of_time_is_continued_by_the_next(nccl_pair):
    a, b, nccl = nccl_pair
    create = nccl.Communicator.create
    nccl.Communicator.create = lambda *arguments, rank, **options: (
        time.sleep(0.5 * (rank == 0)),
        create(*arguments, rank=rank, **options),
    )[1]
    a.send("b", torch.arange(9), timeout_s=HANG_S)
    with pytest.raises(PeerTimeout, match=r"not yet its tensors in device memory.*over NCCL"):
        b.receive("a", timeout_s=0.05)
    assert_bitwise_equal(b.receive("a", timeout_s=HANG_S), torch.arange(9))


def test_a_sender_waits_when_too_much_is_on_its_way(nccl_pair):
    a, b, _ = nccl_pair
    large = torch.zeros(40 << 20, dtype=torch.uint8)
    a.send("b", large, timeout_s=HANG_S)
    with pytest.raises(PeerTimeout, match="41943040 bytes in device memory wait for the receiver"):
        a.send("b", large, timeout_s=0.1)
    assert b.receive("a", timeout_s=HANG_S).numel() == 40 << 20
    a.send("b", torch.ones(2), timeout_s=HANG_S)
    assert (b.receive("a", timeout_s=HANG_S) == 1).all()


def test_a_broken_communicator_is_aborted_and_loses_the_link_and_the_next_send_makes_another(nccl_pair):
    a, b, nccl = nccl_pair
    a.send("b", torch.ones(2), timeout_s=HANG_S)
    b.receive("a", timeout_s=HANG_S)
    nccl.is_broken = True
    a.send("b", torch.ones(2), timeout_s=HANG_S)
    with pytest.raises(PeerLost, match=r"the NCCL communicator of the pair broke \(a to b: remote process exited\)"):
        b.receive("a", timeout_s=HANG_S)
    nccl.is_broken = False
    with pytest.raises(PeerLost):
        send_until_lost(a, "b")
    wait_until(lambda: all(each.is_aborted for each in nccl.made))
    a.send("b", torch.ones(2), timeout_s=HANG_S)
    assert (b.receive("a", timeout_s=HANG_S) == 1).all()


def test_the_loss_of_the_sender_ends_a_receive_that_waits_for_tensors():
    nccl = FakeNccl()
    nccl.Communicator.exchange = lambda self, transfers, **_: setattr(
        self, "wanted", [each for each in transfers if not each.is_send]
    )
    with PeersOver(nccl_transport(nccl)) as peers:
        a, b = peers.make("a", "b")
        a.send("b", torch.ones(2), timeout_s=HANG_S)
        with pytest.raises(PeerTimeout):
            b.receive("a", timeout_s=0.2)
        peers.crash(a)
        with pytest.raises(PeerLost, match="'a' is lost"):
            b.receive("a", timeout_s=HANG_S)
        wait_until(lambda: all(each.is_aborted for each in nccl.made))


def test_a_broadcast_hands_over_device_memory(nccl_pair):
    a, b, nccl = nccl_pair
    a.broadcast({"w": torch.ones(3)}, ["b"], timeout_s=HANG_S)
    assert_bitwise_equal(b.receive("a", timeout_s=HANG_S), {"w": torch.ones(3)})
    assert len(nccl.made) == 2


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


# --- taking tensors out of a value ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    tokens: torch.Tensor
    rest: object

    def __post_init__(self):
        assert not isinstance(self.tokens, Place), "the codec does not run it either"


class Row(msgspec.Struct, frozen=True):
    x: torch.Tensor
    y: int = 0


def test_tensors_are_taken_out_of_any_value_and_put_back():
    t = [torch.full((1,), i) for i in range(5)]
    value = {"a": [t[0], (t[1], "text")], "s": Sample(t[2], {"r": Row(t[3], 7)}), 5: t[4], "same": [1, {"b": 2}]}
    out, taken = lift_out(value, lambda leaf: isinstance(leaf, torch.Tensor))
    assert [each.item() for each in taken] == [0, 1, 2, 3, 4]
    assert out["a"][1] == (Place(1), "text") and type(out["a"][1]) is tuple and out["same"] is value["same"]
    assert out["s"].rest["r"] == Row(Place(3), 7)
    back = put_back(out, taken)
    assert back["s"].rest["r"].x is t[3] and back["a"][1][0] is t[1] and list(back) == ["a", "s", 5, "same"]
    assert value["a"][0] is t[0] and value["s"].tokens is t[2]


def test_a_value_without_tensors_stays_itself_and_one_that_contains_itself_is_left_to_the_codec():
    value = {"a": [1, (2.0, None)], "b": Sample("no", b"tensor")}
    assert lift_out(value, lambda leaf: False)[0] is value
    loop = [torch.ones(1)]
    loop.append(loop)
    assert lift_out(loop, lambda leaf: isinstance(leaf, torch.Tensor)) == (loop, [])
