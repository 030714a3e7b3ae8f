"""Weight stores: everything arrives bit for bit, and whatever does not is noticed and named."""

import itertools
import threading
import time

import numpy as np
import pytest
import torch

from rlinf_comm import LayoutError, PeerLost, WeightMismatchError, WeightTimeout, pack, unpack
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_comm.weights import (
    Box,
    Layout,
    StoreReceiver,
    StoreSender,
    TensorSpec,
    WeightStore,
    reshard_plan,
    specs_of,
)

HANG_S = 60.0

FULL = {
    "embed": torch.randn(40, 12, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "w": torch.randn(9, 8, 3, generator=torch.Generator().manual_seed(1)),
    "bias": torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45]),
    "step": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
}
SPECS = specs_of(FULL)
LAYOUTS = {
    "one": Layout.replicated(SPECS, 1),
    "two replicas": Layout.replicated(SPECS, 2),
    "three shards": Layout.sharded(SPECS, 3),
    "two shards of dim 1": Layout.sharded(SPECS, 2, dim=1),
}


def slices(box):
    return tuple(slice(at, at + length) for at, length in zip(box.start, box.shape, strict=True))


def shard(layout, rank, full=FULL):
    return {block.name: full[block.name][slices(block.box)].clone() for block in layout.ranks[rank].blocks}


def blank(layout, rank):
    return {name: torch.full_like(tensor, 1) for name, tensor in shard(layout, rank).items()}


def connect(src, dst, name="weights"):
    reshard = reshard_plan(src, dst)
    store = WeightStore.create(reshard, name=name)
    senders = [StoreSender(store, reshard, rank) for rank in range(src.num_ranks)]
    receivers = [StoreReceiver(WeightStore.open(store.address), reshard, rank) for rank in range(dst.num_ranks)]
    return store, senders, receivers


def pair(specs=SPECS):
    layout = Layout.replicated(specs, 1)
    store, (sender,), (receiver,) = connect(layout, layout)
    return store, sender, receiver


@pytest.mark.parametrize(("src_name", "dst_name"), itertools.product(LAYOUTS, LAYOUTS))
def test_weights_arrive_bit_for_bit(src_name, dst_name):
    src, dst = LAYOUTS[src_name], LAYOUTS[dst_name]
    _, senders, receivers = connect(src, dst)
    for version in range(4):
        full = {name: tensor.roll(version) for name, tensor in FULL.items()}
        for rank, sender in enumerate(senders):
            sender.publish(shard(src, rank, full), version)
        for rank, receiver in enumerate(receivers):
            tensors = blank(dst, rank)
            report = receiver.receive(tensors, version)
            assert_bitwise_equal(tensors, shard(dst, rank, full))
            assert report.policy_version == version
            assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
            assert report.num_tensors == sum(tensor.numel() > 0 for tensor in tensors.values())


def test_receive_writes_into_the_given_memory_whatever_its_strides():
    _, sender, receiver = pair()
    sender.publish(FULL, 0)
    backing = torch.zeros(12, 40, dtype=torch.bfloat16)
    tensors = {**blank(LAYOUTS["one"], 0), "embed": backing.T}
    pointer = tensors["w"].data_ptr()
    receiver.receive(tensors, 0)
    assert_bitwise_equal(backing.T.contiguous(), FULL["embed"])
    assert tensors["w"].data_ptr() == pointer


def test_publish_takes_strided_sources():
    specs = {"w": TensorSpec((6, 10), "float32")}
    _, sender, receiver = pair(specs)
    source = torch.randn(10, 6).T
    sender.publish({"w": source}, 0)
    tensors = {"w": torch.zeros(6, 10)}
    receiver.receive(tensors, 0)
    assert_bitwise_equal(tensors["w"], source.contiguous())


def test_parameters_receive_in_place():
    model = torch.nn.Linear(3, 2)
    specs = specs_of(dict(model.named_parameters()))
    _, sender, receiver = pair(specs)
    want = {"weight": torch.ones(2, 3), "bias": torch.full((2,), 5.0)}
    sender.publish(want, 0)
    receiver.receive(dict(model.named_parameters()), 0)
    assert_bitwise_equal({name: parameter.detach() for name, parameter in model.named_parameters()}, want)


def test_two_replicas_send_about_half_each():
    specs = {f"layer{index}": TensorSpec((128, 256), "float32") for index in range(4)}
    src = Layout.replicated(specs, 2)
    _, senders, (receiver,) = connect(src, Layout.replicated(specs, 1))
    tensors = {name: torch.randn(spec.shape) for name, spec in specs.items()}
    sent = [sender.publish(tensors, 0).num_bytes for sender in senders]
    assert sum(sent) == receiver.receive({name: torch.zeros(128, 256) for name in specs}, 0).num_bytes
    assert abs(sent[0] - sent[1]) <= 0.05 * sum(sent)


# --- what must be noticed ---------------------------------------------------------------------------------------------


def test_every_corrupted_byte_is_noticed_and_named():
    store, sender, receiver = pair()
    sender.publish(FULL, 0)
    raw = np.frombuffer(memoryview(store._segment), dtype=np.uint8)
    start = store.slots_pointer - store._segment.pointer
    spans = {placed.piece.name: (placed.offset, placed.num_bytes) for placed in receiver._own}
    assert spans.keys() == {name for name, tensor in FULL.items() if tensor.numel()}
    for name, (offset, num_bytes) in spans.items():
        for index in {0, num_bytes // 2, num_bytes - 1}:
            raw[start + offset + index] ^= 0x10 if name != "mask" else 1
            with pytest.raises(WeightMismatchError, match=f"{name} differs from what its sender published") as caught:
                receiver.receive(blank(LAYOUTS["one"], 0), 0)
            assert caught.value.tensors == (name,)
            assert caught.value.expected_version == 0
            raw[start + offset + index] ^= 0x10 if name != "mask" else 1
    receiver.receive(blank(LAYOUTS["one"], 0), 0)


def test_what_is_served_is_checked_and_not_what_was_stored():
    """A copy that goes wrong on its way, as with a second tensor in the same memory, is noticed too."""
    specs = {"a": TensorSpec((4,), "float32"), "b": TensorSpec((4,), "float32")}
    _, sender, receiver = pair(specs)
    sender.publish({"a": torch.ones(4), "b": torch.zeros(4)}, 0)
    memory = torch.zeros(6)
    with pytest.raises(WeightMismatchError) as caught:
        receiver.receive({"a": memory[:4], "b": memory[2:]}, 0)
    assert caught.value.tensors == ("a",)


def test_a_check_may_come_later_and_keeps_its_version_in_the_store():
    _, sender, receiver = pair()
    tensors = blank(LAYOUTS["one"], 0)
    for version in range(2):
        sender.publish(FULL, version)
        check = receiver.take(tensors, version)
        assert_bitwise_equal(tensors, FULL)
        assert check().policy_version == version
    sender.publish(FULL, 2)
    check = receiver.take(tensors, 2)
    sender.publish(FULL, 3)
    with pytest.raises(WeightTimeout, match=r"receivers \[0\] have not taken version 2"):
        sender.publish(FULL, 4, timeout_s=0.01)
    tensors["w"].view(torch.uint8)[2, 3, 5] ^= 16
    with pytest.raises(WeightMismatchError, match="receiver 0 must not serve version 2: w differs"):
        check()


def test_a_receiver_that_attests_nothing_digests_nothing_and_frees_the_store(monkeypatch):
    store, sender, _ = pair()
    reshard = reshard_plan(LAYOUTS["one"], LAYOUTS["one"])
    receiver = StoreReceiver(store, reshard, 0, attests=False)
    monkeypatch.setattr(receiver, "_digests", lambda tensors: pytest.fail("nothing is to be digested"))
    tensors = blank(LAYOUTS["one"], 0)
    for version in range(4):
        sender.publish_by_reference(FULL, version)
        check = receiver.take(tensors, version)
        tensors["w"].view(torch.uint8)[2, 3, 5] ^= 16
        assert check().policy_version == version
        sender.finish_reads()


def test_a_piece_that_was_not_published_is_noticed():
    store, sender, receiver = pair()
    sender.publish(FULL, 0)
    index = next(placed.index for placed in receiver._own if placed.piece.name == "w")
    store.words.store(receiver._control.piece(0, index), 5)
    with pytest.raises(WeightMismatchError, match="w is not in the store in version 0") as caught:
        receiver.receive(blank(LAYOUTS["one"], 0), 0)
    assert caught.value.tensors == ("w",)


def test_missing_tensors_are_named_on_both_sides():
    _, sender, receiver = pair()
    partial = {name: tensor for name, tensor in FULL.items() if name not in ("w", "bias")}
    with pytest.raises(WeightMismatchError, match="sender 0 lacks bias, w") as caught:
        sender.publish(partial, 0)
    assert caught.value.tensors == ("bias", "w")
    sender.publish(FULL, 0)
    with pytest.raises(WeightMismatchError, match="receiver 0 lacks bias, w"):
        receiver.receive(partial, 0)


def test_tensors_that_do_not_fit_are_named():
    _, sender, _ = pair()
    for change, message in [
        ({"w": torch.zeros(9, 8, 4)}, r"w: has the shape \(9, 8, 4\), the layout says \(9, 8, 3\)"),
        ({"w": FULL["w"].double()}, "w: has the dtype float64, the layout says float32"),
        ({"w": FULL["w"].to("meta")}, "w: a torch.strided tensor on meta"),
        ({"new": torch.zeros(1)}, r"sender 0 has 1 tensor that .*: new float32 \[1\].* or do not pass them"),
    ]:
        with pytest.raises(LayoutError, match=message):
            sender.publish({**FULL, **change}, 0)


def test_an_old_version_is_refused():
    _, sender, receiver = pair()
    with pytest.raises(WeightTimeout, match="expected version 1, but sender 0 has published nothing"):
        receiver.receive(blank(LAYOUTS["one"], 0), 1, timeout_s=0)
    sender.publish(FULL, 0)
    with pytest.raises(WeightTimeout, match="expected version 1, but sender 0 has published version 0") as caught:
        receiver.receive(blank(LAYOUTS["one"], 0), 1, timeout_s=0.01)
    assert (caught.value.expected_version, caught.value.found_version) == (1, 0)


def test_a_version_that_was_passed_over_is_refused_at_once():
    _, sender, receiver = pair()
    sender.publish(FULL, 2)
    sender.publish(FULL, 5)
    with pytest.raises(WeightMismatchError, match=r"expected version 3, but sender 0 has published 5") as caught:
        receiver.receive(blank(LAYOUTS["one"], 0), 3, timeout_s=HANG_S)
    assert (caught.value.expected_version, caught.value.found_version) == (3, 5)


def test_versions_count_up():
    _, sender, receiver = pair()
    sender.publish(FULL, 3)
    for version in (3, 2, -1):
        with pytest.raises(ValueError, match=f"policy_version={version} is not newer than 3"):
            sender.publish(FULL, version)
    receiver.receive(blank(LAYOUTS["one"], 0), 3)


def test_other_plans_and_ranks_are_refused():
    store, _, _ = pair()
    other = reshard_plan(LAYOUTS["two replicas"], LAYOUTS["one"])
    with pytest.raises(LayoutError, match="created for another plan"):
        StoreSender(store, other, 0)
    with pytest.raises(LayoutError, match="sender rank 1; the plan has 1"):
        StoreSender(store, reshard_plan(LAYOUTS["one"], LAYOUTS["one"]), 1)


# --- two slots --------------------------------------------------------------------------------------------------------


def test_a_sender_is_one_version_ahead_and_then_waits():
    _, sender, receiver = pair()
    sender.publish(FULL, 0)
    sender.publish(FULL, 1)
    with pytest.raises(
        WeightTimeout, match=r"receivers \[0\] have not taken version 0 within timeout_s=0.01, and version 2"
    ):
        sender.publish(FULL, 2, timeout_s=0.01)
    receiver.receive(blank(LAYOUTS["one"], 0), 0)
    sender.publish(FULL, 2, timeout_s=0)
    receiver.receive(blank(LAYOUTS["one"], 0), 1)
    receiver.receive(blank(LAYOUTS["one"], 0), 2)


def test_a_receiver_may_skip_versions():
    _, sender, receiver = pair()
    sender.publish(FULL, 0)
    sender.publish(FULL, 1)
    publishing = threading.Thread(target=lambda: [sender.publish(FULL, version) for version in (2, 3)])
    publishing.start()
    receiver.receive(blank(LAYOUTS["one"], 0), 3, timeout_s=HANG_S)
    publishing.join(HANG_S)
    assert not publishing.is_alive()


def test_a_version_can_be_received_again_and_is_not_overwritten_meanwhile():
    _, sender, receiver = pair()
    sender.publish(FULL, 0)
    receiver.receive(blank(LAYOUTS["one"], 0), 0)
    receiver.receive(blank(LAYOUTS["one"], 0), 0)
    tensors = blank(LAYOUTS["one"], 0)
    with pytest.raises(WeightMismatchError, match="lacks w"):
        receiver.receive({name: tensor for name, tensor in tensors.items() if name != "w"}, 0)
    sender.publish(FULL, 1)
    sender.publish(FULL, 2)
    receiver.receive(tensors, 1)


def test_all_senders_and_all_receivers_count():
    src, dst = Layout.sharded(SPECS, 2), Layout.replicated(SPECS, 2)
    _, senders, receivers = connect(src, dst)
    senders[0].publish(shard(src, 0), 0)
    with pytest.raises(WeightTimeout, match="sender 1 has published nothing"):
        receivers[0].receive(blank(dst, 0), 0, timeout_s=0.01)
    senders[1].publish(shard(src, 1), 0)
    receivers[0].receive(blank(dst, 0), 0)
    senders[0].publish(shard(src, 0), 1)
    with pytest.raises(WeightTimeout, match=r"receivers \[1\] have not taken version 0"):
        senders[0].publish(shard(src, 0), 2, timeout_s=0.01)


def test_a_rank_without_blocks_has_nothing_to_do():
    specs = {"w": TensorSpec((4,), "float32")}
    src = Layout.of_boxes(specs, [{"w": Box((0,), (4,))}, {}])
    _, senders, (receiver,) = connect(src, Layout.replicated(specs, 1))
    assert senders[1].publish({}, 0).num_bytes == 0
    senders[0].publish({"w": torch.ones(4)}, 0)
    receiver.receive({"w": torch.zeros(4)}, 0)


# --- processes --------------------------------------------------------------------------------------------------------

PROCESS_SPECS = {"w": TensorSpec((50, 40), "int64"), "b": TensorSpec((7,), "int64")}


def test_weights_cross_processes(start_peer):
    src, dst = Layout.sharded(PROCESS_SPECS, 2), Layout.sharded(PROCESS_SPECS, 2, dim=1)
    reshard = reshard_plan(src, dst)
    store = WeightStore.create(reshard, name="processes")
    senders = [start_peer("publish", store.address, reshard, rank, 6) for rank in range(2)]
    receivers = [StoreReceiver(store, unpack(pack(reshard)), rank) for rank in range(2)]
    for version in range(6):
        for rank, receiver in enumerate(receivers):
            tensors = {block.name: torch.zeros(block.box.shape, dtype=torch.int64) for block in dst.ranks[rank].blocks}
            receiver.receive(tensors, version, timeout_s=HANG_S)
            assert tensors["w"].eq(version).all()
            assert tensors["b"].eq(-version).all()
    for peer in senders:
        with peer:
            peer.join()


def test_a_dead_sender_is_noticed(start_peer):
    layout = Layout.replicated(PROCESS_SPECS, 1)
    reshard = reshard_plan(layout, layout)
    store = WeightStore.create(reshard, name="dead sender")
    receiver = StoreReceiver(store, reshard, 0)
    tensors = {name: torch.zeros(spec.shape, dtype=torch.int64) for name, spec in PROCESS_SPECS.items()}
    with start_peer("publish_and_die", store.address, reshard):
        receiver.receive(tensors, 0, timeout_s=HANG_S)
        start_s = time.monotonic()
        with pytest.raises(PeerLost, match="sender 0 died before it published version 1; its last is 0"):
            receiver.receive(tensors, 1, timeout_s=HANG_S)
        assert time.monotonic() - start_s < HANG_S
    replacement = StoreSender(store, reshard, 0)
    replacement.publish(tensors, 1)
    receiver.receive(tensors, 1)


def test_a_second_process_for_a_rank_is_refused(start_peer):
    layout = Layout.replicated(PROCESS_SPECS, 1)
    reshard = reshard_plan(layout, layout)
    store = WeightStore.create(reshard, name="second")
    peer = start_peer("publish", store.address, reshard, 0, 3)  # waits for its receiver
    with pytest.raises(LayoutError, match=f"sender 0 is process {peer.process.pid}, which is alive"):
        StoreSender(store, reshard, 0)


def test_a_dead_store_is_noticed():
    reshard = reshard_plan(LAYOUTS["one"], LAYOUTS["one"])
    address = WeightStore.create(reshard, name="gone").address
    with pytest.raises(PeerLost, match="weight store 'gone'"):
        WeightStore.open(address)
