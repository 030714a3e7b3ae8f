"""Where the parts of each tensor lie: canonical tensors, boxes of them, and which rank stores which box."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlinf_comm._arrays import dtype_name, dtype_named
from rlinf_comm.errors import LayoutError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A canonical tensor: the one that the checkpoint has, before any sharding."""

    shape: tuple[int, ...]
    dtype: str
    """As in torch, "float32" or "bfloat16"."""

    @property
    def element_bytes(self) -> int:
        dtype = dtype_named(self.dtype)
        if dtype is None:
            raise LayoutError(f"dtype {self.dtype!r} is unknown; use a torch dtype's name, as 'float32' or 'bfloat16'")
        return dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes

    @property
    def whole(self) -> Box:
        """The box that is all of it."""
        return Box((0,) * len(self.shape), self.shape)

    @property
    def index_strides(self) -> tuple[int, ...]:
        """Steps in the flat row-major index, one for each dimension."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))


@dataclass(frozen=True, slots=True)
class Box:
    """An N-d interval: start[d] <= index[d] < start[d] + shape[d]. In 0 dimensions it holds the one element."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """What both hold; None when that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stops = map(min, self._stop, other._stop)
        shape = tuple(stop - first for first, stop in zip(start, stops, strict=True))
        return Box(start, shape) if all(length > 0 for length in shape) else None

    def minus(self, other: Box) -> list[Box]:
        """What only this one holds, as disjoint boxes: at most two for each dimension."""
        common = self.intersect(other)
        if common is None:
            return [self]
        pieces = []
        start, shape = list(self.start), list(self.shape)
        for dim, (first, stop) in enumerate(zip(common.start, common._stop, strict=True)):
            own_stop = start[dim] + shape[dim]
            for piece_start, piece_stop in ((start[dim], first), (stop, own_stop)):
                if piece_start < piece_stop:
                    pieces.append(
                        Box(
                            (*start[:dim], piece_start, *start[dim + 1 :]),
                            (*shape[:dim], piece_stop - piece_start, *shape[dim + 1 :]),
                        )
                    )
            start[dim], shape[dim] = first, stop - first  # the rest is cut along the next dimension
        return pieces

    def split(self, dim: int, num_parts: int) -> Iterator[Box]:
        """Even parts along a dimension, the first ones longer by one where it does not divide; none that is empty."""
        quotient, remainder = divmod(self.shape[dim], num_parts)
        first = self.start[dim]
        for part in range(num_parts):
            length = quotient + (part < remainder)
            if length:
                yield Box(
                    (*self.start[:dim], first, *self.start[dim + 1 :]),
                    (*self.shape[:dim], length, *self.shape[dim + 1 :]),
                )
            first += length

    @property
    def _stop(self) -> tuple[int, ...]:
        return tuple(first + length for first, length in zip(self.start, self.shape, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{first}:{stop}" for first, stop in zip(self.start, self._stop, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class Block:
    """What one rank stores of one canonical tensor."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class Layout:
    """All canonical tensors, and the block that each rank stores of each.

    Example: "w" of shape (5, 4) over 2 ranks, even shards of dimension 0:
        specs = {"w": TensorSpec((5, 4), "float32")}
        ranks = ((Block("w", Box((0, 0), (3, 4))),),
                 (Block("w", Box((3, 0), (2, 4))),))
    Ranks may store the same box (replicas) or overlapping ones, or nothing of a tensor (pipeline stages). A rank stores
    at most one block of a tensor, as a tensor of the box's shape, under the canonical name.
    """

    specs: Mapping[str, TensorSpec]
    ranks: tuple[tuple[Block, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", dict(self.specs))
        object.__setattr__(self, "ranks", tuple(tuple(blocks) for blocks in self.ranks))
        if not self.ranks:
            raise LayoutError("a layout needs at least one rank")
        for rank, blocks in enumerate(self.ranks):
            seen = set()
            for block in blocks:
                self._check_block(block, rank)
                if block.name in seen:
                    raise LayoutError(f"{block.name}: rank {rank} stores two blocks of it; at most one is allowed")
                seen.add(block.name)

    def _check_block(self, block: Block, rank: int) -> None:
        spec = self.specs.get(block.name)
        if spec is None:
            raise LayoutError(f"{block.name}: rank {rank} stores it, but the layout has no such tensor")
        box = block.box
        fits = len(box.start) == len(box.shape) == len(spec.shape) and all(
            first >= 0 and length >= 0 and first + length <= size
            for first, length, size in zip(box.start, box.shape, spec.shape, strict=False)
        )
        if not fits:
            raise LayoutError(f"{block.name}: the box {box} of rank {rank} is not inside the shape {spec.shape}")

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @classmethod
    def replicated(cls, specs: Mapping[str, TensorSpec], num_ranks: int) -> Layout:
        """Every rank stores all of every tensor."""
        blocks = tuple(Block(name, spec.whole) for name, spec in specs.items())
        return cls(specs, (blocks,) * num_ranks)

    @classmethod
    def sharded(cls, specs: Mapping[str, TensorSpec], num_ranks: int, dim: int = 0) -> Layout:
        """Every tensor cut evenly along `dim`; the first ranks get one row more where it does not divide.

        A rank past the length of the dimension stores nothing of that tensor. Tensors without that dimension are
        replicated. A negative `dim` counts from the end.
        """
        ranks: list[list[Block]] = [[] for _ in range(num_ranks)]
        for name, spec in specs.items():
            axis = dim + len(spec.shape) if dim < 0 else dim
            if 0 <= axis < len(spec.shape):
                boxes = list(spec.whole.split(axis, num_ranks))
            else:
                boxes = [spec.whole] * num_ranks
            for blocks, box in zip(ranks, boxes, strict=False):
                blocks.append(Block(name, box))
        return cls(specs, tuple(map(tuple, ranks)))


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """The canonical tensors of a model that is not sharded: `specs_of(model.state_dict())`."""
    specs = {}
    for name, tensor in tensors.items():
        dtype = dtype_name(tensor.dtype)
        if dtype is None:
            raise LayoutError(f"{name}: tensors of dtype {tensor.dtype} cannot be moved")
        specs[name] = TensorSpec(tuple(tensor.shape), dtype)
    return specs
