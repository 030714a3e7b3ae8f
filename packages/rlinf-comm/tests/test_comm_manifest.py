"""rlinf_comm.weights.manifest: equal weights verify whatever their layouts, and anything else is named."""

from dataclasses import replace

import pytest
import torch
from comm_digests import tensor_digest

from rlinf_comm import LayoutError, WeightMismatchError, pack, unpack
from rlinf_comm.weights import (
    Block,
    Box,
    BufferSpec,
    Layout,
    RankLayout,
    TensorSpec,
    execute,
    manifest_of,
    merge_manifests,
    reshard_plan,
    verify,
)
from rlinf_comm.weights.layouts import TransformerShape, huggingface_layout, megatron_layout, merged_layout

SHAPE = TransformerShape(
    num_layers=2, hidden=6, num_heads=4, num_kv_heads=2, head_dim=4, vocab=13, intermediate=8, num_experts=4,
    expert_intermediate=4, dense_layers=(0,), qkv_bias=True, qk_norm=True, dtype="bfloat16",
)  # fmt: skip
LAYOUTS = {
    "hugging face": huggingface_layout(SHAPE),
    "megatron": megatron_layout(SHAPE, tp=2, pp=2, dp=2, ep=2),
    "megatron, float32": megatron_layout(SHAPE, tp=2, ep=4, dtype="float32"),
    "merged": merged_layout(SHAPE, tp=2, ep=2),
    "merged, tp above kv heads": merged_layout(SHAPE, tp=4, ep=2, num_ranks=8),
    "sharded": Layout.sharded(SHAPE.specs(), 3),
}


def buffers(layout, filling=float("nan")):
    return [
        {name: torch.full(spec.shape, filling).to(getattr(torch, spec.dtype)) for name, spec in rank.buffers.items()}
        for rank in layout.ranks
    ]


def whole_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(spec.shape, generator=generator).bfloat16() for name, spec in SHAPE.specs().items()}


def stored_in(layout, whole):
    ranks = buffers(layout)
    execute(reshard_plan(Layout.replicated(SHAPE.specs(), 1), layout), [whole], ranks)
    return ranks


def manifest(layout, ranks, version=7):
    return merge_manifests(
        manifest_of(layout, rank, tensors, policy_version=version) for rank, tensors in enumerate(ranks)
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_equal_weights_verify_in_every_layout(name):
    whole = whole_weights()
    reference = manifest(LAYOUTS["hugging face"], stored_in(LAYOUTS["hugging face"], whole))
    served = manifest(LAYOUTS[name], stored_in(LAYOUTS[name], whole))
    verify(reference, served)
    verify(served, unpack(pack(reference)))
    for tensor, spec in SHAPE.specs().items():
        assert served.digest_of(tensor) == tensor_digest(whole[tensor], box=spec.whole, spec=spec)
        assert served.num_elements_of(tensor) == whole[tensor].numel()


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_changed_bit_on_one_rank_is_named(name):
    layout, whole = LAYOUTS[name], whole_weights()
    expected = manifest(layout, stored_in(layout, whole))
    ranks = stored_in(layout, whole)
    block = [block for block in layout.ranks[-1].blocks if block.box.num_elements][-1]
    element = ranks[-1][block.buffer].view(-1)[block.offset : block.offset + 1]
    element.view(torch.uint8)[-1] ^= 0x80  # the sign
    with pytest.raises(WeightMismatchError) as caught:
        verify(expected, manifest(layout, ranks))  # replicas already differ when they meet
    assert caught.value.tensors == (block.name,)


def test_padding_does_not_count():
    layout, whole = LAYOUTS["megatron"], whole_weights()
    ranks = buffers(layout, filling=3.0)
    execute(reshard_plan(Layout.replicated(SHAPE.specs(), 1), layout), [whole], ranks)
    verify(manifest(layout, stored_in(layout, whole)), manifest(layout, ranks))


def test_another_version():
    layout, whole = LAYOUTS["merged"], whole_weights()
    ranks = stored_in(layout, whole)
    with pytest.raises(WeightMismatchError, match="version 6 is served, version 7 is expected") as caught:
        verify(manifest(layout, ranks, 7), manifest(layout, ranks, 6))
    assert (caught.value.expected_version, caught.value.found_version) == (7, 6)
    mixed = [manifest_of(layout, rank, ranks[rank], policy_version=version) for rank, version in ((0, 6), (1, 7))]
    with pytest.raises(WeightMismatchError, match=r"different versions: \[6, 7\]"):
        merge_manifests(mixed)


def test_each_kind_of_mistake_is_named_as_what_it_is():
    layout = LAYOUTS["sharded"]
    expected = manifest(layout, stored_in(layout, whole_weights()))
    names = list(expected.boxes)
    boxes = dict(manifest(layout, stored_in(layout, whole_weights())).boxes)
    del boxes[names[0]]
    boxes["extra"] = boxes[names[1]]
    boxes[names[2]] = boxes[names[2]][:-1]
    boxes[names[3]] = (replace(boxes[names[3]][0], digest=1), *boxes[names[3]][1:])
    with pytest.raises(WeightMismatchError) as caught:
        verify(expected, replace(expected, boxes=boxes))
    text = str(caught.value)
    assert "version 7 must not be served" in text
    for what, name in zip(("missing", "incomplete", "different"), (names[0], names[2], names[3]), strict=True):
        assert f"{what}: {name}" in text
    assert "not expected: extra" in text
    assert caught.value.tensors == tuple(sorted([names[0], names[2], names[3], "extra"]))


def test_what_cannot_be_digested_is_refused():
    specs = {"w": TensorSpec((4, 2), "float32")}
    layout = Layout.sharded(specs, 2)
    with pytest.raises(LayoutError, match="w: rank 1 has no such tensor"):
        manifest_of(layout, 1, {}, policy_version=0)
    with pytest.raises(LayoutError, match=r"rank 1: w: has the shape \(1, 2\)"):
        manifest_of(layout, 1, {"w": torch.ones(1, 2)}, policy_version=0)
    with pytest.raises(LayoutError, match="rank 1: w: not contiguous"):
        manifest_of(layout, 1, {"w": torch.ones(2, 2).t()}, policy_version=0)
    with pytest.raises(LayoutError, match="rank 2 of a layout with 2 ranks"):
        manifest_of(layout, 2, {}, policy_version=0)


# --- tensors beside the layout, and manifests beside the merged ones --------------------------------------------------


def test_a_tensor_beside_the_layout_is_neither_ignored_nor_attested():
    layout = LAYOUTS["megatron"]
    ranks = stored_in(layout, whole_weights())
    ranks[0]["decoder.layers.0.mlp.shared_experts.linear_fc1.weight"] = torch.ones(2, 2)
    with pytest.raises(LayoutError, match=r"rank 0 has 1 tensor .*shared_experts\.linear_fc1\.weight float32 \[2, 2\]"):
        manifest_of(layout, 0, ranks[0], policy_version=7)


def manifest_leaving_out(layout, ranks, leave_out):
    parts = [manifest_of(layout, r, each, policy_version=7, leave_out=leave_out) for r, each in enumerate(ranks)]
    return merge_manifests(parts)


def test_what_is_named_is_left_out_of_a_manifest_which_tells_of_it():
    layout, whole = LAYOUTS["sharded"], whole_weights()
    reference, ranks = manifest(layout, stored_in(layout, whole)), stored_in(layout, whole)
    ranks[2]["mtp.norm"] = torch.ones(3)  # one stage alone has it, and all ranks name it
    served = manifest_leaving_out(layout, ranks, ["mtp.*"])
    assert served.left_out == {"mtp.*": ("mtp.norm",)}
    verify(reference, unpack(pack(served)))
    with pytest.raises(
        LayoutError, match=r"leave_out: 'lm_head\*' matches lm_head\.weight, which the layout of rank 0"
    ):
        manifest_of(layout, 0, ranks[0], policy_version=7, leave_out=["lm_head*"])


def test_a_pattern_that_left_nothing_out_on_any_rank_is_refused():
    layout, whole = LAYOUTS["sharded"], whole_weights()
    served = manifest_leaving_out(layout, stored_in(layout, whole), ["mtp.*"])
    with pytest.raises(LayoutError, match=r"leave_out: 'mtp\.\*' matches no tensor of the ranks of what is served"):
        verify(manifest(layout, stored_in(layout, whole)), served)


def test_a_rank_that_was_forgotten_on_both_sides_is_missed():
    layout = LAYOUTS["megatron"]
    ranks = stored_in(layout, whole_weights())
    first_stage = manifest(layout, ranks[:4])
    with pytest.raises(WeightMismatchError, match=r"not all there in what is expected .merge the .*lm_head\.weight"):
        verify(first_stage, first_stage)
    specs = SHAPE.specs()
    del specs["lm_head.weight"]
    other = Layout.replicated(specs, 1)
    tensors = {name: torch.zeros(spec.shape, dtype=torch.bfloat16) for name, spec in specs.items()}
    with pytest.raises(LayoutError, match=r"manifests of layouts with different tensors: lm_head\.weight"):
        merge_manifests([first_stage, manifest_of(other, 0, tensors, policy_version=7)])


def test_boxes_that_overlap_are_refused():
    specs = {"w": TensorSpec((4,), "float32")}

    def rank(start, length):
        block = Block("w", Box((start,), (length,)), "w", 0, (1,))
        return RankLayout({"w": BufferSpec((length,), "float32")}, (block,))

    layout = Layout(specs, (rank(0, 3), rank(2, 2)))
    parts = [manifest_of(layout, 0, {"w": torch.ones(3)}, policy_version=0)]
    parts.append(manifest_of(layout, 1, {"w": torch.ones(2)}, policy_version=0))
    with pytest.raises(LayoutError, match=r"w: ranks store the boxes \(0,\) \(3,\) and \(2,\) \(2,\), which overlap"):
        merge_manifests(parts)


# --- an engine that stores less than the canonical dtype --------------------------------------------------------------

WIDE = replace(SHAPE, dtype="float32")
NARROW = merged_layout(WIDE, tp=2, ep=2, dtype="bfloat16")


def trained_and_served():
    """(manifests' arguments of a float32 trainer, those of the bfloat16 engine that it feeds)"""
    trainer = megatron_layout(WIDE, tp=2, pp=2, dp=2, ep=2)
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(spec.shape, generator=generator) for name, spec in WIDE.specs().items()}
    whole["model.norm.weight"][:3] = torch.tensor([float("nan"), -0.0, 1e-40])
    sources, served = buffers(trainer), buffers(NARROW)
    execute(reshard_plan(Layout.replicated(WIDE.specs(), 1), trainer), [whole], sources)
    execute(reshard_plan(trainer, NARROW), sources, served)
    return (trainer, sources), (NARROW, served)


def manifest_as(layout, ranks, served_by):
    parts = [manifest_of(layout, rank, each, policy_version=7, served_by=served_by) for rank, each in enumerate(ranks)]
    return merge_manifests(parts)


def test_a_narrower_engine_is_compared_in_its_own_dtypes():
    trained, served = trained_and_served()
    expected, actual = manifest_as(*trained, NARROW), manifest_as(*served, NARROW)
    verify(expected, unpack(pack(actual)))
    name = "model.layers.1.self_attn.k_proj.weight"
    block = next(block for block in NARROW.ranks[-1].blocks if block.name == name)
    served[1][-1][block.buffer].view(-1)[block.offset] += 1
    with pytest.raises(WeightMismatchError, match=f"different: {name}"):
        verify(expected, manifest_as(*served, NARROW))


def test_a_narrower_engine_that_is_compared_in_the_canonical_dtype_is_told_how_to():
    trained, served = trained_and_served()
    expected = manifest_as(*trained, None)
    with pytest.raises(WeightMismatchError, match=r"but served as bfloat16 and compared as float32 \(.*served_by"):
        verify(expected, manifest_as(*served, None))
    with pytest.raises(WeightMismatchError, match=r"in different dtypes \(give .* same served_by\): lm_head"):
        verify(expected, manifest_as(*served, NARROW))


def test_an_engine_that_stores_a_tensor_in_two_dtypes_cannot_be_the_measure():
    specs = {"w": TensorSpec((4,), "float32")}

    def rank(start, dtype):
        block = Block("w", Box((start,), (2,)), "w", 0, (1,))
        return RankLayout({"w": BufferSpec((2,), dtype)}, (block,))

    mixed = Layout(specs, (rank(0, "float32"), rank(2, "bfloat16")))
    with pytest.raises(LayoutError, match="w: stored as bfloat16, float32; in one dtype"):
        manifest_of(mixed, 0, {"w": torch.ones(2)}, policy_version=0, served_by=mixed)
