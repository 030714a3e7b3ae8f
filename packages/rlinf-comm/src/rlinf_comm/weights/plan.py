"""Which box goes from which rank to which: the intersection of two layouts.

Every destination byte arrives exactly once, straight from a rank that stores it. Where several ranks store the same box
they share it, so that none of them becomes the bottleneck.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass

from rlinf_comm.codec import pack
from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import Box, Layout, TensorSpec

_MIN_SHARED_BYTES = 64 << 10
"""A box below this is not cut up among its replicas: the cost of a move is no longer its bytes."""


@dataclass(frozen=True, slots=True)
class Move:
    """One box of one tensor, from one rank to another."""

    name: str
    box: Box
    src_rank: int
    dst_rank: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that a source rank hands out once, to every rank that needs exactly this box."""

    name: str
    box: Box
    src_rank: int


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """All moves from one layout to another. Plain values that cross a channel; built once per pair of layouts."""

    src: Layout
    dst: Layout
    moves: tuple[Move, ...]
    """Sorted by tensor, destination, source and box."""
    digest: str
    """SHA-256 of everything above, hexadecimal: two processes with equal digests have equal plans."""

    @property
    def num_bytes(self) -> int:
        """That arrive, summed over destination ranks."""
        return sum(self.bytes_by_pair.values())

    @property
    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """Bytes for each (source rank, destination rank) that exchange any."""
        totals: dict[tuple[int, int], int] = defaultdict(int)
        for move in self.moves:
            totals[move.src_rank, move.dst_rank] += self.bytes_of(move)
        return dict(totals)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What the sources hand out, each once however many destinations it has; in the order of the moves."""
        return tuple(dict.fromkeys(Piece(move.name, move.box, move.src_rank) for move in self.moves))

    def bytes_of(self, part: Move | Piece) -> int:
        return part.box.num_elements * self.src.specs[part.name].element_bytes


def plan(src: Layout, dst: Layout) -> ReshardPlan:
    """Plans the way from `src` to `dst`.

    Raises:
        LayoutError: a tensor is only in one of them, differs in shape or dtype, or the source stores not all that the
            destination needs; names the tensor.
    """
    _check_same_tensors(src, dst)
    owners = _share_out(src)
    moves = []
    for dst_rank, blocks in enumerate(dst.ranks):
        for block in blocks:
            moves += _moves_to(block.name, block.box, dst_rank, owners[block.name])
    ordered = tuple(sorted(moves, key=lambda move: (move.name, move.dst_rank, move.src_rank, move.box.start)))
    digest = hashlib.sha256(pack([_plain(src), _plain(dst), ordered])).hexdigest()
    return ReshardPlan(src, dst, ordered, digest)


def _plain(layout: Layout) -> list[object]:
    return [dict(sorted(layout.specs.items())), layout.ranks]


def _check_same_tensors(src: Layout, dst: Layout) -> None:
    for name in sorted(src.specs.keys() | dst.specs.keys()):
        there, here = src.specs.get(name), dst.specs.get(name)
        if there is None:
            raise LayoutError(f"{name}: the destination has this tensor, the source has not")
        if here is None:
            raise LayoutError(f"{name}: the source has this tensor, the destination has not")
        if there.shape != here.shape:
            raise LayoutError(f"{name}: the shape is {there.shape} at the source and {here.shape} at the destination")
        if there.dtype != here.dtype:
            raise LayoutError(f"{name}: the dtype is {there.dtype} at the source and {here.dtype} at the destination")


def _share_out(layout: Layout) -> dict[str, list[tuple[Box, int]]]:
    """For each tensor disjoint boxes with the rank that hands each out: together, all that is stored of the tensor."""
    holders: dict[str, dict[Box, list[int]]] = {name: defaultdict(list) for name in layout.specs}
    for rank, blocks in enumerate(layout.ranks):
        for block in blocks:
            holders[block.name][block.box].append(rank)
    loads = [0] * layout.num_ranks
    owners: dict[str, list[tuple[Box, int]]] = {}
    # Large tensors first: the small ones then fill up what is uneven.
    for name in sorted(layout.specs, key=lambda name: (-layout.specs[name].num_bytes, name)):
        owners[name] = []
        covered: list[Box] = []
        for box, ranks in holders[name].items():
            pieces = [box] if box.num_elements else []
            for other in covered:
                pieces = [rest for piece in pieces for rest in piece.minus(other)]
            covered.append(box)
            for piece in pieces:
                owners[name] += _share_box(piece, ranks, layout.specs[name], loads)
    return owners


def _share_box(box: Box, ranks: list[int], spec: TensorSpec, loads: list[int]) -> list[tuple[Box, int]]:
    """Cuts a box among the ranks that store it, or gives it to the one with the least to do."""
    element_bytes = spec.element_bytes
    parts = [box]
    if len(ranks) > 1 and box.num_elements * element_bytes >= _MIN_SHARED_BYTES:
        # The first dimension that is long enough: its parts are contiguous.
        lengths = box.shape
        dim = next((dim for dim, length in enumerate(lengths) if length >= len(ranks)), lengths.index(max(lengths)))
        parts = list(box.split(dim, len(ranks)))
    shared = []
    free = list(ranks)
    for part in parts:  # the longer parts come first
        rank = min(free, key=lambda rank: (loads[rank], rank))
        free.remove(rank)
        loads[rank] += part.num_elements * element_bytes
        shared.append((part, rank))
    return shared


def _moves_to(name: str, wanted: Box, dst_rank: int, owners: list[tuple[Box, int]]) -> list[Move]:
    moves = []
    num_found = 0
    for box, src_rank in owners:
        common = wanted.intersect(box)
        if common is not None:
            moves.append(Move(name, common, src_rank, dst_rank))
            num_found += common.num_elements
    if num_found != wanted.num_elements:  # the owners' boxes are disjoint
        missing = [wanted]
        for box, _ in owners:
            missing = [rest for piece in missing for rest in piece.minus(box)]
        raise LayoutError(
            f"{name}: destination rank {dst_rank} needs {wanted}, but no source rank stores {missing[0]} of it"
        )
    return moves
