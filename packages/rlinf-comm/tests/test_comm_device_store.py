"""Weights in device memory, over a host's that stands for it: every bit arrives, and whatever does not is named."""

import ctypes
import itertools
import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch
from comm_host_device import HostDevice

from rlinf_comm import IpcError, LayoutError, PeerLost, WeightMismatchError, WeightTimeout
from rlinf_comm.copies import DigestTable, StridedBox
from rlinf_comm.cuda import CudaDigestProgram
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_comm.weights import (
    Block,
    BufferSpec,
    Layout,
    RankLayout,
    StoreSender,
    TensorSpec,
    WeightStore,
    execute,
    reshard_plan,
    specs_of,
)
from rlinf_comm.weights.device import (
    DeviceWeightReceiver,
    DeviceWeightSender,
    create_device_store,
    mailbox_bytes,
)
from rlinf_comm.weights.device.memory import ExportWords, read_export

HANG_S = 60.0

FULL = {
    "embed": torch.randn(40, 12, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "empty": torch.empty(0, 4),
    "mask": torch.tensor([True, False, True]),
    "step": torch.tensor(7),
    "w": torch.randn(9, 8, 3, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
}
SPECS = specs_of(FULL)
WHOLE = Layout.replicated(SPECS, 1)
SOURCES = {
    "two shards": Layout.sharded(SPECS, 2),
    "two replicas of float32 masters": Layout.replicated(SPECS, 2, dtype="float32"),
}
TARGETS = {"whole": WHOLE, "three shards of dim 1": Layout.sharded(SPECS, 3, dim=1)}


def parts(layout, version=0):
    """The buffers of each rank, by the executor."""
    full = {name: tensor.roll(version) for name, tensor in FULL.items()}
    buffers = [
        {name: torch.ones(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in rank.buffers.items()}
        for rank in layout.ranks
    ]
    execute(reshard_plan(WHOLE, layout), [full], buffers)
    return buffers


def blank(layout):
    return [{name: torch.full_like(tensor, 1) for name, tensor in rank.items()} for rank in parts(layout)]


def connect(source, target, device_type="cpu"):
    reshard = reshard_plan(source, target)
    store = create_device_store(reshard, name="weights")
    senders = [DeviceWeightSender(store, reshard, rank, HostDevice(device_type)) for rank in range(source.num_ranks)]
    receivers = [
        DeviceWeightReceiver(WeightStore.open(store.address), reshard, rank, HostDevice(device_type))
        for rank in range(target.num_ranks)
    ]
    return store, senders, receivers


def arena_of(store, sender, slot):
    """Handle of the arena with the version of a slot."""
    place = store.words.load(ExportWords(sender._plan, sender._num_slots).slot_place(sender._rank, slot))
    export = read_export(store, sender._plan, sender._rank, place)
    assert export is not None
    return export.handles[0]


def eventually(is_true):
    end_s = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < end_s, "it does not become true"
        time.sleep(0.002)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"], ids=["on the device", "on the host"])
@pytest.mark.parametrize(("source", "target"), itertools.product(SOURCES, TARGETS))
def test_weights_arrive_bit_for_bit_in_memory_that_is_used_again(source, target, device_type):
    _, senders, receivers = connect(SOURCES[source], TARGETS[target], device_type)
    for version in (0, 1, 5, 6):
        for sender, tensors in zip(senders, parts(SOURCES[source], version), strict=True):
            report = sender.publish(tensors, version)
            assert report.num_allocations == (version == 0)
            needed = mailbox_bytes(sender._plan, sender._rank)
            assert needed <= sender.num_held_bytes() < needed + 4096, "memory of one version"
            for tensor in tensors.values():
                tensor.zero_()  # who trains goes on
        expected = parts(TARGETS[target], version)
        for receiver, tensors, reference in zip(receivers, blank(TARGETS[target]), expected, strict=True):
            check = receiver.take(tensors, version)
            assert_bitwise_equal(tensors, reference)
            assert check().policy_version == version


@pytest.mark.parametrize("source", SOURCES)
def test_digests_are_those_of_the_store_on_the_host(source):
    reshard = reshard_plan(SOURCES[source], WHOLE)
    device_store, senders, _ = connect(SOURCES[source], WHOLE)
    host_store = WeightStore.create(reshard, name="host")
    for rank, (sender, tensors) in enumerate(zip(senders, parts(SOURCES[source]), strict=True)):
        sender.publish(tensors, 0)
        StoreSender(host_store, reshard, rank).publish(tensors, 0)
    words = range(senders[0]._control.piece(0, 0), senders[0]._control.piece(1, 0))
    assert [device_store.words.load(word) for word in words] == [host_store.words.load(word) for word in words]


def test_a_device_digests_nothing_that_is_to_be_cast():
    box = StridedBox(
        buffer=0, shape=(4,), strides=(4,), dtype="float32", as_dtype="bfloat16", digest=0, first_index=0,
        index_strides=(1,),
    )  # fmt: skip
    with pytest.raises(ValueError, match="digests what is stored"):
        CudaDigestProgram(DigestTable.of([box]))


def test_every_flipped_byte_in_device_memory_is_named():
    store, (sender,), (receiver,) = connect(WHOLE, WHOLE)
    sender.publish(FULL, 0)
    handle = arena_of(store, sender, 0)
    spans = {each.piece.name: (sender._mailbox.offsets[each.index], each.num_bytes) for each in sender._own}
    assert spans.keys() == {name for name, tensor in FULL.items() if tensor.numel()}
    (tensors,) = blank(WHOLE)
    for name, (offset, num_bytes) in spans.items():
        for index in {0, num_bytes // 2, num_bytes - 1}:
            byte = ctypes.c_uint8.from_address(handle.pointer + offset + index)
            byte.value ^= 1
            with pytest.raises(WeightMismatchError, match=f"{name} differs from what its sender published") as caught:
                receiver.take(tensors, 0)()
            assert caught.value.tensors == (name,)
            byte.value ^= 1
    receiver.take(tensors, 0)()  # a version that was refused can be taken again
    assert_bitwise_equal(tensors, FULL)


def test_what_is_served_is_checked():
    _, (sender,), (receiver,) = connect(WHOLE, WHOLE)
    sender.publish(FULL, 0)
    (tensors,) = blank(WHOLE)
    check = receiver.take(tensors, 0)
    tensors["w"][1, 2, 0] += 1
    with pytest.raises(WeightMismatchError, match="w differs"):
        check()
    sender.publish({name: torch.zeros_like(tensor) for name, tensor in FULL.items()}, 1)
    receiver.take(tensors, 0)()  # it is still there for who has not served it
    assert_bitwise_equal(tensors, FULL)


def test_tensors_are_read_back_when_they_are_at_new_addresses_and_then_trusted_to_the_copy(monkeypatch):
    _, (sender,), (receiver,) = connect(WHOLE, WHOLE)
    (tensors,) = blank(WHOLE)
    read_at = []
    for version in range(5):
        if version == 3:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        sender.publish(FULL, version)
        check = receiver.take(tensors, version)
        held = receiver._on_device(tensors).held
        with monkeypatch.context() as patch:
            patch.setattr(held, "run", noted(held.run, version, read_at))
            check()
    assert read_at == [0, 3]


def test_tensors_that_are_tied_where_they_are_served_must_be_equal_in_each_version():
    spec = TensorSpec((40, 12), "bfloat16")
    apart = Layout.replicated({"embed": spec, "head": spec}, 1)
    blocks = tuple(Block(name, spec.whole, "embed", 0, (12, 1)) for name in ("embed", "head"))
    together = Layout(apart.specs, (RankLayout({"embed": BufferSpec((40, 12), "bfloat16")}, blocks),))
    _, (sender,), (receiver,) = connect(apart, together)
    tensors = {"embed": torch.zeros(40, 12, dtype=torch.bfloat16)}
    for version in range(2):
        sender.publish({"embed": FULL["embed"] + version, "head": FULL["embed"] + version}, version)
        receiver.take(tensors, version)()
        assert_bitwise_equal(tensors, {"embed": FULL["embed"] + version})
    sender.publish({"embed": FULL["embed"], "head": FULL["embed"] + 1}, 2)
    with pytest.raises(WeightMismatchError, match="differs from what its sender published"):
        receiver.take(tensors, 2)()


def noted(run, version, versions):
    def run_and_note(pointers):
        versions.append(version)
        return run(pointers)

    return run_and_note


def test_without_attestation_nothing_is_digested():
    _, (sender,), _ = connect(WHOLE, WHOLE)
    receiver = DeviceWeightReceiver(sender._store, sender._plan, 0, HostDevice(), attests=False)
    sender.publish(FULL, 0)
    (tensors,) = blank(WHOLE)
    copies: Any = receiver._on_device(tensors).of(receiver._transfer(tensors).receive)
    copies.run_with_digests = None
    receiver.take(tensors, 0)()
    assert_bitwise_equal(tensors, FULL)


def test_a_version_stays_until_all_have_it_and_two_wait_at_most():
    target = TARGETS["three shards of dim 1"]
    _, (sender,), receivers = connect(WHOLE, target)
    sender.publish(FULL, 0)
    one = sender.num_held_bytes()
    for receiver, tensors in zip(receivers[:2], blank(target), strict=False):
        receiver.take(tensors, 0)()
    sender.publish(FULL, 1)
    assert sender.num_held_bytes() == 2 * one
    with pytest.raises(WeightTimeout, match=r"receivers \[2\] have not taken version 0"):
        sender.publish(FULL, 2, timeout_s=0.05)
    receivers[2].take(blank(target)[2], 0)()
    sender.publish(FULL, 2)
    for receiver, tensors in zip(receivers, blank(target), strict=True):
        receiver.take(tensors, 2)()  # versions that are passed over are given up too
    assert sender.num_held_bytes() == 2 * one


def test_a_version_can_be_taken_once():
    _, (sender,), (receiver,) = connect(WHOLE, WHOLE)
    sender.publish(FULL, 3)
    receiver.take(dict(FULL), 3)()
    with pytest.raises(WeightMismatchError, match="took version 3 before, and asks for version 3; the memory of a"):
        receiver.take(dict(FULL), 3)


def test_a_device_without_room_is_named_and_a_later_version_goes():
    _, (sender,), (receiver,) = connect(WHOLE, WHOLE)
    refuses = sender._device.driver.refuses  # pyright: ignore[reportAttributeAccessIssue]
    refuses.add("create_mapping")
    try:
        with pytest.raises(Exception, match=r"no arena of \d+ bytes that others can open on device 0"):
            sender.publish(FULL, 0)
    finally:
        refuses.discard("create_mapping")
    sender.publish(FULL, 1)
    (tensors,) = blank(WHOLE)
    receiver.take(tensors, 1)()
    assert_bitwise_equal(tensors, FULL)


def test_tensors_elsewhere_than_the_others_are_named():
    _, (sender,), _ = connect(WHOLE, WHOLE)
    with pytest.raises(LayoutError, match=r"w: a .* tensor on meta"):
        sender.publish(FULL | {"w": FULL["w"].to("meta")}, 0)


# -- two processes -----------------------------------------------------------------------------------------------------


def work_as_trainer(pipe, address):
    """Rank 1 of two shards, which publishes the versions that it receives."""
    reshard = reshard_plan(SOURCES["two shards"], WHOLE)
    sender = DeviceWeightSender(WeightStore.open(address), reshard, 1, HostDevice())
    pipe.send("open")
    while (version := pipe.recv()) is not None:
        report = sender.publish(parts(SOURCES["two shards"], version)[1], version)
        pipe.send((report.num_allocations, driver_calls(sender)))
    del sender
    pipe.send("dropped")
    time.sleep(HANG_S)


def driver_calls(end):
    """(allocated, freed or mapped, unmapped) by the driver of an end's process, which has no other end."""
    names = [call[0] for call in end._device.driver.calls]
    return tuple(names.count(name) for name in ("create_mapping", "import_descriptor", "release_mapping"))


@pytest.fixture
def two_processes():
    """(pipe to the process of sender 1, that process, sender 0 and the receiver of this process, its blank tensors)"""
    reshard = reshard_plan(SOURCES["two shards"], WHOLE)
    store = create_device_store(reshard, name="weights")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["comm_host_device", "rlinf_comm.weights.device"])  # it starts in 5 s, each in none
    here, there = context.Pipe()
    child = context.Process(target=work_as_trainer, args=(there, store.address), daemon=True)
    child.start()
    try:
        assert here.poll(HANG_S) and here.recv() == "open"
        first = DeviceWeightSender(store, reshard, 0, HostDevice())
        receiver = DeviceWeightReceiver(store, reshard, 0, HostDevice())
        yield here, child, first, receiver, blank(WHOLE)[0]
    finally:
        child.kill()
        child.join(HANG_S)


def publish_both(pipe, first, version):
    first.publish(parts(SOURCES["two shards"], version)[0], version)
    pipe.send(version)
    assert pipe.poll(HANG_S)
    return pipe.recv()


def test_after_the_first_sync_nothing_is_allocated_mapped_or_unmapped(two_processes):
    pipe, _, first, receiver, tensors = two_processes
    seen = []
    for version in range(6):
        num_allocations, there = publish_both(pipe, first, version)
        report = receiver.take(tensors, version)()
        assert_bitwise_equal(tensors, parts(WHOLE, version)[0])
        assert num_allocations == (version == 0)
        if version == 0:
            eventually(lambda: receiver._kept.num_unmaps == 1)  # what it had tried out
            assert report.num_maps == 2  # that, and the arena
        else:
            assert (report.num_maps, report.num_allocations) == (0, 0)
            seen.append((there, driver_calls(receiver)))
    assert len(set(seen)) == 1, "the drivers were called again"


def test_another_process_is_read_and_its_death_is_named(two_processes):
    pipe, child, first, receiver, tensors = two_processes
    publish_both(pipe, first, 3)
    check = receiver.take(tensors, 3)
    assert_bitwise_equal(tensors, parts(WHOLE, 3)[0])
    os.kill(child.pid, signal.SIGKILL)
    child.join(HANG_S)
    with pytest.raises(PeerLost, match="sender 1 died after it published version 3, and its device memory went"):
        receiver.take(tensors, 3)
    check()  # what was copied before is whole


def test_mappings_of_a_sender_that_dies_are_closed(two_processes):
    pipe, child, first, receiver, tensors = two_processes
    publish_both(pipe, first, 0)
    receiver.take(tensors, 0)()
    arenas = receiver._device.arenas
    eventually(lambda: receiver._kept.num_unmaps == 1)
    assert arenas.num_open() == 1
    os.kill(child.pid, signal.SIGKILL)
    child.join(HANG_S)
    eventually(lambda: arenas.num_open() == 0)


def test_a_sender_frees_its_memory_after_the_receiver_has_unmapped_it(two_processes):
    pipe, _, first, receiver, tensors = two_processes
    publish_both(pipe, first, 0)
    receiver.take(tensors, 0)()
    with receiver._kept.open():  # it reads
        pipe.send(None)
        assert pipe.poll(HANG_S) and pipe.recv() == "dropped"
        words, places = receiver._words, receiver._places
        assert words.load(places.exported(1, 0)) < 0, "it is withdrawn"
        assert words.load(places.mapped(0, 1, 0)) > 0, "and mapped"
    eventually(lambda: words.load(places.mapped(0, 1, 0)) == 0)


def test_memory_is_not_freed_while_a_living_receiver_has_it_mapped():
    store, (sender,), (receiver,) = connect(WHOLE, WHOLE)
    sender.publish(FULL, 0)
    receiver.take(blank(WHOLE)[0], 0)()
    exports, handle = sender._exports, arena_of(store, sender, 0)
    driver: Any = sender._device.driver
    with receiver._kept.open():
        waiter = exports.withdraw(0)
        assert waiter is not None
        waiter.join(0.05)
        assert waiter.is_alive() and handle.pointer in driver.live
    waiter.join(HANG_S)
    assert handle.pointer not in driver.live


def test_memory_that_only_a_dead_receiver_had_mapped_is_freed():
    store, (sender,), (receiver,) = connect(WHOLE, WHOLE)
    sender.publish(FULL, 0)
    words, control = receiver._words, receiver._control
    words.store(receiver._places.mapped(0, 0, 0), abs(words.load(receiver._places.exported(0, 0))))
    words.store(control.receiver(0), 4194399)  # no process has this number
    handle = arena_of(store, sender, 0)
    assert sender._exports.withdraw(0) is None
    driver: Any = sender._device.driver
    assert handle.pointer not in driver.live


def test_what_was_withdrawn_is_not_mapped():
    _, (sender,), (receiver,) = connect(WHOLE, WHOLE)
    sender.publish(FULL, 0)
    sender._exports.withdraw(0)
    with pytest.raises(IpcError, match="version 0 of sender 0: its sender has withdrawn it"):
        receiver.take(blank(WHOLE)[0], 0)
    assert receiver._words.load(receiver._places.mapped(0, 0, 0)) == 0


def test_memory_that_is_exported_anew_while_its_record_is_read_is_not_mapped(monkeypatch):
    _, (sender,), (receiver,) = connect(WHOLE, WHOLE)

    def read_later(*arguments):
        sender.publish(FULL, 0)
        return read_export(*arguments)

    monkeypatch.setattr("rlinf_comm.weights.device.mappings.read_export", read_later)
    with receiver._kept.open() as opened:
        receiver._kept._close(0, 0)  # what it had tried out
        with pytest.raises(IpcError, match="its sender has withdrawn it"):
            opened.addresses_of(0, 0)


def test_a_receiver_that_is_dropped_closes_its_mappings(two_processes):
    pipe, _, first, receiver, tensors = two_processes
    publish_both(pipe, first, 0)
    receiver.take(tensors, 0)()
    mappings, arenas = receiver._kept, receiver._device.arenas
    receiver._kept = None
    with mappings.open():  # a garbage collector may end it anywhere, also in the thread that closes
        mappings.end()
    eventually(lambda: arenas.num_open() == 0)
