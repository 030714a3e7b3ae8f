"""Weights for several ranks of a node: they come to the node once, and its ranks take them from there.

A reshard plan becomes two. In the first one the nodes are the destination ranks: each keeps every box that any of its
ranks takes, once, in one row of memory for each dtype. In the second, one for each node, that memory is the only source
rank, and the ranks of the node are the destinations.

Example: 2 trainer ranks on one node, and on another 4 engine ranks, which are 2 replicas of 2. The trainers send one
model to the node, and each of its ranks copies half a model from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlinf_comm.weights.layout import BufferSpec, TensorSpec
from rlinf_comm.weights.plan import MoveTable, ReshardPlan
from rlinf_comm.weights.table import Int64s

_ALIGNMENT_BYTES = 64


def crossing_plan(reshard: ReshardPlan, nodes: Sequence[int]) -> ReshardPlan:
    """From the source ranks to the nodes; destination rank i is the i-th of the nodes, which are sorted.

    Args:
        nodes: that of each destination rank of `reshard`.
    """
    memories = [_NodeStorage.by(reshard, nodes, node) for node in sorted(set(nodes))]
    tables = [one.arriving(number) for number, one in enumerate(memories)]
    columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in vars(tables[0])}
    return _plan(reshard, MoveTable(**columns), reshard.src_buffers, tuple(one.buffers for one in memories), nodes)


def spread_plan(reshard: ReshardPlan, nodes: Sequence[int], node: int) -> ReshardPlan:
    """From a node's memory to its ranks, which are counted among those of the node."""
    memory = _NodeStorage.by(reshard, nodes, node)
    ranks = tuple(rank for rank, of_rank in enumerate(nodes) if of_rank == node)
    targets = tuple(reshard.dst_buffers[rank] for rank in ranks)
    return _plan(reshard, memory.leaving(ranks), (memory.buffers,), targets, (*nodes, node))


@dataclass(frozen=True, eq=False)
class _NodeStorage:
    """What a node keeps: p boxes, for the m moves to its ranks."""

    moves: MoveTable
    buffers: dict[str, BufferSpec]
    """A row of memory for each dtype, which is its name."""
    first: Int64s
    """[p] a move that takes the box."""
    of_move: Int64s
    """[m] the box that each move takes."""
    buffer: Int64s
    """[p] number of its row."""
    offset: Int64s
    """[p] elements"""
    strides: Int64s
    """[p, D] elements"""
    tied: np.ndarray
    """[p] whether it is kept where another box is, as it is on the ranks."""

    @classmethod
    def by(cls, reshard: ReshardPlan, nodes: Sequence[int], node: int) -> _NodeStorage:
        moves = reshard.table.select(np.asarray(nodes)[reshard.table.dst_rank] == node)
        dtype_of = [[buffer.dtype for buffer in buffers.values()] for buffers in reshard.dst_buffers]
        ends = zip(moves.dst_rank.tolist(), moves.dst_buffer.tolist(), strict=True)
        dtypes, dtype = np.unique([dtype_of[rank][buffer] for rank, buffer in ends], return_inverse=True)
        columns = (dtype, moves.tensor, moves.src_rank, *moves.start.T, *moves.length.T)
        _, first, of_move = np.unique(np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True)
        of_move = of_move.reshape(-1)
        same = of_move[_owners(moves)[first]]
        is_tied = np.ones(len(first), np.bool_)
        np.logical_and.at(is_tied, of_move, moves.tied)
        is_tied &= same != np.arange(len(first))
        offset, strides, buffers = np.zeros(len(first), np.int64), _row_major(moves.length[first]), {}
        for number, name in enumerate(dtypes.tolist()):
            step = max(1, _ALIGNMENT_BYTES // TensorSpec((), name).element_bytes)
            own = (dtype[first] == number) & ~is_tied
            sizes = -(-moves.length[first[own]].prod(axis=1) // step) * step
            offset[own] = np.cumsum(sizes) - sizes
            buffers[name] = BufferSpec((int(sizes.sum()),), name)
        offset[is_tied] = offset[same[is_tied]]
        return cls(moves, buffers, first, of_move, dtype[first], offset, strides, is_tied)

    def arriving(self, number: int) -> MoveTable:
        """The boxes from their sources to this node, the destination of that number."""
        moves = self.moves
        return MoveTable(
            tensor=moves.tensor[self.first],
            src_rank=moves.src_rank[self.first],
            dst_rank=np.full(len(self.first), number, np.int32),
            src_buffer=moves.src_buffer[self.first],
            dst_buffer=self.buffer.astype(np.int32),
            start=moves.start[self.first],
            length=moves.length[self.first],
            src_offset=moves.src_offset[self.first],
            dst_offset=self.offset,
            src_strides=moves.src_strides[self.first],
            dst_strides=self.strides,
            tied=self.tied,
        )

    def leaving(self, ranks: Sequence[int]) -> MoveTable:
        """The moves from this node to its ranks."""
        moves = self.moves
        return MoveTable(
            tensor=moves.tensor,
            src_rank=np.zeros_like(moves.src_rank),
            dst_rank=np.searchsorted(ranks, moves.dst_rank).astype(np.int32),
            src_buffer=self.buffer[self.of_move].astype(np.int32),
            dst_buffer=moves.dst_buffer,
            start=moves.start,
            length=moves.length,
            src_offset=self.offset[self.of_move],
            dst_offset=moves.dst_offset,
            src_strides=self.strides[self.of_move],
            dst_strides=moves.dst_strides,
            tied=moves.tied,
        )


def _owners(moves: MoveTable) -> Int64s:
    """[m] for a tied move the one that fills its memory; for all others, and where none fills just this, itself."""
    columns = (moves.dst_rank, moves.dst_buffer, moves.dst_offset, *moves.start.T, *moves.length.T)
    memory = np.stack((*columns, *moves.dst_strides.T), axis=1)
    owners = np.arange(len(memory))
    filling = {row.tobytes(): number for number, row in enumerate(memory) if not moves.tied[number]}
    for number in map(int, np.flatnonzero(moves.tied)):
        owners[number] = filling.get(memory[number].tobytes(), number)
    return owners


def _row_major(length: Int64s) -> Int64s:
    """[p, D] strides of dense boxes of these lengths."""
    behind = np.concatenate([length[:, 1:], np.ones((len(length), 1), np.int64)], axis=1)
    return np.ascontiguousarray(np.cumprod(behind[:, ::-1], axis=1)[:, ::-1])


def _plan(
    reshard: ReshardPlan,
    table: MoveTable,
    src_buffers: tuple[dict[str, BufferSpec], ...],
    dst_buffers: tuple[dict[str, BufferSpec], ...],
    made_for: Sequence[int],
) -> ReshardPlan:
    columns = (table.tensor, table.dst_rank, table.src_rank, *table.start.T)
    table = table.select(np.lexsort(columns[::-1]))
    what = f"{reshard.digest} {len(src_buffers)} {list(made_for)}"
    node_plan = ReshardPlan(
        specs=reshard.specs,
        src_buffers=src_buffers,
        dst_buffers=dst_buffers,
        table=table,
        min_num_bytes=0,
        digest=hashlib.sha256(what.encode()).hexdigest(),
    )
    return replace(node_plan, min_num_bytes=node_plan.num_bytes)
