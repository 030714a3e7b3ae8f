"""Putting a rank's buffers together: what the layouts of all engines have in common."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping

from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import Block, Box, BufferSpec, RankLayout, TensorSpec, stored_dtype

Part = tuple[str, Box]
"""A box of a canonical tensor."""


class RankAssembly:
    """Gathers the buffers and blocks of one rank."""

    def __init__(self, specs: Mapping[str, TensorSpec], dtype: str | None) -> None:
        self._specs = specs
        self._dtype = dtype
        self._buffers: dict[str, BufferSpec] = {}
        self._blocks: list[Block] = []

    def add(self, buffer: str, parts: Iterable[Part], shape: tuple[int, ...]) -> None:
        """A buffer of `shape` in which the parts lie dense, one after the other; what remains at its end is padding."""
        offset = 0
        dtype = self._dtype
        for name, box in parts:
            dtype = stored_dtype(self._specs[name].dtype, self._dtype)
            self._blocks.append(Block(name, box, buffer, offset, _dense_strides(box.shape)))
            offset += box.num_elements
        assert dtype is not None, f"{buffer} has no parts, and so no dtype"
        self._buffers[buffer] = BufferSpec(shape, dtype)

    def add_block(self, block: Block, shape: tuple[int, ...]) -> None:
        """A block of a buffer of `shape`, which it may share with other blocks."""
        self._buffers[block.buffer] = BufferSpec(shape, stored_dtype(self._specs[block.name].dtype, self._dtype))
        self._blocks.append(block)

    def add_whole(self, buffer: str, name: str) -> None:
        self.add_box(buffer, name, self._specs[name].whole)

    def add_box(self, buffer: str, name: str, box: Box) -> None:
        self.add(buffer, [(name, box)], box.shape)

    def add_slice(self, buffer: str, name: str, dim: int, rank: int, num_ranks: int) -> None:
        """The even part of a canonical tensor for one of several ranks."""
        self.add_box(buffer, name, self.slice_of(name, dim, rank, num_ranks))

    def slice_of(self, name: str, dim: int, rank: int, num_ranks: int) -> Box:
        shape = self._specs[name].shape
        length = shape[dim] // num_ranks
        return interval(shape, dim, rank * length, length)

    def add_vocab(self, buffer: str, name: str, num_padded: int, rank: int, num_ranks: int) -> None:
        """A part of the rows of an embedding of `num_padded` rows, of which the canonical tensor has the first."""
        vocab, hidden = self._specs[name].shape
        num_rows = num_padded // num_ranks
        first = min(rank * num_rows, vocab)
        box = interval((vocab, hidden), 0, first, min(num_rows, vocab - first))
        self.add(buffer, [(name, box)], (num_rows, hidden))

    def layout(self) -> RankLayout:
        return RankLayout(self._buffers, tuple(self._blocks))


@functools.lru_cache(maxsize=4096)  # all experts of all layers have the same
def interval(shape: tuple[int, ...], dim: int, first: int, length: int) -> Box:
    """All of a tensor but for one dimension."""
    start = [0] * len(shape)
    start[dim] = first
    return Box(tuple(start), (*shape[:dim], length, *shape[dim + 1 :]))


@functools.lru_cache(maxsize=4096)
def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def check_divides(what: str, number: int, parts_name: str, num_parts: int) -> None:
    """Raises LayoutError unless `number` can be cut evenly."""
    if num_parts < 1 or number % num_parts:
        raise LayoutError(f"{what}={number} is not a multiple of {parts_name}={num_parts}; use a divisor of {number}")
