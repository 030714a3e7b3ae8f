"""rlinf_comm.weights.plan against brute force: every destination element exactly once, from a rank that has it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_comm import LayoutError, pack, unpack
from rlinf_comm.weights import Box, Layout, Piece, TensorSpec, plan


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


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_every_destination_element_arrives_once_from_a_rank_that_has_it(data):
    specs = data.draw(specs_strategy())
    src = data.draw(layouts(specs, complete=True))
    dst = data.draw(layouts(specs, complete=False))
    reshard = plan(src, dst)
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
            reshard = plan(Layout.replicated(specs, num_sources), dst)
            handed_out = [0] * num_sources
            for piece in reshard.pieces:
                handed_out[piece.src_rank] += 4 * piece.box.num_elements
            assert min(handed_out) > 0.95 * max(handed_out), (num_sources, handed_out)


def test_many_small_tensors_are_shared_out_too():
    specs = {f"bias{index}": TensorSpec((10,), "float32") for index in range(40)}
    reshard = plan(Layout.replicated(specs, 4), Layout.replicated(specs, 1))
    assert reshard.bytes_by_pair == {(rank, 0): 400 for rank in range(4)}


def test_a_piece_is_handed_out_once_for_all_replicas():
    specs = {"w": TensorSpec((4, 4), "float32")}
    reshard = plan(Layout.sharded(specs, 2), Layout.replicated(specs, 3))
    assert reshard.pieces == (
        Piece("w", Box((0, 0), (2, 4)), 0, "float32"),
        Piece("w", Box((2, 0), (2, 4)), 1, "float32"),
    )
    assert reshard.num_bytes == 3 * 64


def test_tensor_parallel_down_and_up():
    specs = {"w": TensorSpec((8, 8), "bfloat16")}
    down = plan(Layout.sharded(specs, 4), Layout.sharded(specs, 2))
    assert down.bytes_by_pair == {(0, 0): 32, (1, 0): 32, (2, 1): 32, (3, 1): 32}
    across = plan(Layout.sharded(specs, 2), Layout.sharded(specs, 2, dim=1))
    assert across.bytes_by_pair == {(src, dst): 32 for src in range(2) for dst in range(2)}


def test_equal_layouts_give_equal_plans_and_others_do_not():
    specs = {"b": TensorSpec((4,), "float32"), "a": TensorSpec((8, 2), "float32")}
    swapped = dict(reversed(specs.items()))
    first = plan(Layout.sharded(specs, 2), Layout.replicated(specs, 2))
    assert plan(Layout.sharded(specs, 2), Layout.replicated(specs, 2)).digest == first.digest
    assert plan(Layout.sharded(specs, 2), Layout.replicated(specs, 1)).digest != first.digest
    assert plan(Layout.sharded(specs, 1), Layout.replicated(specs, 2)).digest != first.digest
    assert plan(Layout.replicated(swapped, 1), Layout.replicated(swapped, 1)).moves == (
        plan(Layout.replicated(specs, 1), Layout.replicated(specs, 1)).moves
    )
    assert len(first.digest) == 64
    copy = unpack(pack(first))
    assert copy == first
    assert copy.moves == first.moves
    assert copy.bytes_by_pair == first.bytes_by_pair


W, B = TensorSpec((4, 4), "float32"), TensorSpec((4,), "float32")


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ({"w": W}, {"w": W, "b": B}, "b: the destination has this tensor, the source has not"),
        ({"w": W, "b": B}, {"w": W}, "b: the source has this tensor, the destination has not"),
        ({"w": W}, {"w": TensorSpec((4, 5), "float32")}, r"w: the shape is \(4, 4\) at the source and \(4, 5\)"),
        ({"w": W}, {"w": TensorSpec((4, 4), "bfloat16")}, "w: the dtype is float32 at the source and bfloat16"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(src, dst, message):
    with pytest.raises(LayoutError, match=message):
        plan(Layout.replicated(src, 1), Layout.replicated(dst, 2))


def test_uncovered_boxes_are_refused():
    src = Layout.of_boxes({"w": W}, [{"w": Box((0, 0), (4, 2))}, {"w": Box((0, 2), (3, 2))}])
    with pytest.raises(
        LayoutError, match=r"w: destination rank 1 needs \[2:4, 0:4\], but no source rank stores \[3:4, 2:4\]"
    ):
        plan(src, Layout.sharded({"w": W}, 2))
