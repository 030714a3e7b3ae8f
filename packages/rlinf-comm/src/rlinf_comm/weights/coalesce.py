"""Moves to copies: as few as possible, with as few dimensions as possible.

Rows that lie behind each other in both buffers become one run, and copies that go on where another stops become one
copy, whatever tensors they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_comm.copies import CODE_BYTES, COPY_DTYPES, CopyTable
from rlinf_comm.weights.table import CASTABLE, Int64s

if TYPE_CHECKING:
    from rlinf_comm.weights.plan import MoveTable


@dataclass
class _Copies:
    """n copies; offsets and strides in bytes."""

    buffers: Int64s
    """[n, 2] source, destination"""
    offsets: Int64s
    """[n, 2]"""
    lengths: Int64s
    """[n, D]"""
    strides: Int64s
    """[n, D, 2]"""

    def take(self, rows: Any) -> _Copies:
        return _Copies(self.buffers[rows], self.offsets[rows], self.lengths[rows], self.strides[rows])


def copy_table(table: MoveTable, src_buffer: Int64s, src_dtypes: Sequence[str], dst_dtypes: Sequence[str]) -> CopyTable:
    """The copies for some moves; `src_buffer` [m] and the moves' dst_buffer are indices into the lists of dtypes."""
    src_codes, dst_codes = _codes(src_dtypes)[src_buffer], _codes(dst_dtypes)[table.dst_buffer]
    sizes = np.stack([CODE_BYTES[src_codes], CODE_BYTES[dst_codes]], axis=1)
    copies = _Copies(
        buffers=np.stack([src_buffer, table.dst_buffer], axis=1).astype(np.int64),
        offsets=np.stack([table.src_offset, table.dst_offset], axis=1) * sizes,
        lengths=table.length.copy(),
        strides=np.stack([table.src_strides, table.dst_strides], axis=2) * sizes[:, None, :],
    )
    copies = _fuse(copies)
    num_copies = -1
    while num_copies != len(copies.lengths):
        num_copies = len(copies.lengths)
        for dim in range(copies.lengths.shape[1]):
            copies = _join(copies, dim)
        copies = _fuse(copies)
    copies = copies.take(np.lexsort((copies.offsets[:, 1], copies.offsets[:, 0], copies.buffers[:, 0])))
    src_number, dst_number = copies.buffers[:, 0], copies.buffers[:, 1]
    used = max(1, int((copies.lengths > 1).any(axis=0).sum()))  # the used dimensions are the last ones
    return CopyTable(
        src_buffer=src_number.astype(np.int32),
        dst_buffer=dst_number.astype(np.int32),
        src_offset=np.ascontiguousarray(copies.offsets[:, 0]),
        dst_offset=np.ascontiguousarray(copies.offsets[:, 1]),
        lengths=np.ascontiguousarray(copies.lengths[:, -used:]),
        src_strides=np.ascontiguousarray(copies.strides[:, -used:, 0]),
        dst_strides=np.ascontiguousarray(copies.strides[:, -used:, 1]),
        src_dtype=_codes(src_dtypes)[src_number],
        dst_dtype=_codes(dst_dtypes)[dst_number],
    )


def _codes(dtypes: Sequence[str]) -> np.ndarray:
    from rlinf_comm.weights.layout import TensorSpec

    codes = {
        dtype: COPY_DTYPES.index(dtype if dtype in CASTABLE else f"bytes{TensorSpec((), dtype).element_bytes}")
        for dtype in set(dtypes)
    }
    return np.array([codes[dtype] for dtype in dtypes], np.uint8)


def _fuse(copies: _Copies) -> _Copies:
    """Drops dimensions of length 1 and fuses neighbours that are one run in both buffers; the rest moves to the end."""
    num_copies, num_dims = copies.lengths.shape
    lengths = np.ones_like(copies.lengths)
    strides = np.zeros_like(copies.strides)
    rows = np.arange(num_copies)
    top = np.full(num_copies, num_dims)  # the outermost dimension written so far
    for dim in range(num_dims - 1, -1, -1):
        length, stride = copies.lengths[:, dim], copies.strides[:, dim]
        inner = np.minimum(top, num_dims - 1)
        continues = (stride == strides[rows, inner] * lengths[rows, inner][:, None]).all(axis=1) & (top < num_dims)
        fused = (length > 1) & continues
        fresh = (length > 1) & ~continues
        lengths[rows[fused], top[fused]] *= length[fused]
        top[fresh] -= 1
        lengths[rows[fresh], top[fresh]] = length[fresh]
        strides[rows[fresh], top[fresh]] = stride[fresh]
    return _Copies(copies.buffers, copies.offsets, lengths, strides)


def _join(copies: _Copies, dim: int) -> _Copies:
    """Makes one of copies that only differ in that the next goes on, along one dimension, where the last one stops."""
    num_copies, num_dims = copies.lengths.shape
    if num_copies < 2:
        return copies
    others = [copies.lengths[:, d] for d in range(num_dims) if d != dim]
    same = [*copies.buffers.T, *others, *copies.strides.reshape(num_copies, -1).T]
    order = np.lexsort((copies.offsets[:, 1], copies.offsets[:, 0], *same[::-1]))
    copies = copies.take(order)
    joined = np.ones(num_copies - 1, np.bool_)
    for column in same:
        ordered = column[order]
        joined &= ordered[1:] == ordered[:-1]
    length, stride = copies.lengths[:, dim], copies.strides[:, dim]
    joined &= (copies.offsets[1:] == (copies.offsets + stride * length[:, None])[:-1]).all(axis=1)
    if not joined.any():
        return copies
    first = np.append(0, np.flatnonzero(~joined) + 1)
    total = np.add.reduceat(length, first)
    copies = copies.take(first)
    copies.lengths[:, dim] = total
    return copies
