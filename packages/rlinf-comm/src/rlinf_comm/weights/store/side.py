"""What sender and receiver of a weight store have in common: one rank's view of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlinf_comm import _C
from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import BufferSpec, TensorSpec
from rlinf_comm.weights.plan import Piece, ReshardPlan
from rlinf_comm.weights.region import BoxRegion, checked_tensors
from rlinf_comm.weights.report import SyncReport
from rlinf_comm.weights.store.memory import ControlWords, WeightStore, align, bytes_of, plan_words, slot_bytes_of
from rlinf_comm.weights.transfer import Part, TransferPrograms

if TYPE_CHECKING:
    import torch

_WAIT_SLICE_S = 0.1


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece that this rank writes or reads."""

    piece: Piece
    place: BoxRegion
    """Where the piece lies in this rank's buffers."""
    index: int
    """Index of the piece among all pieces of the plan."""
    offset: int
    """Bytes from the start of a slot."""
    num_bytes: int
    source: BoxRegion | None
    """For a receiver: where it lies in the sender's buffers; None where it has the memory of another (tied)."""


class StoreSide:
    """What sender and receiver have in common: one rank's view of a store."""

    def __init__(
        self, store: WeightStore, plan: ReshardPlan, rank: int, *, role: Literal["sender", "receiver"]
    ) -> None:
        ranks = plan.src_buffers if role == "sender" else plan.dst_buffers
        if not 0 <= rank < len(ranks):
            raise LayoutError(f"weight store {store.name!r}: {role} rank {rank}; the plan has {len(ranks)}")
        if [store.words.load(index) for index in range(4)] != plan_words(plan):
            raise LayoutError(f"weight store {store.name!r} was created for another plan than the one of {role} {rank}")
        self._store = store
        self._words = store.words
        self._plan = plan
        self._rank = rank
        self._role = role
        self._buffers = ranks[rank]
        pieces = plan.pieces
        self._num_slots = store.address.num_slots
        self._control = ControlWords(plan, len(pieces), self._num_slots)
        self._slot_bytes = slot_bytes_of(pieces)
        self._own = _placed(plan, rank, role)
        self._prepared: tuple[list[tuple[int, ...]], TransferPrograms] | None = None

    def _register(self, first_word: int) -> None:
        """Tells the peers which process this rank is, so that they notice its death."""
        pid, start_ticks = _C.current_process()
        owner = (self._words.load(first_word), self._words.load(first_word + 1))
        if owner[0] not in (0, pid) and _C.is_alive(*owner):
            raise LayoutError(
                f"weight store {self._store.name!r}: {self._role} {self._rank} is process {owner[0]}, which is alive; "
                "one process for each rank"
            )
        self._words.store(first_word, pid)
        self._words.store(first_word + 1, start_ticks)

    def _is_lost(self, first_word: int) -> bool:
        pid, start_ticks = self._words.load(first_word), self._words.load(first_word + 1)
        return pid != 0 and not _C.is_alive(pid, start_ticks)

    def _checked(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's tensors, which are what its layout says, in its order."""
        return checked_tensors(
            f"weight store {self._store.name!r}", f"{self._role} {self._rank}", self._buffers, tensors
        )

    def _transfer(self, tensors: Mapping[str, torch.Tensor]) -> TransferPrograms:
        """The programs for these tensors; made again when their strides change."""
        strides = [tensor.stride() for tensor in tensors.values()]
        if self._prepared is None or self._prepared[0] != strides:
            parts = self._parts()
            self._prepared = (strides, TransferPrograms(parts, tensors, self._store_bytes()))
        return self._prepared[1]

    def _parts(self) -> list[Part]:
        return [
            Part(
                box=placed.piece.box,
                spec=TensorSpec(self._plan.specs[placed.piece.name].shape, placed.piece.dtype),
                place=placed.place,
                store=self._slot_number(placed.piece.src_rank),
                store_offset=placed.offset,
                source=placed.source,
            )
            for placed in self._own
        ]

    def _report(self, policy_version: int, *, wait_s: float, copy_s: float, digest_s: float) -> SyncReport:
        return SyncReport(
            policy_version=policy_version,
            num_bytes=sum(placed.num_bytes for placed in self._own),
            num_tensors=len({placed.piece.name for placed in self._own}),
            wait_s=wait_s,
            copy_s=copy_s,
            digest_s=digest_s,
            **self._counters(),
        )

    def _counters(self) -> dict[str, int]:
        """The counts of a report since the last one."""
        return {}

    def _store_bytes(self) -> list[int]:
        """The sizes of the store buffers of a transfer."""
        last = max((self._slot_number(placed.piece.src_rank) for placed in self._own), default=0)
        return [self._slot_bytes] * (1 + last)

    def _slot_number(self, src_rank: int) -> int:
        """Which of the store buffers of a transfer holds what a source rank hands out."""
        raise NotImplementedError

    def _slot_address(self, slot: int) -> int:
        return self._store.slots_pointer + slot * self._slot_bytes

    def _wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> float | None:
        """Seconds waited; None when the time was up. `is_done` is asked after every change, and every 0.1 s."""
        start_s = time.monotonic()
        while True:
            seen = self._words.sequence()
            if is_done():
                return time.monotonic() - start_s
            left_s = start_s + timeout_s - time.monotonic()
            if left_s <= 0:
                return None
            self._words.wait(seen, min(left_s, _WAIT_SLICE_S))


def _placed(plan: ReshardPlan, rank: int, role: Literal["sender", "receiver"]) -> list[PlacedPiece]:
    """The pieces of a rank, each once for a sender and as often as a receiver stores it."""
    places, offset = {}, 0
    for index, piece in enumerate(plan.pieces):
        places[piece] = (index, offset, bytes_of(piece))
        offset += align(places[piece][2])
    table, is_sender = plan.table, role == "sender"
    sources = _places(plan.src_buffers, table.src_rank, table.src_buffer, table.src_offset, table.src_strides)
    targets = _places(plan.dst_buffers, table.dst_rank, table.dst_buffer, table.dst_offset, table.dst_strides)
    own: dict[object, PlacedPiece] = {}
    for row in np.flatnonzero((table.src_rank if is_sender else table.dst_rank) == rank).tolist():
        piece = plan.piece_of_moves[row]
        index, offset, num_bytes = places[piece]
        source = sources(row, piece.box.shape)
        if is_sender:
            own[piece] = PlacedPiece(piece, source, index, offset, num_bytes, None)
        else:
            target = targets(row, piece.box.shape)
            own[row] = PlacedPiece(piece, target, index, offset, num_bytes, None if table.tied[row] else source)
    return list(own.values())


def _places(
    buffers: tuple[dict[str, BufferSpec], ...], rank: Any, buffer: Any, offset: Any, strides: Any
) -> Callable[[int, tuple[int, ...]], BoxRegion]:
    """Where the box of a move lies at one of its ends, given that end's columns of the table."""
    names = [list(of_rank) for of_rank in buffers]

    def place(row: int, shape: tuple[int, ...]) -> BoxRegion:
        of_box = strides[row, strides.shape[1] - len(shape) :].tolist()
        return BoxRegion(names[rank[row]][buffer[row]], int(offset[row]), shape, tuple(of_box))

    return place
