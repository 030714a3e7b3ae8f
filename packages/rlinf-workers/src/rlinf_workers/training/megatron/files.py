"""Tensors of a model that ranks share out, as files have them: canonical weights, and AdamW's state by the names that
transformers' model has in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlinf_comm.weights import Block, Box, Layout
from rlinf_workers.collectives import RankGroup


def region(buffer: Tensor, block: Block) -> Tensor:
    """The box of a block, in the buffer."""
    return buffer.as_strided(block.box.shape, block.strides, buffer.storage_offset() + block.offset)


def inside(whole: Tensor, box: Box) -> Tensor:
    """A box of a tensor, no copy."""
    return whole[tuple(slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True))]


def owned(layout: Layout, rank: int, num_ranks: int) -> dict[str, list[Block]]:
    """Canonical name -> the blocks that a rank of the first replica hands out: of a box that several ranks have, the
    first does."""
    seen: set[tuple[str, Box]] = set()
    found: dict[str, list[Block]] = {}
    for number in range(num_ranks):
        for block in layout.ranks[number].blocks:
            key = block.name, block.box
            if key not in seen:
                seen.add(key)
                if number == rank:
                    found.setdefault(block.name, []).append(block)
    return found


def gathered(
    shape: tuple[int, ...], mine: list[tuple[Box, Tensor]], ranks: RankGroup, dtype: torch.dtype
) -> Tensor:
    """A whole tensor in host memory, on each of the ranks.

    Args:
        mine: the boxes that this rank hands out; no two ranks have the same element.
    """
    whole = torch.zeros(shape, dtype=dtype)
    for box, part in mine:
        inside(whole, box).copy_(part)
    ranks.sum_(whole.view(torch.uint8))  # as bytes, so that -0.0 stays what it is
    return whole


def moments_of(buffers: Layout, gather: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each buffer of a model in memory, put together from the canonical tensors in it.

    Args:
        buffers: of one rank, the layout of the model in memory.
    """
    (rank,) = buffers.ranks
    blocks: dict[str, list[Block]] = {}
    for block in rank.blocks:
        blocks.setdefault(block.buffer, []).append(block)
    for name, spec in rank.buffers.items():
        buffer = torch.zeros(spec.shape)
        for block in blocks[name]:
            region(buffer, block).copy_(gather(block.name))
        yield name, buffer


class MomentFile:
    """The state of an optimizer in a file of `training/checkpoint.py`, read box by box."""

    def __init__(self, path: str | Path, buffers: Layout) -> None:
        self._path = str(path)
        self._file: Any = safe_open(self._path, framework="pt")
        (rank,) = buffers.ranks
        self._blocks = {block.name: block for block in rank.blocks}
        self._shapes: Mapping[str, tuple[int, ...]] = {name: spec.shape for name, spec in rank.buffers.items()}
        self.is_empty = not list(self._file.keys())

    def read(self, name: str, box: Box, field: str) -> Tensor:
        """A box of a canonical tensor's moment. Raises: ValueError for another model's file."""
        block = self._blocks[name]
        key, shape = f"{block.buffer}:{field}", self._shapes[block.buffer]
        try:
            found = self._file.get_slice(key)
        except Exception as error:
            raise ValueError(f"{self._path}: holds no {key!r}; is it another model's?") from error
        parts = [slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True)]
        if len(shape) == len(box.shape):
            return found[tuple(parts)]
        # One of the matrices in a stack, [E, rows, columns]: the whole rows of a gate are before those of an up.
        expert, within = divmod(block.offset, shape[1] * shape[2])
        first = within // shape[2]
        rows = slice(parts[0].start + first, parts[0].stop + first)
        return found[expert : expert + 1, rows, parts[1]][0]
