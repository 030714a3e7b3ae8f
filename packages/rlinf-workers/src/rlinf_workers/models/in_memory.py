"""Canonical tensors in the memory of a transformers model: some separate, some stacked with others."""

from __future__ import annotations

from dataclasses import replace

from rlinf_comm.weights import Block, Box, Layout, RankLayout, TensorSpec


def box_in(block: Block, box: Box, shape: tuple[int, ...]) -> Box:
    """The place of a box of a canonical tensor in a buffer of this shape that contains the tensor whole, possibly
    stacked."""
    offset = block.offset + sum(first * stride for first, stride in zip(box.start, block.strides, strict=True))
    start = []
    for size in reversed(shape):
        offset, first = divmod(offset, size)
        start.append(first)
    return Box(tuple(reversed(start)), (1,) * (len(shape) - len(box.shape)) + box.shape)


def renamed(layout: Layout, whole: Layout) -> Layout:
    """Converts a layout of canonical tensors to one of the buffers that contain them, such as stacks of experts."""
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
