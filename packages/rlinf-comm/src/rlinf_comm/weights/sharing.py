"""Which source rank hands out which box: replicas share the load.

Boxes that one rank stores are its own to send. What several ranks store is cut among them or given to the one with the
least to do, large tensors first, so that the small ones fill up what is uneven.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlinf_comm.records import record
from rlinf_comm.weights.checks import overlaps
from rlinf_comm.weights.table import BlockTable, Int64s

_MIN_SHARED_BYTES = 64 << 10
"""A box below this is not cut up among its replicas: the cost of a copy is no longer its bytes."""


@record
@dataclass(frozen=True, eq=False)
class Shares:
    """Disjoint boxes that together are all that is stored of each tensor; s of them, sorted by tensor."""

    block: Int64s
    """[s] row of the source's table that it lies in; tells tensor, rank and buffer."""
    start: Int64s
    """[s, D]"""
    length: Int64s
    """[s, D]"""


def share_out(table: BlockTable, element_bytes: Int64s) -> Shares:
    """Divides what the ranks of a source layout store among them. `element_bytes` [T] is for each canonical tensor."""
    rows = np.flatnonzero(table.num_elements > 0)
    columns = (table.tensor[rows], *table.start[rows].T, *table.length[rows].T, table.rank[rows])
    rows = rows[np.lexsort(columns[::-1])]
    first = _firsts(table, rows)  # positions in `rows` where another box begins
    heads = rows[first]
    holders = np.diff(np.append(first, len(rows)))
    tangled = np.unique([
        table.tensor[heads[pair[0]]]
        for pair in overlaps(table.tensor[heads].astype(np.int64), table.start[heads], table.stop[heads])
    ])  # fmt: skip
    plain = ~np.isin(table.tensor[heads], tangled)
    own = plain & (holders == 1)
    loads = np.bincount(
        table.rank[heads[own]],
        table.num_elements[heads[own]] * element_bytes[table.tensor[heads[own]]],
        table.num_ranks,
    )
    division = _Shares(loads.astype(np.int64).tolist(), element_bytes)
    division.add_rows(table, heads[own])
    pieces = [(table.start[heads[at]], table.length[heads[at]], rows[first[at] : first[at] + holders[at]])
              for at in np.flatnonzero(plain & (holders > 1))]  # fmt: skip
    for tensor in tangled.tolist():
        pieces += _untangle(table, rows[table.tensor[rows] == tensor])
    sizes = [-int(length.prod()) * int(element_bytes[table.tensor[blocks[0]]]) for _, length, blocks in pieces]
    for at in sorted(range(len(pieces)), key=lambda at: (sizes[at], at)):
        division.share(table, *pieces[at])
    return division.shares(table)


def _firsts(table: BlockTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places in rows sorted by tensor and box where another tensor or box begins."""
    if not len(rows):
        return rows
    changes = table.tensor[rows[1:]] != table.tensor[rows[:-1]]
    changes = changes | (table.start[rows[1:]] != table.start[rows[:-1]]).any(axis=1)
    changes = changes | (table.length[rows[1:]] != table.length[rows[:-1]]).any(axis=1)
    return np.append(0, np.flatnonzero(changes) + 1)


class _Shares:
    """The shares so far, and how many bytes each rank has to send."""

    def __init__(self, loads: list[int], element_bytes: Int64s) -> None:
        self._loads = loads
        self._element_bytes = element_bytes
        self._blocks: list[Int64s] = []
        self._starts: list[Int64s] = []
        self._lengths: list[Int64s] = []

    def add_rows(self, table: BlockTable, rows: NDArray[np.int64]) -> None:
        self._blocks.append(rows)
        self._starts.append(table.start[rows])
        self._lengths.append(table.length[rows])

    def share(self, table: BlockTable, start: Int64s, length: Int64s, blocks: NDArray[np.int64]) -> None:
        """Cuts a box among the blocks of several ranks that hold it, or gives it to the rank with the least to do."""
        element_bytes = int(self._element_bytes[table.tensor[blocks[0]]])
        ranks, loads = table.rank[blocks].tolist(), self._loads
        order = sorted(range(len(ranks)), key=lambda at: (loads[ranks[at]], ranks[at]))
        lengths = length.tolist()
        num_bytes = int(length.prod()) * element_bytes
        if num_bytes < _MIN_SHARED_BYTES or len(ranks) == 1:
            loads[ranks[order[0]]] += num_bytes
            self._add(blocks[order[:1]], start[None], length[None])
            return
        # The first dimension that is long enough: its parts are contiguous.
        dim = next((d for d, size in enumerate(lengths) if size >= len(ranks)), lengths.index(max(lengths)))
        quotient, remainder = divmod(lengths[dim], len(ranks))
        sizes = [quotient + (part < remainder) for part in range(len(ranks)) if quotient or part < remainder]
        starts, part_lengths = np.tile(start, (len(sizes), 1)), np.tile(length, (len(sizes), 1))
        starts[:, dim] += np.cumsum([0, *sizes[:-1]])
        part_lengths[:, dim] = sizes
        for at, size in zip(order, sizes, strict=False):  # the longer parts come first
            loads[ranks[at]] += num_bytes // lengths[dim] * size
        self._add(blocks[order[: len(sizes)]], starts, part_lengths)

    def _add(self, blocks: Int64s, starts: Int64s, lengths: Int64s) -> None:
        self._blocks.append(blocks)
        self._starts.append(starts)
        self._lengths.append(lengths)

    def shares(self, table: BlockTable) -> Shares:
        block = np.concatenate(self._blocks)
        order = np.argsort(table.tensor[block], kind="stable")
        return Shares(block[order], np.concatenate(self._starts)[order], np.concatenate(self._lengths)[order])


def _untangle(table: BlockTable, rows: NDArray[np.int64]) -> list[tuple[Int64s, Int64s, NDArray[np.int64]]]:
    """Disjoint (start, length, blocks that hold it) of one tensor whose blocks overlap without being equal.

    The grid of all borders cuts the blocks into cells that are wholly inside or outside of each.
    """
    cells = [(np.zeros(0, np.int64), np.zeros(0, np.int64), rows)]
    for dim in range(table.start.shape[1]):
        finer = []
        for start, length, blocks in cells:
            first, stop = table.start[blocks, dim], table.stop[blocks, dim]
            borders = np.unique(np.concatenate([first, stop]))
            for low, high in itertools.pairwise(borders):
                inside = blocks[(first <= low) & (stop >= high)]
                if len(inside):
                    finer.append((np.append(start, low), np.append(length, high - low), inside))
        cells = finer
    return cells
