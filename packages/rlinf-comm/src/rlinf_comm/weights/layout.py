"""Layouts: canonical tensors, boxes of them, and the buffers in which each rank stores them.

Every way to store a model is a list of blocks: FSDP shards, Megatron's fused and interleaved parameters, the merged
ones of the inference engines (layouts/ has builders for these), or your own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rlinf_comm._arrays import dtype_name, dtype_named
from rlinf_comm.errors import LayoutError
from rlinf_comm.records import record
from rlinf_comm.weights.checks import check_blocks
from rlinf_comm.weights.table import CASTABLE, BlockTable, tabulate

if TYPE_CHECKING:
    import torch


@record
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A canonical tensor: the one that the checkpoint has, before any sharding."""

    shape: tuple[int, ...]
    dtype: str
    """The name in torch, "float32" or "bfloat16"."""

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
        return _row_major(self.shape)


@record
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


@record
@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A tensor that a rank really stores: perhaps fused of several canonical ones, padded, or of another dtype."""

    shape: tuple[int, ...]
    dtype: str
    """The name in torch. It may differ from the canonical dtype among float32, bfloat16 and float16 only."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Row-major strides, in elements."""
        return _row_major(self.shape)


@record
@dataclass(frozen=True, slots=True)
class Block:
    """Where one box of a canonical tensor lies in a buffer.

    Example: the rows 4:8 of a canonical [8, 6] tensor, transposed in the right half of a [6, 8] buffer:
        Block("w", Box((4, 0), (4, 6)), buffer="fused", offset=4, strides=(1, 8))
    """

    name: str
    """Name of the canonical tensor."""
    box: Box
    buffer: str
    offset: int
    """Place of the box's first element in the buffer, counted in elements, row-major."""
    strides: tuple[int, ...]
    """Elements of the buffer from one index to the next, for each dimension of the box."""


@record
@dataclass(frozen=True)
class RankLayout:
    """What one rank stores. Elements of a buffer that no block covers (padding) are neither read nor written.

    Example: q [4, 6] and k [2, 6] of a rank, stacked in one [8, 6] buffer with two rows of padding:
        RankLayout({"qkv": BufferSpec((8, 6), "bfloat16")},
                   (Block("q", Box((0, 0), (4, 6)), "qkv", 0, (6, 1)),
                    Block("k", Box((0, 0), (2, 6)), "qkv", 24, (6, 1))))
    """

    buffers: Mapping[str, BufferSpec]
    """The buffers by name; kept and counted in the order of the names."""
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", dict(sorted(self.buffers.items())))
        object.__setattr__(self, "blocks", tuple(self.blocks))

    def only(self, names: Collection[str]) -> RankLayout:
        """As `Layout.only`."""
        blocks = tuple(block for block in self.blocks if block.name in names)
        used = {block.buffer for block in blocks}
        return RankLayout({name: spec for name, spec in self.buffers.items() if name in used}, blocks)

    @classmethod
    def of_boxes(
        cls, boxes: Mapping[str, Box], specs: Mapping[str, TensorSpec], dtype: str | None = None
    ) -> RankLayout:
        """One box of each canonical tensor, each in a dense buffer of its own that has the tensor's name.

        With `dtype` the tensors of a floating-point dtype are stored in that one.
        """
        buffers, blocks = {}, []
        for name, box in boxes.items():
            if name not in specs:
                raise LayoutError(f"{name}: a rank stores it, but the layout has no such tensor")
            buffers[name] = BufferSpec(box.shape, stored_dtype(specs[name].dtype, dtype))
            blocks.append(Block(name, box, name, 0, _row_major(box.shape)))
        return cls(buffers, tuple(blocks))


@record
@dataclass(frozen=True)
class Layout:
    """All canonical tensors, and what each rank stores of them.

    Example: "w" of shape (5, 4) over 2 ranks, even shards of dimension 0:
        specs = {"w": TensorSpec((5, 4), "float32")}
        ranks = (RankLayout.of_boxes({"w": Box((0, 0), (3, 4))}, specs),
                 RankLayout.of_boxes({"w": Box((3, 0), (2, 4))}, specs))
    Ranks may store the same box (replicas) or overlapping ones, or nothing of a tensor (pipeline stages). One rank
    stores each element at most once, and no two blocks of a buffer share memory, except for one box under two names
    (tied).

    Raises:
        LayoutError: at once, for anything that cannot be; it names the tensor and the rank.
    """

    specs: Mapping[str, TensorSpec]
    ranks: tuple[RankLayout, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", dict(self.specs))
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if not self.ranks:
            raise LayoutError("a layout needs at least one rank")
        check_blocks(self.table)

    @cached_property
    def table(self) -> BlockTable:
        """The same as numpy arrays, which checks and plans work on."""
        return tabulate(self)

    @cached_property
    def digest(self) -> str:
        """SHA-256, hexadecimal: equal for layouts that store the same in the same places."""
        return self.table.digest()

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def only(self, names: Collection[str]) -> Layout:
        """The same storage of only these canonical tensors; buffers that store none of them are left out."""
        specs = {name: spec for name, spec in self.specs.items() if name in names}
        ranks = {id(rank): rank.only(specs) for rank in self.ranks}  # replicas share one
        return Layout(specs, tuple(ranks[id(rank)] for rank in self.ranks))

    def with_dtypes_of(self, specs: Mapping[str, TensorSpec]) -> Layout:
        """The same storage, for canonical tensors of the dtypes in `specs`: of a model that is served in another dtype
        than it is trained in.

        Raises:
            LayoutError: a tensor that cannot be cast is stored in another dtype.
        """
        named = {name: replace(spec, dtype=specs.get(name, spec).dtype) for name, spec in self.specs.items()}
        return self if named == self.specs else Layout(named, self.ranks)

    @classmethod
    def of_boxes(
        cls, specs: Mapping[str, TensorSpec], ranks: Iterable[Mapping[str, Box]], dtype: str | None = None
    ) -> Layout:
        """Each rank stores one box of some canonical tensors, dense, under their names; see RankLayout.of_boxes."""
        return cls(specs, tuple(RankLayout.of_boxes(boxes, specs, dtype) for boxes in ranks))

    @classmethod
    def replicated(cls, specs: Mapping[str, TensorSpec], num_ranks: int, dtype: str | None = None) -> Layout:
        """Every rank stores all of every tensor; floating-point ones in `dtype`, when it is given."""
        rank = RankLayout.of_boxes({name: spec.whole for name, spec in specs.items()}, specs, dtype)
        return cls(specs, (rank,) * num_ranks)

    @classmethod
    def sharded(cls, specs: Mapping[str, TensorSpec], num_ranks: int, dim: int = 0, dtype: str | None = None) -> Layout:
        """Every tensor cut evenly along `dim`; the first ranks get one row more where it does not divide.

        A rank past the length of the dimension stores nothing of that tensor. Tensors without that dimension are
        replicated. A negative `dim` counts from the end. Floating-point tensors are stored in `dtype`, if it is given.
        """
        ranks: list[dict[str, Box]] = [{} for _ in range(num_ranks)]
        for name, spec in specs.items():
            axis = dim + len(spec.shape) if dim < 0 else dim
            if 0 <= axis < len(spec.shape):
                boxes = list(spec.whole.split(axis, num_ranks))
            else:
                boxes = [spec.whole] * num_ranks
            for stored, box in zip(ranks, boxes, strict=False):
                stored[name] = box
        return cls.of_boxes(specs, ranks, dtype)


def stored_dtype(canonical: str, dtype: str | None) -> str:
    """`dtype` for tensors of a floating-point dtype that can be cast, the canonical dtype for all others."""
    return dtype if dtype is not None and canonical in CASTABLE else canonical


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """The canonical tensors of a model that is not sharded: `specs_of(model.state_dict())`."""
    specs = {}
    for name, tensor in tensors.items():
        dtype = dtype_name(tensor.dtype)
        if dtype is None:
            raise LayoutError(f"{name}: tensors of dtype {tensor.dtype} cannot be moved")
        specs[name] = TensorSpec(tuple(tensor.shape), dtype)
    return specs
