"""rlinf_comm.weights.layout: boxes and the layouts that are made of them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_comm import LayoutError, pack, unpack
from rlinf_comm.weights import Block, Box, Layout, TensorSpec, specs_of

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


def test_sharded_gives_the_remainder_to_the_first_ranks():
    layout = Layout.sharded(SPECS, 3)
    assert [{block.name: str(block.box) for block in blocks} for blocks in layout.ranks] == [
        {"w": "[0:2, 0:4]", "b": "[0:1]", "s": "[]"},
        {"w": "[2:4, 0:4]", "b": "[1:2]", "s": "[]"},
        {"w": "[4:5, 0:4]", "b": "[2:3]", "s": "[]"},
    ]


def test_sharded_along_another_dimension():
    layout = Layout.sharded(SPECS, 2, dim=1)
    assert [block.box for block in layout.ranks[1]] == [Box((0, 2), (5, 2)), Box((0,), (3,)), Box((), ())]
    assert Layout.sharded({"w": SPECS["w"]}, 2, dim=-1) == Layout.sharded({"w": SPECS["w"]}, 2, dim=1)


def test_ranks_past_the_dimension_store_nothing():
    layout = Layout.sharded({"b": SPECS["b"]}, 5)
    assert [len(blocks) for blocks in layout.ranks] == [1, 1, 1, 0, 0]


def test_replicated():
    layout = Layout.replicated(SPECS, 2)
    assert layout.ranks[0] == layout.ranks[1] == tuple(Block(name, spec.whole) for name, spec in SPECS.items())
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


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[Block("x", Box((0,), (1,)))]], "x: rank 0 stores it, but the layout has no such tensor"),
        (
            [[], [Block("w", Box((4, 0), (2, 4)))]],
            r"w: the box \[4:6, 0:4\] of rank 1 is not inside the shape \(5, 4\)",
        ),
        ([[Block("w", Box((0,), (5,)))]], "w: the box"),
        ([[Block("w", Box((-1, 0), (1, 1)))]], "w: the box"),
        ([[Block("b", Box((0,), (1,))), Block("b", Box((1,), (1,)))]], "b: rank 0 stores two blocks"),
        ([], "at least one rank"),
    ],
)
def test_impossible_layouts_are_refused(ranks, message):
    with pytest.raises(LayoutError, match=message):
        Layout(SPECS, tuple(map(tuple, ranks)))


def test_unknown_dtypes_are_refused():
    with pytest.raises(LayoutError, match="'float23' is unknown"):
        _ = TensorSpec((1,), "float23").num_bytes
