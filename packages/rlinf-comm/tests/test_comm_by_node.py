"""Weights that cross to a node once: the two plans do together what the one does, with each byte once on the way."""

import pytest
import torch

from rlinf_comm.weights import (
    BufferSpec,
    Layout,
    RankLayout,
    TensorSpec,
    crossing_plan,
    execute,
    reshard_plan,
    spread_plan,
)
from rlinf_comm.weights.layout import Block, Box
from rlinf_comm.weights.layouts import TransformerShape, merged_layout

SHAPE = TransformerShape(
    num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, vocab=24, intermediate=32, tied_embeddings=True
)  # fmt: skip
SPECS = SHAPE.specs()
ENGINES = Layout(SPECS, merged_layout(SHAPE, tp=2).ranks * 2)
"""Two replicas of two ranks."""
SMALL = {"a": TensorSpec((6, 4), "float32"), "b": TensorSpec((5,), "float32")}
CASES = {
    "engines": (Layout.sharded(SPECS, 2), ENGINES),
    "replicas train": (Layout.replicated(SPECS, 3), ENGINES),
    "cast": (Layout.sharded(SPECS, 2, dtype="float32"), ENGINES),
    "cut in other ways": (
        Layout.sharded(SMALL, 2),
        Layout.of_boxes(SMALL, [{"a": Box((0, 0), (6, 4))}, {"a": Box((1, 1), (4, 2)), "b": Box((0,), (5,))}]),
    ),
    "two dtypes": (
        Layout.replicated(SMALL, 1),
        Layout(SMALL, (*Layout.replicated(SMALL, 1).ranks, *Layout.replicated(SMALL, 1, dtype="bfloat16").ranks)),
    ),
}


def tensors(buffers, filling=None):
    """A rank's buffers, with random values or one value."""
    dtypes = {name: getattr(torch, spec.dtype) for name, spec in buffers.items()}
    if filling is None:
        return {name: torch.randn(spec.shape).to(dtypes[name]) for name, spec in buffers.items()}
    return {name: torch.full(spec.shape, filling, dtype=dtypes[name]) for name, spec in buffers.items()}


def moved(reshard, sources):
    destinations = [tensors(buffers, -1.0) for buffers in reshard.dst_buffers]
    execute(reshard, sources, destinations)
    return destinations


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spreads", [False, True])
def test_over_its_node_each_rank_gets_what_it_gets_directly(case, spreads):
    source, target = CASES[case]
    reshard = reshard_plan(source, target)
    nodes = [7 - 4 * (spreads and rank % 2) for rank in range(target.num_ranks)]
    sources = [tensors(rank.buffers) for rank in source.ranks]
    if source.num_ranks == 3:
        sources = [sources[0]] * 3
    expected = moved(reshard, sources)
    on_nodes = moved(crossing_plan(reshard, nodes), sources)
    assert len(on_nodes) == len(set(nodes))
    for number, node in enumerate(sorted(set(nodes))):
        ranks = [rank for rank, its in enumerate(nodes) if its == node]
        for rank, served in zip(ranks, moved(spread_plan(reshard, nodes, node), [on_nodes[number]]), strict=True):
            for name, tensor in served.items():
                assert torch.equal(tensor, expected[rank][name]), f"{name} of rank {rank}"


def test_each_byte_crosses_once_for_each_node():
    reshard = reshard_plan(Layout.sharded(SPECS, 2), ENGINES)
    once = sum(spec.num_bytes for spec in SPECS.values())
    norms = reshard.num_bytes // 2 - once
    assert norms > 0, "each rank of a replica has the norms"
    assert reshard.num_bytes == 2 * (once + norms), "directly, each replica takes its own"
    assert crossing_plan(reshard, [1, 1, 1, 1]).num_bytes == once
    assert crossing_plan(reshard, [1, 1, 2, 2]).num_bytes == 2 * once
    of_each = crossing_plan(reshard, [1, 2, 1, 2])
    assert of_each.num_bytes == once + norms == of_each.min_num_bytes


def test_plans_differ_with_the_nodes():
    reshard = reshard_plan(*CASES["engines"])
    digests = {crossing_plan(reshard, nodes).digest for nodes in ([1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 1, 2])}
    digests |= {spread_plan(reshard, [1, 1, 2, 2], node).digest for node in (1, 2)}
    assert len(digests | {reshard.digest}) == 6
    assert crossing_plan(reshard, [1, 1, 2, 2]) == crossing_plan(reshard_plan(*CASES["engines"]), [1, 1, 2, 2])


PAIR = {"a": TensorSpec((4,), "float32"), "b": TensorSpec((4,), "float32")}
WHOLE = Box((0,), (4,))
TIED = RankLayout(
    {"x": BufferSpec((4,), "float32")}, (Block("a", WHOLE, "x", 0, (1,)), Block("b", WHOLE, "x", 0, (1,)))
)
"""Both names are one memory."""


def test_tied_tensors_cross_once_and_are_compared_on_both_ways():
    reshard = reshard_plan(Layout.replicated(PAIR, 1), Layout(PAIR, (TIED, TIED)))
    for node_plan in (crossing_plan(reshard, [0, 0]), spread_plan(reshard, [0, 0], 0)):
        assert [list(PAIR)[tensor] for tensor in node_plan.table.tensor[node_plan.table.tied].tolist()] == [
            "b"
        ] * node_plan.num_dst_ranks
    assert crossing_plan(reshard, [0, 0]).num_bytes == 16


def test_a_tensor_that_is_tied_on_one_rank_alone_has_room_of_its_own():
    reshard = reshard_plan(Layout.replicated(PAIR, 1), Layout(PAIR, (TIED, *Layout.replicated(PAIR, 1).ranks)))
    assert crossing_plan(reshard, [0, 0]).num_bytes == 32
    assert crossing_plan(reshard, [0, 1]).num_bytes == 16 + 32
