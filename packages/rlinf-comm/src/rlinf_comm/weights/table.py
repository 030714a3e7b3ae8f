"""A layout as numpy arrays, one row for each block, for checks and plans.

A model of 48 layers with 128 experts has 18,000 canonical tensors; a Python loop over them takes seconds.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlinf_comm._arrays import dtype_named
from rlinf_comm.errors import LayoutError
from rlinf_comm.records import record

if TYPE_CHECKING:
    from rlinf_comm.weights.layout import Block, Layout, RankLayout

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

CASTABLE = ("float32", "bfloat16", "float16")
"""Dtypes that can be cast to each other: if the canonical dtype is one, a buffer may have another one."""


@record
@dataclass(frozen=True, eq=False)
class BlockTable:
    """n blocks of T canonical tensors in B buffers, sorted by tensor, rank and start.

    Boxes have D dimensions, the maximum over all tensors and at least one; boxes with fewer get leading dimensions of
    length 1 and stride 0.
    """

    names: tuple[str, ...]
    """[T] canonical tensors, sorted."""
    num_dims: Int32s
    """[T]"""
    shapes: Int64s
    """[T, D]"""
    dtypes: tuple[str, ...]
    """[T]"""
    first_buffer: Int64s
    """[num_ranks + 1]: the first buffer of each rank."""
    buffer_names: tuple[str, ...]
    """[B], for each rank in the order of the names."""
    buffer_shapes: tuple[tuple[int, ...], ...]
    """[B]"""
    buffer_dtypes: tuple[str, ...]
    """[B]"""
    tensor: Int32s
    """[n]"""
    rank: Int32s
    """[n]"""
    buffer: Int32s
    """[n], counted in the rank."""
    offset: Int64s
    """[n] elements"""
    start: Int64s
    """[n, D]"""
    length: Int64s
    """[n, D]"""
    strides: Int64s
    """[n, D] elements"""

    @property
    def num_ranks(self) -> int:
        return len(self.first_buffer) - 1

    @property
    def stop(self) -> Int64s:
        return self.start + self.length

    @property
    def num_elements(self) -> Int64s:
        """[n]"""
        return self.length.prod(axis=1)

    @property
    def global_buffer(self) -> Int64s:
        """[n]: counted over all ranks, an index for buffer_names."""
        return self.first_buffer[self.rank] + self.buffer

    def tied(self) -> NDArray[np.bool_]:
        """[n]: blocks in the same memory as an earlier block, which is the same box of a tensor of another name."""
        columns = (self.global_buffer, self.offset, *self.start.T, *self.length.T, *self.strides.T, self.tensor)
        order = np.lexsort(columns[::-1])
        same = np.ones(max(len(order) - 1, 0), np.bool_)
        for column in columns[:-1]:
            ordered = column[order]
            same &= ordered[1:] == ordered[:-1]
        tied = np.zeros(len(order), np.bool_)
        tied[order[1:]] = same
        return tied

    def digest(self) -> str:
        """SHA-256 of the whole table."""
        texts = json.dumps(
            [self.names, self.dtypes, self.buffer_names, self.buffer_shapes, self.buffer_dtypes, self.shapes.shape[1]]
        ).encode()
        arrays = (self.num_dims, self.shapes, self.first_buffer, self.tensor, self.rank, self.buffer, self.offset)
        sha = hashlib.sha256(texts)
        for array in (*arrays, self.start, self.length, self.strides):
            sha.update(array.astype("<i8").tobytes())
        return sha.hexdigest()


def tabulate(layout: Layout) -> BlockTable:
    """The table of a layout.

    Raises:
        LayoutError: a block of an unknown tensor or buffer, with a wrong number of dimensions, or of a wrong dtype.
    """
    names = tuple(sorted(layout.specs))
    max_dims = max([1, *(len(spec.shape) for spec in layout.specs.values())])
    tensor_of = {name: index for index, name in enumerate(names)}
    columns_of: dict[int, dict[str, Any]] = {}  # ranks may share a RankLayout
    parts = []
    for rank, stored in enumerate(layout.ranks):
        if id(stored) not in columns_of:
            _check_names(layout, stored, rank)
            columns_of[id(stored)] = _columns(stored, tensor_of, max_dims)
        columns = columns_of[id(stored)]
        parts.append({**columns, "rank": np.full(len(columns["tensor"]), rank, np.int32)})
    blocks = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    order = np.lexsort((*blocks["start"].T[::-1], blocks["rank"], blocks["tensor"]))
    blocks = {key: np.ascontiguousarray(column[order]) for key, column in blocks.items()}
    buffers = [item for stored in layout.ranks for item in stored.buffers.items()]
    specs = [layout.specs[name] for name in names]
    return BlockTable(
        names=names,
        num_dims=np.array([len(spec.shape) for spec in specs], np.int32),
        shapes=_padded([spec.shape for spec in specs], max_dims, 1),
        dtypes=tuple(spec.dtype for spec in specs),
        first_buffer=np.cumsum([0, *(len(stored.buffers) for stored in layout.ranks)], dtype=np.int64),
        buffer_names=tuple(name for name, _ in buffers),
        buffer_shapes=tuple(buffer.shape for _, buffer in buffers),
        buffer_dtypes=tuple(buffer.dtype for _, buffer in buffers),
        **blocks,
    )


def _columns(stored: RankLayout, tensor_of: dict[str, int], max_dims: int) -> dict[str, Any]:
    blocks = stored.blocks
    buffer_of = {name: index for index, name in enumerate(stored.buffers)}
    return {
        "tensor": np.array([tensor_of[block.name] for block in blocks], np.int32),
        "buffer": np.array([buffer_of[block.buffer] for block in blocks], np.int32),
        "offset": np.array([block.offset for block in blocks], np.int64),
        "start": _padded([block.box.start for block in blocks], max_dims, 0),
        "length": _padded([block.box.shape for block in blocks], max_dims, 1),
        "strides": _padded([block.strides for block in blocks], max_dims, 0),
    }


def _padded(rows: list[tuple[int, ...]], max_dims: int, filling: int) -> Int64s:
    fillings = [(filling,) * (max_dims - num_dims) for num_dims in range(max_dims + 1)]
    return np.array([fillings[len(row)] + row for row in rows], np.int64).reshape(len(rows), max_dims)


def _check_names(layout: Layout, stored: RankLayout, rank: int) -> None:
    for name, buffer in stored.buffers.items():
        if dtype_named(buffer.dtype) is None or any(length < 0 for length in buffer.shape):
            raise LayoutError(f"buffer {name!r} of rank {rank}: no tensor has the shape {buffer.shape} and the dtype "
                              f"{buffer.dtype!r}; dtypes are torch's, as 'float32' or 'bfloat16'")  # fmt: skip
    for block in stored.blocks:
        spec, buffer = layout.specs.get(block.name), stored.buffers.get(block.buffer)
        if spec is None:
            raise LayoutError(f"{block.name}: rank {rank} stores it, but the layout has no such tensor")
        if buffer is None:
            raise LayoutError(f"{block.name}: rank {rank} stores it in {block.buffer!r}, but has no such buffer")
        if not len(block.box.start) == len(block.box.shape) == len(spec.shape) == len(block.strides):
            raise _wrong_dimensions(block, spec.shape, rank)
        if buffer.dtype != spec.dtype and not (buffer.dtype in CASTABLE and spec.dtype in CASTABLE):
            raise LayoutError(
                f"{block.name}: is {spec.dtype}, and {buffer.dtype} in the buffer {block.buffer!r} of rank {rank}; "
                f"only {', '.join(CASTABLE)} are cast to each other"
            )


def _wrong_dimensions(block: Block, shape: tuple[int, ...], rank: int) -> LayoutError:
    if len(block.box.start) == len(block.box.shape) == len(shape):
        return LayoutError(f"{block.name}: {len(block.strides)} strides of rank {rank} for the shape {shape}")
    return LayoutError(f"{block.name}: the box {block.box} of rank {rank} is not inside the shape {shape}")
