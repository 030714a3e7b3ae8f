"""Weights in FP8 against a quantizer that enumerates blocks in numpy, and their way from shards to servers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf_comm import WeightMismatchError
from rlinf_comm.weights import (
    Box,
    Layout,
    StoreReceiver,
    StoreSender,
    TensorSpec,
    WeightStore,
    execute,
    fp8,
    reshard_plan,
    specs_of,
)
from rlinf_comm.weights.fp8 import BlockQuantizer, NonFiniteWeightError, dequantize, quantize
from rlinf_comm.weights.layouts import (
    TransformerShape,
    huggingface_layout,
    megatron_layout,
    merged_layout,
)
from rlinf_comm.weights.layouts.quantized import quantized_layout, quantized_names, scale_shape

E4M3 = np.array(
    sorted(
        {
            sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
            for sign in (1, -1)
            for exponent in range(16)
            for mantissa in range(8)
            if (exponent, mantissa) != (15, 7)  # not a number
        }
    )
)
"""All finite values of float8_e4m3fn (arXiv:2209.05433), ascending."""


def to_e4m3(values):
    """The nearest value of E4M3, of two equally near ones the one with an even mantissa."""
    above = np.clip(np.searchsorted(E4M3, values), 1, len(E4M3) - 1)
    low, high = E4M3[above - 1], E4M3[above]
    to_low, to_high = values.astype(np.float64) - low, high - values.astype(np.float64)
    # Ascending values alternate between even and odd mantissas; 0 is even.
    is_low_even = (above - 1 - len(E4M3) // 2) % 2 == 0
    return np.where((to_low < to_high) | ((to_low == to_high) & is_low_even), low, high)


def reference(weight):
    """(values in float64, scales in float32) of a matrix, block by block."""
    rows, columns = weight.shape
    values, scales = np.zeros((rows, columns)), np.zeros((-(-rows // 128), -(-columns // 128)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            block = weight[place].astype(np.float32)
            largest = np.abs(block).max()
            scale = max(largest / np.float32(448), np.float32(2.0**-126)) if largest else np.float32(1.0)
            scales[i, j] = scale
            values[place] = to_e4m3(np.clip(block / scale, np.float32(-448), np.float32(448)))
    return values, scales


@pytest.mark.parametrize("shape", [(128, 128), (96, 96), (200, 300), (1, 129), (257, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_those_of_the_enumeration(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    values, scales = quantize(weight)
    expected, of_blocks = reference(weight.float().numpy())
    assert np.array_equal(values.double().numpy(), expected)
    assert np.array_equal(scales.numpy(), of_blocks)


def test_zeros_and_denormals():
    weight = torch.zeros(256, 128)
    weight[200, 3], weight[201, 3] = 1e-42, -3e-39
    values, scales = quantize(weight)
    expected, of_blocks = reference(weight.numpy())
    assert np.array_equal(values.double().numpy(), expected)
    assert scales.tolist() == of_blocks.tolist() == [[1.0], [2.0**-126]]
    assert torch.isfinite(dequantize(values, scales, torch.float32)).all()


def test_the_largest_weight_of_a_block_stays_as_it_is():
    weight = torch.randn(64, 64)
    values, scales = quantize(weight)
    largest = weight.abs() == weight.abs().max()
    torch.testing.assert_close(dequantize(values, scales, torch.float32)[largest], weight[largest])


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_refused_by_name(wrong):
    weight = torch.ones(2, 130, 130)
    weight[1, 129, 129] = wrong
    with pytest.raises(NonFiniteWeightError, match=r"layers\.3\.up_proj"):
        quantize(weight, "layers.3.up_proj")


@pytest.mark.parametrize("shape", [(96, 96), (200, 300), (3, 130, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_comes_back(shape, dtype):
    """On a CPU bits are moved instead of converted."""
    numbers = torch.Generator().manual_seed(2)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=numbers)
    values = bits.masked_fill_(bits % 128 == 127, 0).view(torch.float8_e4m3fn)
    scales = torch.rand(scale_shape(shape), generator=numbers)
    spread = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]]
    assert torch.equal(dequantize(values, scales, dtype), (values.to(torch.float32) * spread).to(dtype))


# -- from a trainer to servers -----------------------------------------------------------------------------------------

DENSE = TransformerShape(
    num_layers=2, hidden=256, num_heads=4, num_kv_heads=2, head_dim=128, vocab=64, intermediate=512, dtype="float32"
)
EXPERTS = replace(DENSE, num_layers=1, num_experts=4, expert_intermediate=256)


def quantized_shape(shape):
    return replace(shape, fp8_scales=(128, 128))


def empty(buffers):
    return {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in buffers.items()}


def random_weights(specs):
    numbers = torch.Generator().manual_seed(3)
    return {name: torch.randn(spec.shape, generator=numbers) * 0.1 for name, spec in specs.items()}


def stored(layout, whole):
    """The tensors of each rank, filled from the whole ones by a plan."""
    ranks = [empty(rank.buffers) for rank in layout.ranks]
    source = Layout.replicated(specs_of(whole), 1)
    execute(reshard_plan(source, layout), [whole], ranks)
    return ranks


def merged_over(all_maxima):
    """The merge of several ranks, whose maxima are known from a first pass."""
    largest = torch.stack(all_maxima).amax(0)
    return lambda own: own.copy_(largest)


def published(layout, names, ranks):
    """What the ranks publish together."""
    seen = []
    for rank, tensors in enumerate(ranks):
        BlockQuantizer(layout, rank, names).quantized(tensors, lambda own: seen.append(own.clone()))
    merge = merged_over(seen) if seen else None
    return [BlockQuantizer(layout, rank, names).quantized(tensors, merge) for rank, tensors in enumerate(ranks)]


def trainers(shape):
    specs = shape.specs()
    uneven = Layout.sharded(specs, 3)  # cuts through blocks
    return {
        "whole": huggingface_layout(shape),
        "rows of 3 ranks": uneven,
        "columns of 2 ranks": Layout.sharded(specs, 2, dim=-1),
        "megatron": megatron_layout(shape, tp=2),
    }


@pytest.mark.parametrize("trainer", ["whole", "rows of 3 ranks", "columns of 2 ranks", "megatron"])
@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tp", [1, 2])
def test_any_shards_give_the_blocks_of_whole_tensors(trainer, shape, tp):
    """From every trainer to servers that merge projections and split them over ranks."""
    layout, whole = trainers(shape)[trainer], random_weights(shape.specs())
    served = merged_layout(quantized_shape(shape), tp=tp, dtype="float32", vocab_multiple=1)
    names = quantized_names(layout.specs, served.specs)
    source = quantized_layout(layout, names)
    moved = [empty(rank.buffers) for rank in served.ranks]
    execute(reshard_plan(source, served), published(layout, names, stored(layout, whole)), moved)
    expected = dict(whole)
    for name in names:
        expected[name], expected[f"{name}_scale_inv"] = quantize(whole[name])
    for rank, tensors in zip(served.ranks, moved, strict=True):
        for block in rank.blocks:
            buffer = tensors[block.buffer].flatten()
            served_bits = buffer.view(torch.uint8 if buffer.dtype.itemsize == 1 else buffer.dtype)
            served_bits = served_bits.as_strided(block.box.shape, block.strides, block.offset)
            box = tuple(
                slice(first, first + size) for first, size in zip(block.box.start, block.box.shape, strict=True)
            )
            right = expected[block.name]
            right = right.view(torch.uint8) if right.dtype.itemsize == 1 else right
            assert torch.equal(served_bits, right[box]), block


def test_only_linear_layers_are_quantized():
    names = quantized_names(DENSE.specs(), quantized_shape(DENSE).specs())
    unchanged = DENSE.specs().keys() - set(names)
    assert {name.rpartition("layers.")[2].lstrip("01.") for name in unchanged} == {
        "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
        "input_layernorm.weight", "post_attention_layernorm.weight",
    }  # fmt: skip
    assert "model.layers.0.mlp.gate.weight" not in quantized_names(EXPERTS.specs(), quantized_shape(EXPERTS).specs())


def test_half_the_bytes_of_bfloat16_are_moved():
    shape = TransformerShape(num_layers=4, hidden=1024, num_heads=8, num_kv_heads=8, head_dim=128, vocab=8,
                             intermediate=4096)  # fmt: skip
    plain, quantized = (sum(spec.num_bytes for spec in one.specs().values()) for one in (shape, quantized_shape(shape)))
    assert quantized / plain == pytest.approx(0.5, abs=0.001)


def test_other_blocks_are_refused():
    specs = {"a_proj.weight": TensorSpec((256, 256), "float32")}
    served = {
        "a_proj.weight": TensorSpec((256, 256), "float8_e4m3fn"),
        "a_proj.weight_scale_inv": TensorSpec((4, 4), "float32"),
    }
    with pytest.raises(ValueError, match=r"a_proj\.weight .* scales \[4, 4\].*128 x 128"):
        quantized_names(specs, served)
    assert quantized_names(served, served) == (), "trained in FP8"


def test_ranks_whose_shards_have_an_infinite_weight_all_say_so():
    specs = {"a_proj.weight": TensorSpec((200, 10), "float32")}
    layout = Layout.sharded(specs, 2)
    ranks = [{"a_proj.weight": torch.ones(100, 10)} for _ in range(2)]
    ranks[1]["a_proj.weight"][50, 5] = math.nan
    seen = []
    for rank in range(2):
        quantizer = BlockQuantizer(layout, rank, ["a_proj.weight"])
        try:
            quantizer.quantized(ranks[rank], lambda own: seen.append(own.clone()))
        except NonFiniteWeightError:
            assert rank == 1
    for rank in range(2):
        with pytest.raises(NonFiniteWeightError, match=r"a_proj\.weight"):
            BlockQuantizer(layout, rank, ["a_proj.weight"]).quantized(ranks[rank], merged_over(seen))


def test_a_flipped_bit_of_a_scale_is_refused_by_name():
    """Digests cover values and scales, and stay exact over twenty versions."""
    weights = random_weights(DENSE.specs())
    layout = Layout.replicated(specs_of(weights), 1)
    served = huggingface_layout(quantized_shape(DENSE))
    names = quantized_names(layout.specs, served.specs)
    quantizer = BlockQuantizer(layout, 0, names)
    plan = reshard_plan(quantized_layout(layout, names), served.with_dtypes_of(layout.specs | quantized_specs(names)))
    store = WeightStore.create(plan, name="fp8")
    sender, receiver = StoreSender(store, plan, 0), StoreReceiver(store, plan, 0)
    held = empty(served.ranks[0].buffers)
    for version in range(20):
        for name in weights:
            weights[name] += 0.01 * torch.randn(weights[name].shape)
        sender.publish(quantizer.quantized(weights), version)
        receiver.receive(held, version)
        for name in names:
            values, scales = quantize(weights[name])
            assert torch.equal(held[name].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(held[f"{name}_scale_inv"], scales)
    sender.publish(quantizer.quantized(weights), 20)
    check = receiver.take(held, 20)
    held["model.layers.1.mlp.up_proj.weight_scale_inv"].view(torch.int32)[2, 1] ^= 1
    with pytest.raises(WeightMismatchError) as caught:
        check()
    assert caught.value.tensors == ("model.layers.1.mlp.up_proj.weight_scale_inv",)


def quantized_specs(names):
    specs = quantized_shape(DENSE).specs()
    return {name: spec for name, spec in specs.items() if name in names or name.endswith("_scale_inv")}


@pytest.mark.parametrize("trainer", ["rows of 3 ranks", "columns of 2 ranks", "megatron"])
@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_shards_hold_what_servers_compute_with_for_a_while(trainer, shape):
    layout, whole = trainers(shape)[trainer], random_weights(shape.specs())
    names = quantized_names(layout.specs, quantized_shape(shape).specs())
    ranks, maxima = stored(layout, whole), []
    for rank, tensors in enumerate(ranks):
        BlockQuantizer(layout, rank, names).quantized(tensors, lambda own: maxima.append(own.clone()))
    rounded = {
        name: dequantize(*quantize(whole[name]), torch.float32) if name in names else whole[name] for name in whole
    }
    for rank, (tensors, expected) in enumerate(zip(ranks, stored(layout, rounded), strict=True)):
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        with BlockQuantizer(layout, rank, names).rounded(tensors, merged_over(maxima)):
            assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
        assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_a_stack_in_pieces_gives_what_it_gives_at_once(monkeypatch):
    stack = torch.randn(5, 130, 70)
    values, scales = quantize(stack)
    monkeypatch.setattr(fp8, "CHUNK", 2 * 130 * 70)
    for one, other in zip(quantize(stack), (values, scales), strict=True):
        assert torch.equal(one.to(torch.float32), other.to(torch.float32))


def test_a_rank_may_have_no_rows_of_a_tensor():
    """As fsdp2 leaves the last ranks, where there are more ranks than rows."""
    specs = {"a_proj.weight": TensorSpec((3, 10), "float32")}
    boxes = [{"a_proj.weight": Box((0, 0), (3, 10))}, {"a_proj.weight": Box((3, 0), (0, 10))}]
    layout, weight = Layout.of_boxes(specs, boxes), torch.randn(3, 10)
    seen = []
    for rank, own in enumerate((weight, weight[3:])):
        BlockQuantizer(layout, rank, ["a_proj.weight"]).quantized({"a_proj.weight": own}, seen.append)
    for rank, own in enumerate((weight, weight[3:])):
        tensors = {"a_proj.weight": own.clone()}
        quantizer = BlockQuantizer(layout, rank, ["a_proj.weight"])
        sent = quantizer.quantized(tensors, merged_over(seen))
        assert set(sent) == set(quantized_layout(layout, ["a_proj.weight"]).ranks[rank].buffers)
        assert torch.equal(sent["a_proj.weight_scale_inv"], quantize(weight)[1])
        with quantizer.rounded(tensors, merged_over(seen)):
            assert torch.equal(tensors["a_proj.weight"], dequantize(*quantize(weight), torch.float32)[: len(own)])
