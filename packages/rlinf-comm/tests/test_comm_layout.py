"""rlinf_comm.weights.layout: boxes and the layouts that are made of them."""

import dataclasses
import itertools

import pytest
import torch
from comm_properties import holds_for
from hypothesis import given, strategies as st

from rlinf_comm import LayoutError, pack, unpack
from rlinf_comm.weights import Block, Box, BufferSpec, Layout, RankLayout, TensorSpec, specs_of

SPECS = {"w": TensorSpec((5, 4), "float32"), "b": TensorSpec((3,), "bfloat16"), "s": TensorSpec((), "int64")}


@st.composite
def boxes(draw, num_dims=2, size=6):
    start = tuple(draw(st.integers(0, size)) for _ in range(num_dims))
    return Box(start, tuple(draw(st.integers(0, size - first)) for first in start))


def cells(box: Box) -> set:
    ranges = (range(first, first + length) for first, length in zip(box.start, box.shape, strict=True))
    return set(itertools.product(*ranges))


@given(boxes(), boxes())
def test_intersection_and_difference_hold_the_right_cells(a, b):
    common = a.intersect(b)
    assert (cells(common) if common else set()) == cells(a) & cells(b)
    pieces = a.minus(b)
    assert sum(piece.num_elements for piece in pieces) == len(cells(a) - cells(b)), "pieces overlap"
    assert set().union(*map(cells, pieces)) == cells(a) - cells(b)


@given(boxes(num_dims=3), st.integers(0, 2), st.integers(1, 8))
def test_split_is_even_and_complete(box, dim, num_parts):
    parts = list(box.split(dim, num_parts))
    assert set().union(*map(cells, parts)) == cells(box)
    lengths = [part.shape[dim] for part in parts]
    assert sum(lengths) == box.shape[dim]
    assert lengths == sorted(lengths, reverse=True)
    assert not lengths or (max(lengths) - min(lengths) <= 1 and min(lengths) > 0)


def test_boxes_without_dimensions_hold_one_element():
    scalar = Box((), ())
    assert scalar.num_elements == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.minus(scalar) == []


def test_a_model_served_in_another_dtype_is_the_model_that_is_trained():
    trained = {"w": TensorSpec((5, 4), "float32"), "s": TensorSpec((), "int64")}
    served = {"w": TensorSpec((5, 4), "bfloat16"), "s": TensorSpec((), "int64")}
    layout = Layout.replicated(served, 2).with_dtypes_of(trained)
    assert layout.digest == Layout.replicated(trained, 2, dtype="bfloat16").digest
    with pytest.raises(LayoutError, match="s"):
        Layout.replicated({"s": TensorSpec((), "int32")}, 1).with_dtypes_of(trained)


def test_sharded_gives_the_remainder_to_the_first_ranks():
    layout = Layout.sharded(SPECS, 3)
    assert [{block.name: str(block.box) for block in rank.blocks} for rank in layout.ranks] == [
        {"w": "[0:2, 0:4]", "b": "[0:1]", "s": "[]"},
        {"w": "[2:4, 0:4]", "b": "[1:2]", "s": "[]"},
        {"w": "[4:5, 0:4]", "b": "[2:3]", "s": "[]"},
    ]


def test_sharded_along_another_dimension():
    layout = Layout.sharded(SPECS, 2, dim=1)
    assert [block.box for block in layout.ranks[1].blocks] == [Box((0, 2), (5, 2)), Box((0,), (3,)), Box((), ())]
    assert Layout.sharded({"w": SPECS["w"]}, 2, dim=-1) == Layout.sharded({"w": SPECS["w"]}, 2, dim=1)


def test_ranks_past_the_dimension_store_nothing():
    layout = Layout.sharded({"b": SPECS["b"]}, 5)
    assert [len(rank.blocks) for rank in layout.ranks] == [1, 1, 1, 0, 0]


def test_replicated():
    layout = Layout.replicated(SPECS, 2)
    assert layout.ranks[0] == layout.ranks[1]
    assert {block.name: block.box for block in layout.ranks[0].blocks} == {name: SPECS[name].whole for name in SPECS}
    assert layout.ranks[0].buffers == {name: BufferSpec(spec.shape, spec.dtype) for name, spec in SPECS.items()}
    assert layout.num_ranks == 2


def test_specs_of_a_model():
    model = torch.nn.Linear(4, 5).to(torch.bfloat16)
    specs = specs_of(dict(model.named_parameters()))
    assert specs == {"weight": TensorSpec((5, 4), "bfloat16"), "bias": TensorSpec((5,), "bfloat16")}
    assert specs["weight"].num_bytes == 40
    assert specs["weight"].index_strides == (4, 1)


def test_layouts_cross_a_channel():
    layout = Layout.sharded(SPECS, 3)
    assert unpack(pack(layout)) == layout


def test_another_dtype_of_storage_is_for_floating_point_tensors():
    buffers = Layout.sharded(SPECS, 1, dtype="float16").ranks[0].buffers
    assert {name: buffer.dtype for name, buffer in buffers.items()} == {"w": "float16", "b": "float16", "s": "int64"}


def test_equal_layouts_have_equal_digests_and_others_do_not():
    first = Layout.sharded(SPECS, 2)
    swapped = dict(reversed(SPECS.items()))
    assert Layout.sharded(swapped, 2).digest == first.digest
    backwards = Layout(SPECS, tuple(RankLayout(rank.buffers, rank.blocks[::-1]) for rank in first.ranks))
    assert backwards.digest == first.digest
    others = [
        Layout.sharded(SPECS, 3),
        Layout.sharded(SPECS, 2, dim=1),
        Layout.sharded(SPECS, 2, dtype="float16"),
        Layout(SPECS, first.ranks[::-1]),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 5


def one_rank(buffers, *blocks):
    return (RankLayout({name: BufferSpec(*spec) for name, spec in buffers.items()}, blocks),)


F32 = "float32"
W, B = {"w": ((5, 4), F32)}, {"b": ((3,), "bfloat16")}
WHOLE_W = Block("w", Box((0, 0), (5, 4)), "w", 0, (4, 1))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (one_rank(W, Block("x", Box((0,), (1,)), "w", 0, (1,))), "x: rank 0 stores it, but the layout has no such"),
        (one_rank({}, WHOLE_W), "w: rank 0 stores it in 'w', but has no such buffer"),
        (
            (RankLayout({}, ()), *one_rank(W, Block("w", Box((4, 0), (2, 4)), "w", 0, (4, 1)))),
            r"w: the box \[4:6, 0:4\] of rank 1 is not inside the shape \(5, 4\)",
        ),
        (one_rank(W, Block("w", Box((0,), (5,)), "w", 0, (1,))), "w: the box"),
        (one_rank(W, Block("w", Box((-1, 0), (1, 1)), "w", 0, (4, 1))), "w: the box"),
        (one_rank(W, Block("w", Box((0, 0), (5, 4)), "w", 0, (1,))), r"w: 1 strides of rank 0 for the shape \(5, 4\)"),
        (
            one_rank(W, Block("w", Box((0, 0), (5, 4)), "w", 1, (4, 1))),
            r"w: the box \[0:5, 0:4\] of rank 0 would lie in the elements 1 to 20 of the buffer 'w', which has 20",
        ),
        (one_rank(W, Block("w", Box((0, 0), (5, 4)), "w", 0, (-4, 1))), "in the elements -16 to 3"),
        (
            one_rank({"b": ((6,), "bfloat16")}, *(Block("b", Box((at,), (2,)), "b", 3 * at, (1,)) for at in (0, 1))),
            r"b: rank 0 stores two blocks of it that overlap, \[0:2\] and \[1:3\]",
        ),
        (one_rank({"w": ((5, 4), "int32")}, WHOLE_W), "w: is float32, and int32 in the buffer 'w' of rank 0; only"),
        (one_rank({"w": ((5, 4), "float23")}, WHOLE_W), "buffer 'w' of rank 0: no tensor has the shape"),
        (
            one_rank(W, Block("w", Box((0, 0), (5, 4)), "w", 0, (1, 1))),
            "w: the box .* overlaps with w .*in the buffer 'w'",
        ),
        (one_rank(W, Block("w", Box((0, 0), (5, 1)), "w", 0, (0, 1))), "overlaps with w"),
        (
            one_rank(
                {"f": ((8,), F32)},
                Block("w", Box((0, 0), (1, 4)), "f", 0, (4, 1)),
                Block("w", Box((1, 0), (1, 4)), "f", 3, (4, 1)),
            ),
            r"w: the box \[1:2, 0:4\] of rank 0 overlaps with w \[0:1, 0:4\] in the buffer 'f' at its element 3",
        ),
        ((), "at least one rank"),
    ],
)
def test_impossible_layouts_are_refused(ranks, message):
    with pytest.raises(LayoutError, match=message):
        Layout(SPECS, ranks)


def test_blocks_may_be_interleaved_and_tied():
    specs = {name: TensorSpec((4, 3), F32) for name in ("even", "odd", "tied")}
    whole = specs["even"].whole
    blocks = [
        Block("even", whole, "f", 0, (6, 1)),
        Block("odd", whole, "f", 3, (6, 1)),
        Block("tied", whole, "f", 3, (6, 1)),
    ]
    Layout(specs, one_rank({"f": ((8, 3), F32)}, *blocks))
    shifted = Block("tied", whole, "f", 3, (3, 1))
    with pytest.raises(LayoutError, match=r"the box .* overlaps with .* in the buffer 'f'"):
        Layout(specs, one_rank({"f": ((8, 3), F32)}, *blocks[:2], shifted))


@holds_for(st.data(), num=100, num_slow=1000)
def test_a_layout_is_refused_exactly_when_memory_or_elements_are_used_twice(data):
    specs = {name: TensorSpec((3, 3), F32) for name in "ab"}
    blocks, memory, elements = [], [], []
    for _ in range(data.draw(st.integers(1, 3))):
        start = tuple(data.draw(st.integers(0, 2)) for _ in range(2))
        shape = tuple(data.draw(st.integers(1, 3 - at)) for at in start)
        strides = tuple(data.draw(st.integers(-7, 7)) for _ in range(2))
        block = Block(data.draw(st.sampled_from("ab")), Box(start, shape), "f", data.draw(st.integers(14, 40)), strides)
        touched = sorted(
            block.offset + sum(i * by for i, by in zip(index, strides, strict=True))
            for index in itertools.product(*map(range, shape))
        )
        if any(block.name != other.name and dataclasses.replace(other, name=block.name) == block for other in blocks):
            touched = []  # tied
        blocks.append(block)
        memory += touched
        elements += [(block.name, cell) for cell in cells(block.box)]
    allowed = (
        len(set(memory)) == len(memory) and len(set(elements)) == len(elements) and 0 <= min(memory) <= max(memory) < 60
    )
    try:
        Layout(specs, one_rank({"f": ((60,), F32)}, *blocks))
    except LayoutError:
        assert not allowed
    else:
        assert allowed


def test_unknown_dtypes_are_refused():
    with pytest.raises(LayoutError, match="'float23' is unknown"):
        _ = TensorSpec((1,), "float23").num_bytes
