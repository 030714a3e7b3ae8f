"""Versions that are lent: receivers copy from the sender's own tensors, and what they get is what was published."""

import itertools
import os
import threading
import time

import numpy as np
import pytest
import torch

from rlinf_comm import PeerLost, WeightMismatchError, WeightTimeout
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_comm.weights import Layout, StoreReceiver, StoreSender, TensorSpec, WeightStore, execute, reshard_plan
from rlinf_comm.weights.store import shared_tensors
from rlinf_comm.weights.store.memory import NO_VERSION, Where

SPECS = {
    "embed": TensorSpec((40, 12), "bfloat16"),
    "w": TensorSpec((9, 8, 3), "bfloat16"),
    "step": TensorSpec((), "int64"),
    "empty": TensorSpec((0, 4), "float32"),
}
ONE = Layout.replicated(SPECS, 1)
SOURCES = {
    "one": ONE,
    "three shards": Layout.sharded(SPECS, 3),
    "two float32 shards": Layout.sharded(SPECS, 2, dtype="float32"),
}
TARGETS = {"two replicas": Layout.replicated(SPECS, 2), "two shards of dim 1": Layout.sharded(SPECS, 2, dim=1)}
HANG_S = 60.0


def buffers(layout, rank):
    return {
        name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        for name, spec in layout.ranks[rank].buffers.items()
    }


def fill(tensors, version):
    """In place; values that bfloat16 holds."""
    for number, tensor in enumerate(tensors.values()):
        values = torch.arange(tensor.numel()) % 97 + 3 * number + version
        tensor.copy_(values.view(tensor.shape))


class Edge:
    """Both ends in this process. The senders' tensors stay, and have been published once."""

    def __init__(self, source=ONE, target=ONE):
        self.target = target
        self.plan = reshard_plan(source, target)
        self.store = WeightStore.create(self.plan, name="edge")
        self.senders = [StoreSender(self.store, self.plan, rank) for rank in range(source.num_ranks)]
        self.receivers = [StoreReceiver(self.store, self.plan, rank) for rank in range(target.num_ranks)]
        self.tensors = [buffers(source, rank) for rank in range(source.num_ranks)]
        self.served = [buffers(target, rank) for rank in range(target.num_ranks)]
        self.publish_by_reference(0)
        self.take(0)

    def publish_by_reference(self, version):
        for sender, tensors in zip(self.senders, self.tensors, strict=True):
            sender.finish_reads()
            fill(tensors, version)
            sender.publish_by_reference(tensors, version)

    def expected(self):
        """What the senders hold, as the receivers hold it."""
        destinations = [buffers(self.target, rank) for rank in range(len(self.receivers))]
        execute(self.plan, self.tensors, destinations)
        return destinations

    def take(self, version, ranks=None):
        for rank, receiver in enumerate(self.receivers):
            if ranks is None or rank in ranks:
                receiver.receive(self.served[rank], version, 10.0)

    def where(self, rank=0):
        """Of the two slots of a sender."""
        control, words = self.receivers[0]._control, self.store.words
        return {
            words.load(control.slot_version(rank, slot)): Where(words.load(control.slot_where(rank, slot)))
            for slot in range(2)
        }

    def slots(self):
        """All bytes of the store behind its words."""
        raw = np.frombuffer(memoryview(self.store._segment), np.uint8)  # pyright: ignore[reportArgumentType]
        return raw[self.store.slots_pointer - self.store._segment.pointer :]


@pytest.mark.parametrize(("source", "target"), itertools.product(SOURCES, TARGETS))
def test_a_version_that_is_lent_arrives_and_passes_no_store(source, target):
    edge = Edge(SOURCES[source], TARGETS[target])
    edge.slots()[:] = 0
    for version in (1, 2, 5):
        edge.publish_by_reference(version)
        edge.take(version)
        for served, expected in zip(edge.served, edge.expected(), strict=True):
            assert_bitwise_equal(served, expected)
    assert not edge.slots().any()


def test_who_comes_when_the_tensors_are_about_to_change_finds_the_version_in_the_store():
    edge = Edge(SOURCES["three shards"], TARGETS["two replicas"])
    edge.publish_by_reference(1)
    expected = edge.expected()
    edge.take(1, ranks=[0])
    edge.senders[0].finish_reads()  # the others are still read where they are
    for tensor in edge.tensors[0].values():
        tensor.zero_()
    edge.take(1, ranks=[1])
    assert [edge.where(rank)[1] for rank in range(3)] == [Where.STORED, Where.REFERENCED, Where.REFERENCED]
    for served, reference in zip(edge.served, expected, strict=True):
        assert_bitwise_equal(served, reference)


def test_nothing_is_copied_for_receivers_that_have_the_version_and_it_does_not_come_back():
    edge = Edge()
    edge.slots()[:] = 0
    edge.publish_by_reference(1)
    edge.take(1)
    edge.senders[0].finish_reads()
    edge.senders[0].finish_reads()
    assert not edge.slots().any()
    with pytest.raises(WeightMismatchError, match="expected version 1, but the tensors of sender 0 have changed"):
        edge.take(1)
    edge.publish_by_reference(2)
    edge.take(2)
    assert_bitwise_equal(edge.served, edge.expected())


def test_a_check_that_comes_after_the_tensors_have_changed():
    edge = Edge()
    edge.publish_by_reference(1)
    check = edge.receivers[0].take(edge.served[0], 1, 10.0)
    expected = edge.expected()
    edge.publish_by_reference(2)  # settles version 1
    edge.senders[0].finish_reads()
    fill(edge.tensors[0], 8)
    check()
    assert_bitwise_equal(edge.served, expected)


@pytest.mark.parametrize("whose", ["tensors", "served"])
def test_a_bit_that_changes_on_either_side_is_named(whose):
    edge = Edge()
    edge.publish_by_reference(1)
    check = edge.receivers[0].take(edge.served[0], 1)
    getattr(edge, whose)[0]["w"].view(torch.uint8)[2, 3, 4] ^= 16
    with pytest.raises(WeightMismatchError, match="receiver 0 must not serve version 1: w differs") as caught:
        check()
    assert caught.value.tensors == ("w",)
    edge.take(1)  # what the sender has
    assert_bitwise_equal(edge.served, edge.expected())


def test_a_changed_bit_is_named_by_a_check_that_comes_late_too():
    edge = Edge()
    edge.publish_by_reference(1)
    check = edge.receivers[0].take(edge.served[0], 1)
    edge.served[0]["embed"].view(torch.uint8)[7, 3] ^= 1
    edge.senders[0].finish_reads()
    fill(edge.tensors[0], 2)
    with pytest.raises(WeightMismatchError, match="version 1: embed differs"):
        check()
    edge.take(1)  # it was kept, since it had not been served


def test_settling_waits_for_who_copies_at_this_moment():
    edge = Edge()
    edge.publish_by_reference(1)
    words, reading = edge.store.words, edge.receivers[0]._control.reading(0)
    words.store(reading, 1)
    settling = threading.Thread(target=edge.senders[0].finish_reads)
    settling.start()
    end_s = time.monotonic() + HANG_S
    while edge.where()[1] == Where.REFERENCED:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert settling.is_alive()  # the version is in the store, but the tensors are still read
    words.store(reading, NO_VERSION)
    words.notify_all()
    settling.join(HANG_S)
    assert not settling.is_alive()


def test_settling_does_not_wait_for_a_receiver_that_died(monkeypatch):
    edge = Edge()
    edge.publish_by_reference(1)
    edge.store.words.store(edge.receivers[0]._control.reading(0), 1)
    monkeypatch.setattr(edge.senders[0], "_is_lost", lambda word: word == edge.receivers[0]._control.receiver(0))
    edge.senders[0].finish_reads()


def test_a_receiver_that_does_not_end_its_copy_is_named(monkeypatch):
    monkeypatch.setattr("rlinf_comm.weights.store.sender._READERS_S", 0.05)
    edge = Edge()
    edge.publish_by_reference(1)
    edge.store.words.store(edge.receivers[0]._control.reading(0), 1)
    for _ in range(2):  # the tensors must not change before it has
        with pytest.raises(WeightTimeout, match=r"receivers \[0\] still copy version 1"):
            edge.senders[0].finish_reads()
    edge.store.words.store(edge.receivers[0]._control.reading(0), NO_VERSION)
    edge.senders[0].finish_reads()


def test_a_version_that_nobody_took_makes_room_as_a_copied_one_does():
    edge = Edge()
    edge.publish_by_reference(1)
    first = edge.expected()
    edge.publish_by_reference(2)
    assert edge.where() == {1: Where.STORED, 2: Where.REFERENCED}
    with pytest.raises(WeightTimeout, match=r"receivers \[0\] have not taken version 1"):
        edge.senders[0].publish_by_reference(edge.tensors[0], 3, timeout_s=0.01)
    edge.take(1)
    assert_bitwise_equal(edge.served, first)


# --- what can be lent -------------------------------------------------------------------------------------------------


def test_what_is_made_anew_or_strided_is_copied():
    edge = Edge()
    sender, (tensors,) = edge.senders[0], edge.tensors
    sender.publish_by_reference({name: tensor.clone() for name, tensor in tensors.items()}, 1)
    assert edge.where()[1] == Where.STORED
    edge.take(1)
    strided = {**tensors, "embed": torch.zeros(12, 40, dtype=torch.bfloat16).T}
    for version in (2, 3):
        sender.publish_by_reference(strided, version)
        assert edge.where()[version] == Where.STORED
        edge.take(version)
    for version in (4, 5):
        sender.publish_by_reference(tensors, version)
        assert edge.where()[version] == (Where.STORED if version == 4 else Where.REFERENCED)
        edge.take(version)


def test_tensors_that_share_memory_still_do():
    memory = torch.zeros(8)
    views = {"a": memory[:4], "b": memory[4:]}
    layout = Layout.replicated({name: TensorSpec((4,), "float32") for name in views}, 1)
    reshard = reshard_plan(layout, layout)
    store = WeightStore.create(reshard, name="views")
    sender, receiver = StoreSender(store, reshard, 0), StoreReceiver(store, reshard, 0)
    other, served = memory.detach(), {name: torch.zeros(4) for name in views}
    for version in range(3):
        sender.finish_reads()
        other += torch.arange(8.0)
        sender.publish_by_reference(views, version)
        receiver.receive(served, version)
        assert torch.equal(torch.cat(list(served.values())), memory)
    assert memory.is_shared() and torch.equal(memory, 3 * torch.arange(8.0))


def test_without_room_in_shared_memory_it_is_copied(monkeypatch):
    def fails(_):
        raise RuntimeError("unable to allocate shared memory(shm)")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", fails)
    edge = Edge()
    with pytest.warns(UserWarning, match="go through the store .* unable to allocate .* /dev/shm needs room"):
        edge.publish_by_reference(1)
    assert edge.where()[1] == Where.STORED
    edge.take(1)
    assert_bitwise_equal(edge.served, edge.expected())


def test_without_descriptors_it_is_copied(monkeypatch):
    monkeypatch.setattr(shared_tensors.resource, "getrlimit", lambda _: (8, 8))
    edge = Edge()
    with pytest.warns(UserWarning, match=r"4 descriptors are needed, and half .* are 4 \(ulimit -n\)"):
        edge.publish_by_reference(1)
    assert edge.where()[1] == Where.STORED


# --- processes --------------------------------------------------------------------------------------------------------


def test_weights_are_lent_to_another_process_whose_end_is_noticed_before_they_are_served(start_peer):
    specs = {"w": TensorSpec((50, 40), "int64")}
    layout = Layout.replicated(specs, 1)
    reshard = reshard_plan(layout, layout)
    store = WeightStore.create(reshard, name="lent")
    receiver, tensors = StoreReceiver(store, reshard, 0), {"w": torch.zeros(50, 40, dtype=torch.int64)}
    control = receiver._control
    with start_peer("publish_by_reference", store.address, reshard, 4) as peer:
        for version in range(3):
            receiver.receive(tensors, version, HANG_S)
            assert tensors["w"].eq(version).all()
        check = receiver.take(tensors, 3, HANG_S)
        assert store.words.load(control.slot_where(0, 1)) == Where.REFERENCED
        peer.process.kill()
        peer.process.wait(HANG_S)
        with pytest.raises(PeerLost, match="sender 0 died before it had said what version 3 is"):
            check()
    replacement = StoreSender(store, reshard, 0)
    with pytest.raises(WeightMismatchError, match="expected version 3"):
        receiver.receive(tensors, 3)
    replacement.publish_by_reference(tensors, 4)


def shared_files():
    """What this process has mapped of shared memory, by file and address, and its descriptors of such files."""
    with open("/proc/self/maps") as lines:
        mapped = [line.split()[0] for line in lines if "/dev/shm" in line or "memfd" in line or "torch_" in line]
    return sorted(mapped), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("source", SOURCES)
def test_after_tensors_were_lent_once_nothing_is_mapped_or_moved(source):
    edge = Edge(SOURCES[source], TARGETS["two replicas"])
    seen = []
    for version in range(1, 6):
        published, taken = [], []
        for sender, tensors in zip(edge.senders, edge.tensors, strict=True):
            sender.finish_reads()
            fill(tensors, version)
            published.append(sender.publish_by_reference(tensors, version))
        for receiver, own in zip(edge.receivers, edge.served, strict=True):
            taken.append(receiver.receive(own, version))
        counts = [(one.num_allocations, one.num_maps, one.num_unmaps) for one in (*published, *taken)]
        if version == 1:
            assert all(one.num_allocations for one in published), "they have moved to shared memory"
            assert all(one.num_maps for one in taken)
        else:
            assert counts == [(0, 0, 0)] * len(counts)
            seen.append(shared_files())
    assert seen and seen.count(seen[0]) == len(seen)
