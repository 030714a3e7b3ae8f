"""Weights in device memory, over a host's that stands for it: every bit arrives, and whatever does not is named."""

import ctypes
import itertools
import multiprocessing
import os
import signal
import time

import pytest
import torch
from comm_host_device import HostDevice

from rlinf_comm import LayoutError, PeerLost, WeightMismatchError, WeightTimeout
from rlinf_comm.copies import DigestTable, StridedBox
from rlinf_comm.cuda import CudaDigestProgram
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_comm.weights import Layout, StoreSender, WeightStore, execute, reshard_plan, specs_of
from rlinf_comm.weights.device import (
    DeviceWeightReceiver,
    DeviceWeightSender,
    create_device_store,
    mailbox_bytes,
)
from rlinf_comm.weights.device.memory import read_handle

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


def wait_for_memory(sender):
    for giver in list(sender._givers.values()):
        giver.join(HANG_S)
        assert not giver.is_alive()


@pytest.mark.parametrize("device_type", ["cpu", "cuda"], ids=["on the device", "on the host"])
@pytest.mark.parametrize(("source", "target"), itertools.product(SOURCES, TARGETS))
def test_weights_arrive_bit_for_bit_and_their_memory_is_given_back(source, target, device_type):
    _, senders, receivers = connect(SOURCES[source], TARGETS[target], device_type)
    for version in (0, 1, 5, 6):
        for sender, tensors in zip(senders, parts(SOURCES[source], version), strict=True):
            sender.publish(tensors, version)
            assert sender.num_held_bytes() >= mailbox_bytes(sender._plan, sender._rank) > 0
            for tensor in tensors.values():
                tensor.zero_()  # who trains goes on
        expected = parts(TARGETS[target], version)
        for receiver, tensors, reference in zip(receivers, blank(TARGETS[target]), expected, strict=True):
            check = receiver.take(tensors, version)
            assert_bitwise_equal(tensors, reference)
            assert check().policy_version == version
        for sender in senders:
            wait_for_memory(sender)
            assert sender.num_held_bytes() == 0
    assert receivers[0]._device.arenas.num_open() == 0


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
    handle = read_handle(store, sender._plan, 0, 0)
    assert handle is not None
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
    assert sender.num_held_bytes() > 0, "the version may be asked for again"


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
    sender._givers[0].join(HANG_S)
    assert sender.num_held_bytes() == one
    sender.publish(FULL, 2)
    for receiver, tensors in zip(receivers, blank(target), strict=True):
        receiver.take(tensors, 2)()  # versions that are passed over are given up too
    wait_for_memory(sender)
    assert sender.num_held_bytes() == 0


def test_a_version_can_be_taken_once():
    _, (sender,), (receiver,) = connect(WHOLE, WHOLE)
    sender.publish(FULL, 3)
    receiver.take(dict(FULL), 3)()
    with pytest.raises(WeightMismatchError, match="took version 3 before, and asks for version 3; a version in device"):
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


def publish(pipe, address):
    reshard = reshard_plan(SOURCES["two shards"], WHOLE)
    sender = DeviceWeightSender(WeightStore.open(address), reshard, 1, HostDevice())
    sender.publish(parts(SOURCES["two shards"], 3)[1], 3)
    pipe.send("published")
    time.sleep(HANG_S)


def test_another_process_is_read_and_its_death_is_named():
    reshard = reshard_plan(SOURCES["two shards"], WHOLE)
    store = create_device_store(reshard, name="weights")
    first = DeviceWeightSender(store, reshard, 0, HostDevice())
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=publish, args=(there, store.address), daemon=True)
    child.start()
    try:
        assert here.poll(HANG_S) and here.recv() == "published"
        receiver = DeviceWeightReceiver(store, reshard, 0, HostDevice())
        first.publish(parts(SOURCES["two shards"], 3)[0], 3)
        (tensors,) = blank(WHOLE)
        check = receiver.take(tensors, 3)
        assert_bitwise_equal(tensors, parts(WHOLE, 3)[0])
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(HANG_S)
        store.words.store(receiver._control.served(0), 2)
        with pytest.raises(PeerLost, match="sender 1 died after it published version 3, and its device memory went"):
            receiver.take(tensors, 3)
        check()  # what was copied before is whole
    finally:
        child.kill()
