"""Peers that hand over tensors in device memory by NCCL, against an NCCL and devices of host memory; no GPU."""

import time

import numpy as np
import pytest
import torch
from comm_fake_accelerator import FakeAccelerator, FakeNccl, nccl_transport
from comm_nurseries import wait_until

from rlinf_comm.errors import NcclError, NoTransport, PeerLost, PeerTimeout
from rlinf_comm.peers import Peer
from rlinf_comm.testing import TRANSPORT_CHECKS, PeersOver, assert_bitwise_equal

HANG_S = 60.0


def send_until_lost(peer, to):
    while True:
        peer.send(to, torch.ones(1000), timeout_s=HANG_S)


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_nccl_conforms(check):
    with PeersOver(nccl_transport()) as peers:
        check(peers)


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


def test_what_is_on_its_way_over_nccl_when_the_sender_closes_still_arrives(nccl_pair):
    a, b, nccl = nccl_pair
    for index in range(3):
        a.send("b", torch.full((1000,), index), timeout_s=HANG_S)
    a.close()
    for index in range(3):
        assert (b.receive("a", timeout_s=HANG_S) == index).all()
    with pytest.raises(PeerLost, match="'a' has left"):
        b.receive("a", timeout_s=HANG_S)
    wait_until(lambda: all(each.is_aborted for each in nccl.made))


def test_a_sender_that_has_closed_does_not_wait_for_ever(nccl_pair, monkeypatch):
    a, _, nccl = nccl_pair
    monkeypatch.setattr("rlinf_comm.peers.transports.nccl._FAREWELL_TIMEOUT_S", 0.1)
    a.send("b", torch.ones(3), timeout_s=HANG_S)
    a.close()
    wait_until(lambda: nccl.made and all(each.is_aborted for each in nccl.made))


def test_a_send_hands_over_device_memory_without_a_detour_over_the_host(nccl_pair, monkeypatch):
    a, b, _ = nccl_pair
    tensor, seen, as_tensor = torch.arange(12.0).view(3, 4).T, [], FakeAccelerator.as_tensor
    monkeypatch.setattr(
        FakeAccelerator, "as_tensor", lambda self, array: (seen.append(array), as_tensor(self, array))[1]
    )
    a.send("b", {"w": tensor}, timeout_s=HANG_S)
    assert_bitwise_equal(b.receive("a", timeout_s=HANG_S), {"w": tensor})
    assert len(seen) == 1 and seen[0] is tensor
