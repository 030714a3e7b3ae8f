"""Putting a rank's buffers together: what the layouts of all engines have in common."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import Block, Box, BufferSpec, RankLayout, TensorSpec, stored_dtype
from rlinf_comm.weights.layouts.canonical import KEPT_IN_FLOAT32
from rlinf_comm.weights.region import dense_strides

Part = tuple[str, Box]
"""A box of a canonical tensor."""


class RankAssembly:
    """Gathers the buffers and blocks of one rank."""

    def __init__(self, specs: Mapping[str, TensorSpec], dtype: str | None, fp8_block: tuple[int, int] = (1, 1)) -> None:
        self._specs = specs
        self._dtype = dtype
        self._fp8_block = fp8_block
        self._buffers: dict[str, BufferSpec] = {}
        self._blocks: list[Block] = []

    def add(self, buffer: str, parts: Iterable[Part], shape: tuple[int, ...]) -> None:
        """A buffer of `shape` in which the parts lie dense, one after the other; what remains at its end is padding."""
        offset = 0
        dtype = self._dtype
        for name, box in parts:
            dtype = self._stored_dtype(name)
            self._blocks.append(Block(name, box, buffer, offset, dense_strides(box.shape, 1)))
            offset += box.num_elements
        assert dtype is not None, f"{buffer} has no parts, and so no dtype"
        self._buffers[buffer] = BufferSpec(shape, dtype)

    def add_linear(self, buffer: str, parts: Sequence[Part], shape: tuple[int, ...]) -> None:
        """Adds weights of linear layers as `add` does; in FP8 they bring the scales of their blocks along."""
        self.add(buffer, parts, shape)
        if f"{parts[0][0]}_scale_inv" in self._specs:
            num_matrices = math.prod(shape[:-2])
            in_each = len(parts) // num_matrices
            scales = [
                (f"{name}_scale_inv", self._scales_of(name, box, is_last=(number + 1) % in_each == 0))
                for number, (name, box) in enumerate(parts)
            ]
            num_rows = sum(box.shape[0] for _, box in scales) // num_matrices
            self.add(f"{buffer}_scale_inv", scales, (*shape[:-2], num_rows, scales[0][1].shape[1]))
        elif f"{parts[0][0]}_scale" in self._specs:
            raise LayoutError(
                f"{buffer}: {parts[0][0]} has one FP8 scale for the whole tensor. Engines that merge tensors compute "
                "weights and scale anew after loading, so no layout tells what they serve; use block-wise scales"
            )

    def _scales_of(self, name: str, box: Box, *, is_last: bool) -> Box:
        """The scales of a box of a weight: whole blocks, but for what ends a matrix."""
        start, length = [], []
        for dim, (size, blocks) in enumerate(
            zip(self._specs[name].shape, self._specs[f"{name}_scale_inv"].shape, strict=True)
        ):
            block = self._fp8_block[dim]
            first, stop = box.start[dim], box.start[dim] + box.shape[dim]
            may_be_ragged = stop == size and (dim == 1 or is_last)
            if first % block or (stop % block and not may_be_ragged):
                raise LayoutError(
                    f"{name}: a rank's part {box} of {list(self._specs[name].shape)} cuts through the FP8 blocks of "
                    f"{block} along dimension {dim}; use so few ranks that each has whole blocks"
                )
            start.append(first // block)
            length.append(min(-(-stop // block), blocks) - first // block)
        return Box(tuple(start), tuple(length))

    def _stored_dtype(self, name: str) -> str:
        canonical = self._specs[name].dtype
        return canonical if name.endswith(KEPT_IN_FLOAT32) else stored_dtype(canonical, self._dtype)

    def whole(self, name: str) -> Box:
        return self._specs[name].whole

    def add_block(self, block: Block, shape: tuple[int, ...]) -> None:
        """A block of a buffer of `shape`, which it may share with other blocks."""
        self._buffers[block.buffer] = BufferSpec(shape, self._stored_dtype(block.name))
        self._blocks.append(block)

    def add_whole(self, buffer: str, name: str) -> None:
        self.add_box(buffer, name, self._specs[name].whole)

    def add_box(self, buffer: str, name: str, box: Box) -> None:
        self.add(buffer, [(name, box)], box.shape)

    def add_slice(self, buffer: str, name: str, dim: int, rank: int, num_ranks: int) -> None:
        """The even part of a linear layer's weight for one of several ranks."""
        box = self.slice_of(name, dim, rank, num_ranks)
        self.add_linear(buffer, [(name, box)], box.shape)

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
    """The box of a tensor that is cut along one dimension only."""
    start = [0] * len(shape)
    start[dim] = first
    return Box(tuple(start), (*shape[:dim], length, *shape[dim + 1 :]))


def rounded_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def check_divides(what: str, number: int, parts_name: str, num_parts: int) -> None:
    """Raises LayoutError unless `number` can be cut evenly."""
    if num_parts < 1 or number % num_parts:
        raise LayoutError(f"{what}={number} is not a multiple of {parts_name}={num_parts}; use a divisor of {number}")
