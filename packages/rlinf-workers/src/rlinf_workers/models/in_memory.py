"""Canonical tensors as a model of transformers has them in memory: some whole, some in a stack with others."""

from __future__ import annotations

from dataclasses import replace

from rlinf_comm.weights import Block, Box, Layout, RankLayout, TensorSpec


def box_in(block: Block, box: Box, shape: tuple[int, ...]) -> Box:
    """Where a box of a canonical tensor lies in a buffer of this shape that has it whole, perhaps in a stack."""
    offset = block.offset + sum(first * stride for first, stride in zip(box.start, block.strides, strict=True))
    start = []
    for size in reversed(shape):
        offset, first = divmod(offset, size)
        start.append(first)
    return Box(tuple(reversed(start)), (1,) * (len(shape) - len(box.shape)) + box.shape)


def renamed(layout: Layout, whole: Layout) -> Layout:
    """A layout of canonical tensors as one of the buffers that a rank has them whole in: of a stack of experts, say."""
    (rank,) = whole.ranks
    places = {block.name: block for block in rank.blocks}
    dtypes = {places[name].buffer: spec.dtype for name, spec in layout.specs.items()}
    specs = {name: TensorSpec(buffer.shape, dtypes[name]) for name, buffer in rank.buffers.items()}

    def moved(block: Block) -> Block:
        place = places[block.name]
        box = box_in(place, block.box, specs[place.buffer].shape)
        strides = (1,) * (len(box.shape) - len(block.strides)) + block.strides
        return replace(block, name=place.buffer, box=box, strides=strides)

    ranks = (RankLayout(one.buffers, tuple(moved(block) for block in one.blocks)) for one in layout.ranks)
    return Layout(specs, tuple(ranks))
