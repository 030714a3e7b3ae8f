"""Weight stores of any layout: fused, padded, transposed, cast and tied buffers arrive bit for bit and attested."""

import numpy as np
import pytest
import torch

from rlinf_comm import LayoutError, WeightMismatchError
from rlinf_comm.testing import assert_bitwise_equal, execute_copies
from rlinf_comm.weights import (
    Block,
    BufferSpec,
    Layout,
    RankLayout,
    StoreReceiver,
    StoreSender,
    TensorSpec,
    WeightStore,
    reshard_plan,
)
from rlinf_comm.weights.layouts import TransformerShape, megatron_layout, merged_layout


def connect(src, dst):
    reshard = reshard_plan(src, dst)
    store = WeightStore.create(reshard, name="weights")
    senders = [StoreSender(store, reshard, rank) for rank in range(src.num_ranks)]
    receivers = [StoreReceiver(WeightStore.open(store.address), reshard, rank) for rank in range(dst.num_ranks)]
    return store, senders, receivers


SHAPE = TransformerShape(
    num_layers=2, hidden=6, num_heads=4, num_kv_heads=2, head_dim=2, vocab=11, intermediate=8, num_experts=4,
    expert_intermediate=4, dense_layers=(1,), qk_norm=True, qkv_bias=True, dtype="bfloat16",
)  # fmt: skip
TRAINED = megatron_layout(SHAPE, tp=2, pp=2, ep=2, experts="grouped", vocab_multiple=4, dtype="float32")
SERVED = merged_layout(SHAPE, tp=4, ep=2, expert_tp=2)


def buffers(layout, rank, fill):
    return {
        name: fill(buffer.shape).to(getattr(torch, buffer.dtype)) for name, buffer in layout.ranks[rank].buffers.items()
    }


def trained_and_served():
    """Buffers of both layouts: random float32 ones of the source, and what the plan makes of them in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    whole = Layout.replicated(SHAPE.specs(), 1, dtype="float32")
    full = buffers(whole, 0, lambda shape: torch.randn(shape, generator=generator))
    sources = [buffers(TRAINED, rank, torch.zeros) for rank in range(TRAINED.num_ranks)]
    for rank, tensors in enumerate(sources):
        execute_copies(reshard_plan(whole, TRAINED).copies(dst_rank=rank), list(full.values()), list(tensors.values()))
    served = [buffers(SERVED, rank, torch.ones) for rank in range(SERVED.num_ranks)]
    for rank, tensors in enumerate(served):
        execute_copies(reshard_plan(whole, SERVED).copies(dst_rank=rank), list(full.values()), list(tensors.values()))
    return sources, served


def test_fused_and_cast_weights_arrive_bit_for_bit():
    sources, expected = trained_and_served()
    _, senders, receivers = connect(TRAINED, SERVED)
    for sender, tensors in zip(senders, sources, strict=True):
        sender.publish(tensors, 0)
    for rank, receiver in enumerate(receivers):
        tensors = buffers(SERVED, rank, torch.ones)  # the padding stays
        report = receiver.receive(tensors, 0)
        assert_bitwise_equal(tensors, expected[rank])
        assert report.num_bytes == sum(2 * block.box.num_elements for block in SERVED.ranks[rank].blocks)


def test_a_flipped_bit_in_a_cast_weight_is_noticed_and_named():
    sources, _ = trained_and_served()
    store, senders, receivers = connect(TRAINED, SERVED)
    for sender, tensors in zip(senders, sources, strict=True):
        sender.publish(tensors, 0)
    raw = np.frombuffer(memoryview(store._segment), dtype=np.uint8)
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    placed = next(placed for placed in receivers[1]._own if placed.piece.name == name)
    raw[store.slots_pointer - store._segment.pointer + placed.offset] ^= 1
    with pytest.raises(WeightMismatchError, match="differs from what its sender published") as caught:
        receivers[1].receive(buffers(SERVED, 1, torch.ones), 0)
    assert caught.value.tensors == (name,)


def test_one_source_serves_two_dtypes():
    specs = {"w": TensorSpec((4, 6), "float32")}
    rank = Layout.replicated(specs, 1).ranks[0], Layout.replicated(specs, 1, dtype="float16").ranks[0]
    _, (sender,), receivers = connect(Layout.replicated(specs, 1), Layout(specs, rank))
    source = torch.randn(4, 6)
    sender.publish({"w": source}, 0)
    for receiver, dtype in zip(receivers, (torch.float32, torch.float16), strict=True):
        tensor = torch.zeros(4, 6, dtype=dtype)
        receiver.receive({"w": tensor}, 0)
        assert_bitwise_equal(tensor, source.to(dtype))


def test_fused_buffers_may_be_strided():
    specs = {"a": TensorSpec((2, 6), "float32"), "b": TensorSpec((3, 6), "float32")}
    fused = RankLayout(
        {"ab": BufferSpec((5, 6), "float32")},
        (Block("a", specs["a"].whole, "ab", 0, (6, 1)), Block("b", specs["b"].whole, "ab", 12, (6, 1))),
    )
    _, (sender,), (receiver,) = connect(Layout.replicated(specs, 1), Layout(specs, (fused,)))
    tensors = {"a": torch.randn(2, 6), "b": torch.randn(3, 6)}
    sender.publish(tensors, 0)
    backing = torch.zeros(6, 10)
    receiver.receive({"ab": backing[:, ::2].T}, 0)
    assert_bitwise_equal(backing[:, ::2].T.contiguous(), torch.cat([tensors["a"], tensors["b"]]))
    flat = RankLayout({"ab": BufferSpec((6, 5), "float32")}, fused.blocks)  # rows of 6 in rows of 5
    _, (sender,), (receiver,) = connect(Layout.replicated(specs, 1), Layout(specs, (flat,)))
    sender.publish(tensors, 0)
    with pytest.raises(LayoutError, match="ab: not contiguous, and its blocks span dimensions"):
        receiver.receive({"ab": torch.zeros(5, 6).T}, 0)


def test_tied_tensors_are_checked_under_both_names():
    specs = {name: TensorSpec((3, 2), "float32") for name in ("embed", "head")}
    blocks = tuple(Block(name, specs[name].whole, "embed", 0, (2, 1)) for name in specs)
    tied = Layout(specs, (RankLayout({"embed": BufferSpec((3, 2), "float32")}, blocks),))
    _, (sender,), (receiver,) = connect(Layout.replicated(specs, 1), tied)
    weight = torch.randn(3, 2)
    sender.publish({"embed": weight, "head": weight}, 0)
    receiver.receive({"embed": torch.zeros(3, 2)}, 0)
    sender.publish({"embed": weight, "head": weight + 1}, 1)
    with pytest.raises(WeightMismatchError, match="embed differs"):
        receiver.receive({"embed": torch.zeros(3, 2)}, 1)
