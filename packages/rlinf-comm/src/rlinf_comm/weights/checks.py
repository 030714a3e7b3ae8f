"""What cannot be in a layout: blocks outside of their tensor or buffer, or on top of each other; doubles."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.table import BlockTable, Int64s


def check_blocks(table: BlockTable) -> None:
    """Raises LayoutError, which names the tensor and the rank, unless every block can be where it says."""
    _check_inside_tensor(table)
    _check_inside_buffer(table)
    _check_stored_once(table)
    _check_apart_in_buffers(table)


def box_text(start: Int64s, length: Int64s, num_dims: int) -> str:
    """Returns a box as str(Box) writes it: "[0:4, 2:3]"."""
    firsts = start[len(start) - num_dims :]
    stops = firsts + length[len(length) - num_dims :]
    return "[" + ", ".join(f"{first}:{stop}" for first, stop in zip(firsts, stops, strict=True)) + "]"


def _describe(table: BlockTable, row: int) -> tuple[str, str, int]:
    """(name, box, rank)"""
    tensor = table.tensor[row]
    text = box_text(table.start[row], table.length[row], int(table.num_dims[tensor]))
    return table.names[tensor], text, int(table.rank[row])


def _check_inside_tensor(table: BlockTable) -> None:
    shapes = table.shapes[table.tensor]
    wrong = ((table.start < 0) | (table.length < 0) | (table.stop > shapes)).any(axis=1)
    if wrong.any():
        row = int(np.argmax(wrong))
        name, box, rank = _describe(table, row)
        tensor = table.tensor[row]
        shape = tuple(int(n) for n in table.shapes[tensor][table.shapes.shape[1] - table.num_dims[tensor] :])
        raise LayoutError(f"{name}: the box {box} of rank {rank} is not inside the shape {shape}")


def _span(table: BlockTable) -> tuple[Int64s, Int64s]:
    """[n] first and last element in the buffer that a block with any elements touches."""
    reach = table.strides * (table.length - 1)
    return table.offset + np.minimum(reach, 0).sum(axis=1), table.offset + np.maximum(reach, 0).sum(axis=1)


def _check_inside_buffer(table: BlockTable) -> None:
    sizes = np.array([math.prod(shape) for shape in table.buffer_shapes], np.int64)
    first, last = _span(table)
    wrong = (table.num_elements > 0) & ((first < 0) | (last >= sizes[table.global_buffer]))
    if wrong.any():
        row = int(np.argmax(wrong))
        name, box, rank = _describe(table, row)
        buffer = int(table.global_buffer[row])
        raise LayoutError(
            f"{name}: the box {box} of rank {rank} would lie in the elements {first[row]} to {last[row]} of the buffer "
            f"{table.buffer_names[buffer]!r}, which has {sizes[buffer]}, shape {table.buffer_shapes[buffer]}"
        )


def _check_stored_once(table: BlockTable) -> None:
    """No rank stores an element of a canonical tensor in two blocks."""
    rows = np.flatnonzero(table.num_elements > 0)
    key = table.tensor[rows].astype(np.int64) * table.num_ranks + table.rank[rows]
    for first, second in overlaps(key, table.start[rows], table.stop[rows]):
        name, box, rank = _describe(table, int(rows[first]))
        other = _describe(table, int(rows[second]))[1]
        raise LayoutError(
            f"{name}: rank {rank} stores two blocks of it that overlap, {box} and {other}; "
            "within a rank each element may be stored once"
        )


def overlaps(key: Int64s, start: Int64s, stop: Int64s) -> Iterator[tuple[int, int]]:
    """Pairs of boxes with the same key that share an element; nothing when there are none.

    Boxes with one key are usually slices along one dimension, which a sort shows; only the others are compared in
    pairs. Boxes must not be empty.
    """
    rows = np.arange(len(key))
    for dim in range(start.shape[1]):
        if not len(rows):
            return
        rows = rows[np.lexsort((start[rows, dim], key[rows]))]
        same = key[rows[1:]] == key[rows[:-1]]
        entangled = same & (stop[rows[:-1], dim] > start[rows[1:], dim])
        rows = rows[np.isin(key[rows], key[rows[1:][entangled]])]
    shift = 1
    while len(rows) > shift:
        first, second = rows[:-shift], rows[shift:]
        same = key[first] == key[second]
        if not same.any():
            return
        common = np.minimum(stop[first], stop[second]) > np.maximum(start[first], start[second])
        for at in np.flatnonzero(same & common.all(axis=1)):
            yield int(first[at]), int(second[at])
        shift += 1


def _check_apart_in_buffers(table: BlockTable) -> None:
    """No two blocks share memory, unless they are the same box under two names, and none shares it with itself."""
    rows = np.flatnonzero((table.num_elements > 0) & ~table.tied())
    first, last = (ends[rows] for ends in _span(table))
    buffer = table.global_buffer[rows]
    order = np.lexsort((first, buffer))
    rows, first, last, buffer = rows[order], first[order], last[order], buffer[order]
    suspect = buffer[_may_fold(table, rows)].tolist()
    # Within a buffer, each block must begin behind all that begin before it.
    room = int(last.max(initial=0)) + 1
    reached = np.maximum.accumulate(last + buffer * room)[:-1]
    suspect += buffer[1:][(first + buffer * room)[1:] <= reached].tolist()
    for number in sorted(set(suspect)):  # spans overlap: look at the runs
        _check_runs(table, rows[buffer == number], int(number))


def _may_fold(table: BlockTable, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[n]: a stride does not clear all that the smaller strides reach, so that elements may share memory."""
    length = table.length[rows]
    strides = np.where(length > 1, np.abs(table.strides[rows]), 0)
    order = np.argsort(strides, axis=1)
    strides, length = np.take_along_axis(strides, order, 1), np.take_along_axis(length, order, 1)
    reach = np.cumsum(strides * (length - 1), axis=1)
    before = reach - strides * (length - 1)
    return np.any((length > 1) & (strides <= before), axis=1)


def _check_runs(table: BlockTable, rows: NDArray[np.int64], buffer: int) -> None:
    """Exact: lists the contiguous runs of all these blocks and looks for two that overlap."""
    starts, lengths, owners = [], [], []
    for row in rows.tolist():
        run_starts, run_length = _runs(table, row)
        starts.append(run_starts)
        lengths.append(np.full(len(run_starts), run_length))
        owners.append(np.full(len(run_starts), row))
    start, length, owner = np.concatenate(starts), np.concatenate(lengths), np.concatenate(owners)
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate((start + length)[order])[:-1]
    clash = np.flatnonzero(start[order][1:] < reached)
    if len(clash):
        name, box, rank = _describe(table, int(owner[order][clash[0] + 1]))
        other_name, other_box, _ = _describe(table, int(owner[order][clash[0]]))
        raise LayoutError(
            f"{name}: the box {box} of rank {rank} overlaps with {other_name} {other_box} in the buffer "
            f"{table.buffer_names[buffer]!r} at its element {start[order][clash[0] + 1]}; only a whole block under two "
            "names may share memory"
        )


def _runs(table: BlockTable, row: int) -> tuple[Int64s, int]:
    """(first elements, length) of the contiguous runs of a block."""
    axes = sorted((abs(int(s)), int(n)) for s, n in zip(table.strides[row], table.length[row], strict=True) if n > 1)
    reach = table.strides[row] * (table.length[row] - 1)
    starts = np.array([table.offset[row] + np.minimum(reach, 0).sum()])
    run_length = 1
    for stride, length in axes:
        if stride == run_length and len(starts) == 1:
            run_length *= length
        else:
            starts = (starts[:, None] + np.arange(length) * stride).reshape(-1)
    return starts, run_length
