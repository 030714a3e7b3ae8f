"""rlinf_comm.weights.plan against brute force: every destination element exactly once, from a rank that has it."""

import sys

import numpy as np
import pytest
import torch
from comm_properties import holds_for
from hypothesis import given, settings, strategies as st

from rlinf_comm import LayoutError, pack, unpack
from rlinf_comm.copies import COPY_DTYPES
from rlinf_comm.testing import assert_bitwise_equal, execute_copies
from rlinf_comm.weights import Block, Box, BufferSpec, Layout, Piece, RankLayout, TensorSpec, reshard_plan
from rlinf_comm.weights.layouts import TransformerShape, megatron_layout, merged_layout


@st.composite
def specs_strategy(draw):
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    return {f"t{index}": TensorSpec(draw(shapes), "float32") for index in range(draw(st.integers(1, 3)))}


@st.composite
def layouts(draw, specs, *, complete):
    """Random boxes on random ranks, overlapping or not; with `complete`, all of each tensor is somewhere."""
    num_ranks = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["replicated", "sharded", "random"]))
    if kind == "replicated":
        return Layout.replicated(specs, num_ranks)
    if kind == "sharded":
        return Layout.sharded(specs, num_ranks, dim=draw(st.integers(0, 2)))
    ranks: list[dict[str, Box]] = [{} for _ in range(num_ranks)]
    for name, spec in specs.items():
        whole_rank = draw(st.integers(0, num_ranks - 1)) if complete else -1
        for rank in range(num_ranks):
            if rank == whole_rank:
                ranks[rank][name] = spec.whole
            elif draw(st.booleans()):
                start = tuple(draw(st.integers(0, size)) for size in spec.shape)
                shape = tuple(draw(st.integers(0, size - at)) for size, at in zip(spec.shape, start, strict=True))
                ranks[rank][name] = Box(start, shape)
    return Layout.of_boxes(specs, ranks)


def slices(box: Box, origin: tuple[int, ...] | None = None):
    origin = origin or (0,) * len(box.start)
    return tuple(
        slice(at - zero, at - zero + length) for at, zero, length in zip(box.start, origin, box.shape, strict=True)
    )


@settings(max_examples=200)
@given(st.data())
def test_every_destination_element_arrives_once_from_a_rank_that_has_it(data):
    specs = data.draw(specs_strategy())
    src = data.draw(layouts(specs, complete=True))
    dst = data.draw(layouts(specs, complete=False))
    reshard = reshard_plan(src, dst)
    stored = [{block.name: block.box for block in rank.blocks} for rank in src.ranks]
    counts = [{block.name: np.zeros(block.box.shape, int) for block in rank.blocks} for rank in dst.ranks]
    for move in reshard.moves:
        assert stored[move.src_rank][move.name].intersect(move.box) == move.box, "the source rank does not store it"
        target = {block.name: block.box for block in dst.ranks[move.dst_rank].blocks}[move.name]
        assert target.intersect(move.box) == move.box, "the destination rank did not ask for it"
        counts[move.dst_rank][move.name][slices(move.box, target.start)] += 1
    for rank_counts in counts:
        for name, count in rank_counts.items():
            assert (count == 1).all(), name
    num_bytes = sum(4 * block.box.num_elements for rank in dst.ranks for block in rank.blocks)
    assert reshard.num_bytes == reshard.min_num_bytes == sum(reshard.bytes_by_pair.values()) == num_bytes


def test_replicas_share_the_load():
    specs = {f"layer{index}": TensorSpec((300, 70), "float32") for index in range(5)}
    specs["bias"] = TensorSpec((70,), "float32")
    for num_sources in (2, 3, 4):
        for dst in (Layout.replicated(specs, 3), Layout.sharded(specs, 2), Layout.sharded(specs, 2, dim=1)):
            reshard = reshard_plan(Layout.replicated(specs, num_sources), dst)
            handed_out = [0] * num_sources
            for piece in reshard.pieces:
                handed_out[piece.src_rank] += 4 * piece.box.num_elements
            assert min(handed_out) > 0.95 * max(handed_out), (num_sources, handed_out)


def test_many_small_tensors_are_shared_out_too():
    specs = {f"bias{index}": TensorSpec((10,), "float32") for index in range(40)}
    reshard = reshard_plan(Layout.replicated(specs, 4), Layout.replicated(specs, 1))
    assert reshard.bytes_by_pair == {(rank, 0): 400 for rank in range(4)}


def test_a_piece_is_handed_out_once_for_all_replicas():
    specs = {"w": TensorSpec((4, 4), "float32")}
    reshard = reshard_plan(Layout.sharded(specs, 2), Layout.replicated(specs, 3))
    assert reshard.pieces == (
        Piece("w", Box((0, 0), (2, 4)), 0, "float32"),
        Piece("w", Box((2, 0), (2, 4)), 1, "float32"),
    )
    assert reshard.num_bytes == 3 * 64


def test_tensor_parallel_down_and_up():
    specs = {"w": TensorSpec((8, 8), "bfloat16")}
    down = reshard_plan(Layout.sharded(specs, 4), Layout.sharded(specs, 2))
    assert down.bytes_by_pair == {(0, 0): 32, (1, 0): 32, (2, 1): 32, (3, 1): 32}
    across = reshard_plan(Layout.sharded(specs, 2), Layout.sharded(specs, 2, dim=1))
    assert across.bytes_by_pair == {(src, dst): 32 for src in range(2) for dst in range(2)}


def test_equal_layouts_give_equal_plans_and_others_do_not():
    specs = {"b": TensorSpec((4,), "float32"), "a": TensorSpec((8, 2), "float32")}
    swapped = dict(reversed(specs.items()))
    first = reshard_plan(Layout.sharded(specs, 2), Layout.replicated(specs, 2))
    assert reshard_plan(Layout.sharded(specs, 2), Layout.replicated(specs, 2)).digest == first.digest
    assert reshard_plan(Layout.sharded(specs, 2), Layout.replicated(specs, 1)).digest != first.digest
    assert reshard_plan(Layout.sharded(specs, 1), Layout.replicated(specs, 2)).digest != first.digest
    assert reshard_plan(Layout.replicated(swapped, 1), Layout.replicated(swapped, 1)).moves == (
        reshard_plan(Layout.replicated(specs, 1), Layout.replicated(specs, 1)).moves
    )
    assert len(first.digest) == 64
    copy = unpack(pack(first))
    assert copy == first
    assert copy.moves == first.moves
    assert copy.bytes_by_pair == first.bytes_by_pair


# --- copies -----------------------------------------------------------------------------------------------------------


@st.composite
def fused_layouts(draw, specs, *, complete):
    """Random boxes in one buffer for each dtype and rank, in random order, with gaps and swapped dimensions."""
    ranks = []
    for rank_layout in draw(layouts(specs, complete=complete)).ranks:
        sizes, blocks = {"float32": 0, "bfloat16": 0}, []
        for block in draw(st.permutations(rank_layout.blocks)):
            dtype = draw(st.sampled_from(list(sizes)))
            order = draw(st.permutations(range(len(block.box.shape))))
            strides, reach = [0] * len(order), 1
            for dim in order:
                strides[dim] = reach
                reach *= max(block.box.shape[dim], 1)
            offset = sizes[dtype] + draw(st.integers(0, 2))
            sizes[dtype] = offset + reach
            blocks.append(Block(block.name, block.box, dtype, offset, tuple(strides)))
        buffers = {dtype: BufferSpec((size,), dtype) for dtype, size in sizes.items()}
        ranks.append(RankLayout(buffers, tuple(blocks)))
    return Layout(specs, tuple(ranks))


def numbers(specs):
    """Small integers, which bfloat16 holds exactly."""
    return {name: np.arange(np.prod(spec.shape, dtype=int)).reshape(spec.shape) % 251 for name, spec in specs.items()}


def stored(rank, full):
    """The buffers of a rank, element by element; -1 where nothing is stored."""
    flat = {name: torch.full(buffer.shape, -1.0) for name, buffer in rank.buffers.items()}
    for block in rank.blocks:
        for index in np.ndindex(*block.box.shape):
            at = block.offset + sum(i * by for i, by in zip(index, block.strides, strict=True))
            flat[block.buffer][at] = float(full[block.name][tuple(np.add(index, block.box.start).astype(int))])
    return [tensor.to(getattr(torch, rank.buffers[name].dtype)) for name, tensor in flat.items()]


@holds_for(st.data(), num=70, num_slow=500)
def test_copies_put_every_element_in_its_place(data):
    specs = data.draw(specs_strategy())
    src = data.draw(fused_layouts(specs, complete=True))
    dst = data.draw(fused_layouts(specs, complete=False))
    full = numbers(specs)
    reshard = reshard_plan(src, dst)
    sources = [stored(rank, full) for rank in src.ranks]
    for dst_rank, rank in enumerate(dst.ranks):
        want = stored(rank, full)
        got = [torch.full_like(tensor, -1) for tensor in want]
        execute_copies(reshard.copies(dst_rank=dst_rank), [tensor for tensors in sources for tensor in tensors], got)
        assert_bitwise_equal(got, want)
        counts = [np.zeros(len(tensor), int) for tensor in want]
        for src_rank in range(src.num_ranks):
            table = reshard.copies(dst_rank=dst_rank, src_rank=src_rank)
            for row in range(len(table)):
                count, size = counts[table.dst_buffer[row]], want[table.dst_buffer[row]].itemsize
                for index in np.ndindex(*table.lengths[row]):
                    count[(table.dst_offset[row] + table.dst_strides[row] @ index) // size] += 1
        assert all(int(count.max(initial=0)) <= 1 for count in counts), "an element arrives twice"


def test_copies_that_continue_each_other_are_one():
    specs = {f"{part}{expert}": TensorSpec((4, 8), "float32") for expert in range(3) for part in ("gate", "up")}
    names = list(specs)
    blocks = tuple(Block(name, specs[name].whole, "w13", 32 * at, (8, 1)) for at, name in enumerate(names))
    experts = Layout(specs, (RankLayout({"w13": BufferSpec((3, 8, 8), "float32")}, blocks),))
    table = reshard_plan(experts, experts).copies(dst_rank=0)
    assert (len(table), table.lengths.tolist()) == (1, [[6 * 32]])
    columns = Layout.sharded(specs, 2, dim=1)
    table = reshard_plan(experts, columns).copies(dst_rank=1, src_rank=0)
    assert len(table) == 6
    assert table.lengths.tolist() == [[4, 4]] * 6
    assert table.src_strides.tolist() == [[32, 4]] * 6
    assert table.src_offset.tolist() == [16 + 128 * at for at in range(6)]
    halves = tuple(Block(name, specs[name].whole, "w13", 8 * at, (48, 1)) for at, name in enumerate(names))
    rows = Layout(specs, (RankLayout({"w13": BufferSpec((4, 6, 8), "float32")}, halves),))
    table = reshard_plan(rows, rows).copies(dst_rank=0)
    assert (len(table), table.lengths.tolist()) == (1, [[6 * 32]])


def test_copies_name_dtypes_and_count_buffers_by_name():
    specs = {"a": TensorSpec((4,), "bfloat16"), "n": TensorSpec((2,), "int64")}
    src = Layout(specs, Layout.replicated(specs, 1, dtype="float32").ranks + Layout.of_boxes(specs, [{}]).ranks)
    table = reshard_plan(src, Layout.replicated(specs, 1, dtype="float16")).copies(dst_rank=0)
    assert [COPY_DTYPES[code] for code in table.src_dtype] == ["float32", "bytes8"]
    assert [COPY_DTYPES[code] for code in table.dst_dtype] == ["float16", "bytes8"]
    assert table.src_buffer.tolist() == table.dst_buffer.tolist() == [0, 1]
    assert np.array_equal(np.asarray(table.src_bytes), [16, 16])
    assert np.array_equal(np.asarray(table.dst_bytes), [8, 16])
    with pytest.raises(LayoutError, match="no copies from source rank 2 to destination rank 0"):
        reshard_plan(src, Layout.replicated(specs, 1)).copies(dst_rank=0, src_rank=2)


def test_tied_memory_is_copied_once_and_counted_once():
    specs = {name: TensorSpec((3, 2), "float32") for name in ("embed", "head")}
    blocks = tuple(Block(name, specs[name].whole, "embed", 0, (2, 1)) for name in specs)
    tied = Layout(specs, (RankLayout({"embed": BufferSpec((3, 2), "float32")}, blocks),))
    reshard = reshard_plan(Layout.replicated(specs, 1), tied)
    assert len(reshard.copies(dst_rank=0)) == 1
    assert reshard.num_bytes == reshard.min_num_bytes == 24
    assert [move.name for move in reshard.moves] == ["embed", "head"], "both are attested"
    assert reshard_plan(tied, Layout.replicated(specs, 1)).num_bytes == 48


# --- what a plan says of itself ---------------------------------------------------------------------------------------


def test_casts_are_counted_in_the_bytes_that_arrive():
    specs = {"w": TensorSpec((8, 8), "float32")}
    reshard = reshard_plan(Layout.replicated(specs, 1), Layout.replicated(specs, 2, dtype="bfloat16"))
    assert reshard.num_bytes == reshard.min_num_bytes == 2 * 128


def test_plans_are_kept_and_the_oldest_given_up():
    specs = {"w": TensorSpec((64, 64), "float32")}

    def make(num_ranks):
        return reshard_plan(Layout.sharded(specs, 2), Layout.sharded(specs, num_ranks))

    first = make(1)
    assert make(1) is first
    for num_ranks in range(2, 12):
        make(num_ranks)
    assert make(1) is not first
    assert make(1) == first


def test_a_large_model_is_planned_in_few_calls():
    """18,867 tensors, 40,000 blocks: the calls of Python and C functions, which do not depend on the machine's load."""
    shape = TransformerShape(
        num_layers=48, hidden=2048, num_heads=32, num_kv_heads=4, head_dim=128, vocab=151936, num_experts=128,
        expert_intermediate=768, qk_norm=True,
    )  # fmt: skip
    src, dst = megatron_layout(shape, tp=4, pp=2, ep=8), merged_layout(shape, tp=2, ep=4)
    num_calls = 0

    def count(*_):
        nonlocal num_calls
        num_calls += 1

    _ = src.digest, dst.digest
    sys.setprofile(count)
    try:
        reshard = reshard_plan(src, dst)
    finally:
        sys.setprofile(None)
    assert num_calls < 8 * len(src.specs)
    assert reshard.num_bytes == reshard.min_num_bytes
    sent = [sum(n for (rank, _), n in reshard.bytes_by_pair.items() if rank == src_rank) for src_rank in range(16)]
    assert max(sent) < 1.02 * sum(sent) / 16, "the replicas of attention do not share the load"


W, B = TensorSpec((4, 4), "float32"), TensorSpec((4,), "float32")


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ({"w": W}, {"w": W, "b": B}, "b: the destination has this tensor, the source does not"),
        ({"w": W, "b": B}, {"w": W}, "b: the source has this tensor, the destination does not"),
        ({"w": W}, {"w": TensorSpec((4, 5), "float32")}, r"w: the shape is \(4, 4\) at the source and \(4, 5\)"),
        ({"w": W}, {"w": TensorSpec((4, 4), "bfloat16")}, "w: the dtype is float32 at the source and bfloat16"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(src, dst, message):
    with pytest.raises(LayoutError, match=message):
        reshard_plan(Layout.replicated(src, 1), Layout.replicated(dst, 2))


def test_uncovered_boxes_are_refused():
    src = Layout.of_boxes({"w": W}, [{"w": Box((0, 0), (4, 2))}, {"w": Box((0, 2), (3, 2))}])
    with pytest.raises(
        LayoutError, match=r"w: destination rank 1 needs \[2:4, 0:4\], but no source rank stores \[3:4, 2:4\]"
    ):
        reshard_plan(src, Layout.sharded({"w": W}, 2))
