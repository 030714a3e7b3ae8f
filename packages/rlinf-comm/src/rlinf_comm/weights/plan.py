"""Plans which box each rank sends to each other rank: the intersection of two layouts.

Every destination element arrives exactly once, directly from a rank that stores it. If several ranks store the same
box, they share the work of sending it (sharing.py). A plan is computed once for two layouts and then cached: only
addresses change from one sync to the next.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlinf_comm.copies import CopyTable
from rlinf_comm.errors import LayoutError
from rlinf_comm.records import record
from rlinf_comm.weights.coalesce import copy_table
from rlinf_comm.weights.layout import Box, BufferSpec, Layout, TensorSpec
from rlinf_comm.weights.sharing import Shares, share_out
from rlinf_comm.weights.table import BlockTable, Int32s, Int64s

_VERSION = b"rlinf reshard plan 1"
"""Version of the planning algorithm. It is part of every plan's digest, so that processes with equal digests have equal
plans."""
_NUM_KEPT = 8
"""Number of plans in the cache: a run has one for each pair of roles."""
_MAX_PAIRS = 1 << 21
"""Number of pairs of boxes that are intersected at a time."""


@record
@dataclass(frozen=True, slots=True)
class Move:
    """One box of one tensor, from one rank to another."""

    name: str
    box: Box
    src_rank: int
    dst_rank: int


@record
@dataclass(frozen=True, slots=True)
class Piece:
    """A box that a source rank sends once, to every rank that needs exactly this box in this dtype."""

    name: str
    box: Box
    src_rank: int
    dtype: str
    """Dtype of the destination's buffer."""


@record
@dataclass(frozen=True, eq=False)
class MoveTable:
    """m moves, sorted by tensor, destination, source and start; boxes have leading dimensions of length 1 up to D."""

    tensor: Int32s
    """[m] index of the tensor in the order of the names."""
    src_rank: Int32s
    dst_rank: Int32s
    src_buffer: Int32s
    """[m] counted in its rank."""
    dst_buffer: Int32s
    start: Int64s
    """[m, D] in the canonical tensor."""
    length: Int64s
    """[m, D]"""
    src_offset: Int64s
    """[m] elements"""
    dst_offset: Int64s
    src_strides: Int64s
    """[m, D] elements"""
    dst_strides: Int64s
    tied: NDArray[np.bool_]
    """[m] True: into the memory of a tensor of another name, which has its own move."""

    def select(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> MoveTable:
        """Some of the moves, by a mask or by indices in any order."""
        return MoveTable(**{name: column[rows] for name, column in vars(self).items()})


@record
@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """All moves from one layout to another. Plain values that can be sent through a channel; built once per pair of
    layouts."""

    specs: dict[str, TensorSpec]
    """The canonical tensors, sorted by name."""
    src_buffers: tuple[dict[str, BufferSpec], ...]
    """The buffers of each source rank by name, in the order in which buffer numbers count them."""
    dst_buffers: tuple[dict[str, BufferSpec], ...]
    table: MoveTable
    min_num_bytes: int
    """The minimum for any plan: the size of the destination's blocks, each element once; `num_bytes` equals it."""
    digest: str
    """SHA-256 of the two layouts, hexadecimal: two processes with equal digests have equal plans."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReshardPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def num_src_ranks(self) -> int:
        return len(self.src_buffers)

    @property
    def num_dst_ranks(self) -> int:
        return len(self.dst_buffers)

    # --- bytes --------------------------------------------------------------------------------------------------------

    @cached_property
    def bytes_of_moves(self) -> Int64s:
        """[m] bytes that arrive, in the destination's dtype."""
        return self.table.length.prod(axis=1) * element_bytes(self.dst_buffers)[self._dst_numbers]

    @property
    def num_bytes(self) -> int:
        """Bytes that arrive, summed over the destination ranks."""
        return int(self.bytes_of_moves[~self.table.tied].sum())

    @property
    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """Bytes for each (source rank, destination rank) that exchange any."""
        moving = ~self.table.tied
        pairs = self.table.src_rank[moving] * self.num_dst_ranks + self.table.dst_rank[moving].astype(np.int64)
        totals = np.zeros(self.num_src_ranks * self.num_dst_ranks, np.int64)
        np.add.at(totals, pairs, self.bytes_of_moves[moving])
        return {divmod(int(pair), self.num_dst_ranks): int(totals[pair]) for pair in np.flatnonzero(totals)}

    def padded_buffers(self, dst_rank: int) -> tuple[str, ...]:
        """The buffers of a destination rank that the moves do not fill completely."""
        table, specs = self.table, self.dst_buffers[dst_rank]
        own = (table.dst_rank == dst_rank) & ~table.tied
        filled = np.zeros(len(specs), np.int64)
        np.add.at(filled, table.dst_buffer[own], table.length[own].prod(axis=1))
        return tuple(
            name for (name, spec), count in zip(specs.items(), filled, strict=True) if count < spec.num_elements
        )

    # --- for executors ------------------------------------------------------------------------------------------------

    def copies(self, *, dst_rank: int, src_rank: int | None = None) -> CopyTable:
        """The copies that fill the buffers of a destination rank, from one source rank or from all.

        `dst_buffer` counts the destination's buffers in the order of their names (`dst_buffers[dst_rank]`),
        `src_buffer` those of `src_rank`, or, without one, those of all source ranks one after the other. Copies that
        continue each other are one; they come in the order of the source's memory.
        """
        if not 0 <= dst_rank < self.num_dst_ranks or not 0 <= (src_rank or 0) < self.num_src_ranks:
            raise LayoutError(
                f"no copies from source rank {src_rank} to destination rank {dst_rank}: the plan is for "
                f"{self.num_src_ranks} source and {self.num_dst_ranks} destination ranks"
            )
        mask = (self.table.dst_rank == dst_rank) & ~self.table.tied
        if src_rank is not None:
            mask &= self.table.src_rank == src_rank
        table = self.table.select(mask)
        sources = self.src_buffers if src_rank is None else (self.src_buffers[src_rank],)
        first = _first_numbers(self.src_buffers)
        src_buffer = table.src_buffer.astype(np.int64)
        if src_rank is None:
            src_buffer += first[table.src_rank]
        copies = copy_table(table, src_buffer, _dtypes(sources), _dtypes((self.dst_buffers[dst_rank],)))
        return replace(copies, src_bytes=_num_bytes(sources), dst_bytes=_num_bytes((self.dst_buffers[dst_rank],)))

    # --- for people ---------------------------------------------------------------------------------------------------

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All moves as records, in the order of the table."""
        table, names = self.table, tuple(self.specs)
        num_dims = [len(spec.shape) for spec in self.specs.values()]
        size = table.start.shape[1]
        columns = (table.tensor, table.start, table.length, table.src_rank, table.dst_rank)
        return tuple(
            Move(names[tensor], _box(start, length, size - num_dims[tensor]), src_rank, dst_rank)
            for tensor, start, length, src_rank, dst_rank in zip(*(column.tolist() for column in columns), strict=True)
        )

    @cached_property
    def piece_of_moves(self) -> tuple[Piece, ...]:
        """The piece that each move sends; several moves to different ranks may send the same one."""
        dtypes = _dtypes(self.dst_buffers)
        return tuple(
            Piece(move.name, move.box, move.src_rank, dtypes[number])
            for move, number in zip(self.moves, self._dst_numbers.tolist(), strict=True)
        )

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces that the sources send, each once for all of its destinations; in the order of the moves."""
        return tuple(dict.fromkeys(self.piece_of_moves))

    @cached_property
    def _dst_numbers(self) -> Int64s:
        """[m] destination buffer, counted over all ranks."""
        return _first_numbers(self.dst_buffers)[self.table.dst_rank] + self.table.dst_buffer


def _box(start: list[int], length: list[int], num_padded: int) -> Box:
    return Box(tuple(start[num_padded:]), tuple(length[num_padded:]))


def _first_numbers(ranks: Sequence[dict[str, BufferSpec]]) -> Int64s:
    """The number of each rank's first buffer, when the buffers are counted over all ranks."""
    return np.cumsum([0, *map(len, ranks)], dtype=np.int64)


def _dtypes(ranks: Sequence[dict[str, BufferSpec]]) -> list[str]:
    return [buffer.dtype for buffers in ranks for buffer in buffers.values()]


def element_bytes(ranks: Sequence[dict[str, BufferSpec]]) -> Int64s:
    """Bytes of one element of every buffer, the buffers counted over all ranks."""
    return _sizes(_dtypes(ranks))


def _num_bytes(ranks: Sequence[dict[str, BufferSpec]]) -> Int64s:
    """The size of every buffer, counted over all ranks."""
    num_elements = [buffer.num_elements for buffers in ranks for buffer in buffers.values()]
    return np.array(num_elements, np.int64) * element_bytes(ranks)


def _sizes(dtypes: Sequence[str]) -> Int64s:
    sizes = {dtype: TensorSpec((), dtype).element_bytes for dtype in set(dtypes)}
    return np.array([sizes[dtype] for dtype in dtypes], np.int64)


# --- making a plan ----------------------------------------------------------------------------------------------------

_kept: OrderedDict[str, ReshardPlan] = OrderedDict()
_kept_lock = threading.Lock()


def reshard_plan(src: Layout, dst: Layout) -> ReshardPlan:
    """Plans the moves from `src` to `dst`. The last few plans are cached and returned again for equal layouts.

    Raises:
        LayoutError: a tensor is only in one of them, differs in shape or dtype, or the source does not store everything
            that the destination needs; names the tensor.
    """
    digest = hashlib.sha256(_VERSION + bytes.fromhex(src.digest) + bytes.fromhex(dst.digest)).hexdigest()
    with _kept_lock:
        if digest in _kept:
            _kept.move_to_end(digest)
            return _kept[digest]
    _check_same_tensors(src, dst)
    reshard = ReshardPlan(
        specs=dict(sorted(src.specs.items())),
        src_buffers=tuple(dict(rank.buffers) for rank in src.ranks),
        dst_buffers=tuple(dict(rank.buffers) for rank in dst.ranks),
        table=_moves(src.table, dst.table),
        min_num_bytes=_num_stored_bytes(dst.table),
        digest=digest,
    )
    with _kept_lock:
        _kept[digest] = reshard
        while len(_kept) > _NUM_KEPT:
            _kept.popitem(last=False)
    return reshard


def _check_same_tensors(src: Layout, dst: Layout) -> None:
    there, here = src.table, dst.table
    if (there.names, there.dtypes) == (here.names, here.dtypes) and np.array_equal(there.shapes, here.shapes):
        return
    for name in sorted(src.specs.keys() | dst.specs.keys()):
        there, here = src.specs.get(name), dst.specs.get(name)
        if there is None:
            raise LayoutError(f"{name}: the destination has this tensor, the source does not")
        if here is None:
            raise LayoutError(f"{name}: the source has this tensor, the destination does not")
        if there.shape != here.shape:
            raise LayoutError(f"{name}: the shape is {there.shape} at the source and {here.shape} at the destination")
        if there.dtype != here.dtype:
            raise LayoutError(f"{name}: the dtype is {there.dtype} at the source and {here.dtype} at the destination")


def _num_stored_bytes(table: BlockTable) -> int:
    own = ~table.tied()
    return int((table.num_elements * _sizes(table.buffer_dtypes)[table.global_buffer])[own].sum())


def _moves(src: BlockTable, dst: BlockTable) -> MoveTable:
    shares = share_out(src, _sizes(src.dtypes))
    dst_blocks = np.flatnonzero(dst.num_elements > 0)
    share, block, start, stop = _intersections(src, shares, dst, dst_blocks)
    _check_covered(src, shares, dst, dst_blocks, block, (stop - start).prod(axis=1))
    source = shares.block[share]
    columns = (dst.tensor[block], dst.rank[block], src.rank[source], *start.T, dst.buffer[block], dst.offset[block])
    order = np.lexsort(columns[::-1])
    source, block, start, stop = source[order], block[order], start[order], stop[order]
    return MoveTable(
        tensor=dst.tensor[block],
        src_rank=src.rank[source],
        dst_rank=dst.rank[block],
        src_buffer=src.buffer[source],
        dst_buffer=dst.buffer[block],
        start=start,
        length=stop - start,
        src_offset=_offset(src, source, start),
        dst_offset=_offset(dst, block, start),
        src_strides=src.strides[source],
        dst_strides=dst.strides[block],
        tied=dst.tied()[block],
    )


def _offset(table: BlockTable, rows: Int64s, start: Int64s) -> Int64s:
    return table.offset[rows] + ((start - table.start[rows]) * table.strides[rows]).sum(axis=1)


def _intersections(
    src: BlockTable, shares: Shares, dst: BlockTable, dst_blocks: Int64s
) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """(share, destination block, start, stop) for every share and block of one tensor that have elements in common."""
    share_tensor = src.tensor[shares.block]
    first = np.searchsorted(share_tensor, dst.tensor[dst_blocks], "left")
    counts = np.searchsorted(share_tensor, dst.tensor[dst_blocks], "right") - first
    batches = []
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(dst_blocks):
        done = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + _MAX_PAIRS, "right")))
        count = counts[begin:end]
        block = np.repeat(dst_blocks[begin:end], count)
        within = np.arange(len(block)) - np.repeat(np.cumsum(count) - count, count)
        share = np.repeat(first[begin:end], count) + within
        start = np.maximum(shares.start[share], dst.start[block])
        stop = np.minimum(shares.start[share] + shares.length[share], dst.stop[block])
        common = (stop > start).all(axis=1)
        batches.append((share[common], block[common], start[common], stop[common]))
        begin = end
    if not batches:
        none = np.zeros(0, np.int64)
        return none, none, np.zeros_like(src.start[:0]), np.zeros_like(src.start[:0])
    share, block, start, stop = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return share, block, start, stop


def _check_covered(
    src: BlockTable, shares: Shares, dst: BlockTable, dst_blocks: Int64s, block: Int64s, num_elements: Int64s
) -> None:
    arrived = np.zeros(len(dst.tensor), np.int64)
    np.add.at(arrived, block, num_elements)  # the shares are disjoint
    short = dst_blocks[arrived[dst_blocks] != dst.num_elements[dst_blocks]]
    if not len(short):
        return
    row = int(short[0])
    tensor = int(dst.tensor[row])
    num_padded = dst.start.shape[1] - int(dst.num_dims[tensor])
    needed = _box(dst.start[row].tolist(), dst.length[row].tolist(), num_padded)
    missing = [needed]
    for at in np.flatnonzero(src.tensor[shares.block] == tensor):
        stored = _box(shares.start[at].tolist(), shares.length[at].tolist(), num_padded)
        missing = [rest for piece in missing for rest in piece.minus(stored)]
    raise LayoutError(
        f"{dst.names[tensor]}: destination rank {dst.rank[row]} needs {needed}, but no source rank stores {missing[0]} "
        "of it"
    )
