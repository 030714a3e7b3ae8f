"""Hands weights from the ranks that train them to the ranks that serve them, through shared memory, attested.

A store has two slots. A sender writes version v into one while receivers may still read version v - 1 from the other;
it waits before it overwrites a version that a receiver has not taken. Each piece of a reshard plan (a box that some
receiver needs) lies dense in a slot, in the dtype of its destination, with the version and the digest that the sender
computed from its own tensor.

A receiver copies its boxes from the slot straight into its own tensors, and then computes the digests of *those
tensors*. So what is checked is what will be served: a torn copy, a flipped byte in the store, a stale or a missing
piece all end in WeightMismatchError with the names of the tensors, and never in a policy that is silently wrong.

Control words (one writer each, see csrc/include/rlinf/comm/shared_words.h):
    header    plan digest (4 words)
    sender    pid, start time, number of publications, version in slot 0, version in slot 1
    receiver  pid, start time, version wanted, version served
    piece     for each slot: version, digest (2 words)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlinf_comm import _C
from rlinf_comm.errors import LayoutError, PeerLost, WeightMismatchError
from rlinf_comm.weights.layout import BufferSpec, TensorSpec
from rlinf_comm.weights.plan import Piece, ReshardPlan
from rlinf_comm.weights.region import Place, check_tensor
from rlinf_comm.weights.transfer import Part, Transfer

if TYPE_CHECKING:
    import torch

NUM_SLOTS = 2
_ALIGNMENT_BYTES = 64
NO_VERSION = -1
_WAIT_SLICE_S = 0.1
WORD_MODULUS = 1 << 64


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightStoreAddress:
    """How a process of the same machine and user opens a store. Valid while the creating WeightStore object lives."""

    name: str
    creator_pid: int
    creator_start_ticks: int
    fd: int
    nonce: int
    num_words: int
    """Control words before the slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """One publish() or receive()."""

    policy_version: int
    num_bytes: int
    """Copied by this rank."""
    num_tensors: int
    """Of which this rank copied any part."""
    wait_s: float
    """For the peers."""
    copy_s: float
    """A sender's with the digests, which it computes in the same pass."""
    digest_s: float
    """A receiver's, over what it is about to serve; 0.0 for a sender."""


class ControlWords:
    """Where each control word of a plan's store is."""

    def __init__(self, plan: ReshardPlan, num_pieces: int) -> None:
        self._receivers = 4 + 5 * plan.num_src_ranks
        self._pieces = self._receivers + 4 * plan.num_dst_ranks
        self._num_pieces = num_pieces
        self.num_words = self._pieces + NUM_SLOTS * 3 * num_pieces

    def sender(self, src_rank: int) -> int:
        return 4 + 5 * src_rank

    def num_published(self, src_rank: int) -> int:
        return self.sender(src_rank) + 2

    def slot_version(self, src_rank: int, slot: int) -> int:
        return self.sender(src_rank) + 3 + slot

    def receiver(self, dst_rank: int) -> int:
        return self._receivers + 4 * dst_rank

    def wanted(self, dst_rank: int) -> int:
        return self.receiver(dst_rank) + 2

    def served(self, dst_rank: int) -> int:
        return self.receiver(dst_rank) + 3

    def piece(self, slot: int, index: int) -> int:
        """Of the version; the digest's two words follow."""
        return self._pieces + 3 * (slot * self._num_pieces + index)


def _plan_words(plan: ReshardPlan) -> list[int]:
    """The plan's digest as four signed words."""
    raw = bytes.fromhex(plan.digest)
    return [int.from_bytes(raw[start : start + 8], "little", signed=True) for start in range(0, 32, 8)]


def signed_word(word: int) -> int:
    return word - WORD_MODULUS if word >= WORD_MODULUS // 2 else word


class WeightStore:
    """Shared memory for one reshard plan, twice the bytes of its pieces. One process creates it, the others open it."""

    def __init__(self, segment: _C.Segment, address: WeightStoreAddress) -> None:
        """Private: use WeightStore.create or WeightStore.open."""
        self.address = address
        self.words = _C.SharedWords(segment, address.num_words)
        self.slots_pointer = segment.pointer + _slots_offset(address.num_words)
        self._segment = segment

    @classmethod
    def create(cls, plan: ReshardPlan, *, name: str) -> WeightStore:
        """An empty store for `plan`. Memory is only used once weights are published."""
        pieces = plan.pieces
        control = ControlWords(plan, len(pieces))
        slot_bytes = _slot_bytes(pieces)
        segment = _C.Segment.create(name, _slots_offset(control.num_words) + NUM_SLOTS * slot_bytes)
        pid, start_ticks, fd, nonce = segment.address()
        store = cls(
            segment,
            WeightStoreAddress(
                name=name,
                creator_pid=pid,
                creator_start_ticks=start_ticks,
                fd=fd,
                nonce=nonce,
                num_words=control.num_words,
            ),
        )
        for index, word in enumerate(_plan_words(plan)):
            store.words.store(index, word)
        for src_rank in range(plan.num_src_ranks):
            for slot in range(NUM_SLOTS):
                store.words.store(control.slot_version(src_rank, slot), NO_VERSION)
        for dst_rank in range(plan.num_dst_ranks):
            store.words.store(control.wanted(dst_rank), NO_VERSION)
            store.words.store(control.served(dst_rank), NO_VERSION)
        for slot in range(NUM_SLOTS):
            for index in range(len(pieces)):
                store.words.store(control.piece(slot, index), NO_VERSION)
        return store

    @classmethod
    def open(cls, address: WeightStoreAddress) -> WeightStore:
        """The store at `address`, from any process of this machine and user.

        Raises:
            PeerLost: the creating process is gone or has dropped its WeightStore object.
        """
        fields = (address.creator_pid, address.creator_start_ticks, address.fd, address.nonce)
        try:
            segment = _C.Segment.open(fields)
        except ValueError as error:
            raise PeerLost(f"weight store {address.name!r}: {error}") from error
        return cls(segment, address)

    @property
    def name(self) -> str:
        return self.address.name


def _slots_offset(num_words: int) -> int:
    return _align(_C.SharedWords.bytes_needed(num_words))


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _slot_bytes(pieces: tuple[Piece, ...]) -> int:
    return sum(_align(bytes_of(piece)) for piece in pieces)


def bytes_of(piece: Piece) -> int:
    return piece.box.num_elements * TensorSpec((), piece.dtype).element_bytes


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece that this rank writes or reads."""

    piece: Piece
    place: Place
    """In this rank's buffers."""
    index: int
    """Among all pieces of the plan."""
    offset: int
    """In a slot, bytes."""
    num_bytes: int


class StoreSide:
    """What sender and receiver have in common: one rank's view of a store."""

    def __init__(
        self, store: WeightStore, plan: ReshardPlan, rank: int, *, role: Literal["sender", "receiver"]
    ) -> None:
        ranks = plan.src_buffers if role == "sender" else plan.dst_buffers
        if not 0 <= rank < len(ranks):
            raise LayoutError(f"weight store {store.name!r}: {role} rank {rank}; the plan has {len(ranks)}")
        if [store.words.load(index) for index in range(4)] != _plan_words(plan):
            raise LayoutError(f"weight store {store.name!r} was created for another plan than the one of {role} {rank}")
        self._store = store
        self._words = store.words
        self._plan = plan
        self._rank = rank
        self._role = role
        self._buffers = ranks[rank]
        pieces = plan.pieces
        self._control = ControlWords(plan, len(pieces))
        self._slot_bytes = _slot_bytes(pieces)
        self._own = _placed(plan, rank, role)
        self._prepared: tuple[list[tuple[int, ...]], Transfer] | None = None

    def _register(self, first_word: int) -> None:
        """Tells the peers which process this rank is, so that they notice its death."""
        pid, start_ticks = _C.current_process()
        known = (self._words.load(first_word), self._words.load(first_word + 1))
        if known[0] not in (0, pid) and _C.is_alive(*known):
            raise LayoutError(
                f"weight store {self._store.name!r}: {self._role} {self._rank} is process {known[0]}, which is alive; "
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

    def _transfer(self, tensors: Mapping[str, torch.Tensor]) -> Transfer:
        """The programs for these tensors; made again when their strides change."""
        strides = [tensor.stride() for tensor in tensors.values()]
        if self._prepared is None or self._prepared[0] != strides:
            parts = self._parts()
            store_bytes = [self._slot_bytes] * (1 + max((part.store for part in parts), default=0))
            self._prepared = (strides, Transfer(parts, tensors, store_bytes))
        return self._prepared[1]

    def _parts(self) -> list[Part]:
        return [
            Part(
                box=placed.piece.box,
                spec=TensorSpec(self._plan.specs[placed.piece.name].shape, placed.piece.dtype),
                place=placed.place,
                store=self._slot_number(placed.piece.src_rank),
                store_offset=placed.offset,
            )
            for placed in self._own
        ]

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
        offset += _align(places[piece][2])
    table = plan.table
    if role == "sender":
        ranks, columns = table.src_rank, (table.src_buffer, table.src_offset, table.src_strides)
    else:
        ranks, columns = table.dst_rank, (table.dst_buffer, table.dst_offset, table.dst_strides)
    rows = np.flatnonzero(ranks == rank)
    names = list((plan.src_buffers if role == "sender" else plan.dst_buffers)[rank])
    own: dict[object, PlacedPiece] = {}
    for row, number, start, strides in zip(rows.tolist(), *(column[rows].tolist() for column in columns), strict=True):
        piece = plan.piece_of_moves[row]
        shape = piece.box.shape
        place = Place(names[number], start, shape, tuple(strides[len(strides) - len(shape) :]))
        index, offset, num_bytes = places[piece]
        own[piece if role == "sender" else row] = PlacedPiece(piece, place, index, offset, num_bytes)
    return list(own.values())


def checked_tensors(
    where: str, who: str, buffers: Mapping[str, BufferSpec], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a rank, which are what its layout says, in its order.

    Raises:
        WeightMismatchError: one is missing. LayoutError: one is wrong, or not of this layout.
    """
    missing = tuple(sorted(buffers.keys() - tensors.keys()))
    if missing:
        raise WeightMismatchError(f"{where}: {who} misses {listed(missing)}", tensors=missing)
    extra = tuple(sorted(tensors.keys() - buffers.keys()))
    if extra:
        raise LayoutError(f"{listed(extra)}: not in the layout of {who}, so it would not be synchronized")
    for name, spec in buffers.items():
        check_tensor(name, tensors[name], spec)
    return {name: tensors[name] for name in buffers}


def listed(names: Any) -> str:
    """The first few of many names."""
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:5]) + (f" and {len(unique) - 5} more" if len(unique) > 5 else "")
