"""Gathers sharded tensors for files: canonical weights, and AdamW's state by the names of transformers' model in
memory."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from rlinf_comm.weights import Block, Box, Layout, RankLayout
from rlinf_workers.collectives import RankGroup
from rlinf_workers.models.weight_files import region


def inside(whole: Tensor, box: Box) -> Tensor:
    """A view of a box of a tensor."""
    return whole[tuple(slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True))]


def owned(layout: Layout, rank: int, num_ranks: int) -> dict[str, list[Block]]:
    """Canonical name -> the blocks that a rank of the first replica contributes; of a box that several ranks have, the
    first contributes it."""
    seen: set[tuple[str, Box]] = set()
    blocks: dict[str, list[Block]] = {}
    for number in range(num_ranks):
        for block in layout.ranks[number].blocks:
            key = block.name, block.box
            if key not in seen:
                seen.add(key)
                if number == rank:
                    blocks.setdefault(block.name, []).append(block)
    return blocks


def gathered(shape: tuple[int, ...], mine: list[tuple[Box, Tensor]], ranks: RankGroup, dtype: torch.dtype) -> Tensor:
    """Gathers a whole tensor in host memory, on each of the ranks.

    Args:
        mine: the boxes that this rank contributes; the ranks' boxes are disjoint.
    """
    whole = torch.zeros(shape, dtype=dtype)
    for box, shard in mine:
        inside(whole, box).copy_(shard)
    ranks.sum_(whole.view(torch.uint8))  # as bytes, to preserve -0.0
    return whole


def leaving_out(layout: Layout, names: Collection[str]) -> Layout:
    """A layout without some of its canonical tensors; the buffers that contain them stay."""
    if not names:
        return layout
    specs = {name: spec for name, spec in layout.specs.items() if name not in names}
    parts = ([block for block in rank.blocks if block.name in specs] for rank in layout.ranks)
    return Layout(
        specs, tuple(RankLayout(rank.buffers, tuple(blocks)) for rank, blocks in zip(layout.ranks, parts, strict=True))
    )


def stacked(buffer: str, layout: Layout, gather: Callable[[str], Tensor]) -> Tensor:
    """Assembles a buffer of an unsharded model from the canonical tensors in it."""
    (rank,) = layout.ranks
    tensor = torch.zeros(rank.buffers[buffer].shape)
    for block in rank.blocks:
        if block.buffer == buffer:
            region(tensor, block).copy_(gather(block.name))
    return tensor
