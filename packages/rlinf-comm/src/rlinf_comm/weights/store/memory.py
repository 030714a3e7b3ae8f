"""The memory of a weight store: slots for pieces, one for each version that it keeps, and words that say what is in
them.

Control words (one writer each, see csrc/include/rlinf/comm/shared_words.h):
    header    plan digest (4 words)
    sender    pid, start time, number of publications, version whose digests are there; for each slot: version, Where
    receiver  pid, start time, version wanted, version served, version being read, version whose digests it waits for
    referenced      for each buffer of each sender, where a version lies that is lent: descriptor, inode, offset
    piece     for each slot: version, digest (2 words)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

from rlinf_comm import _C
from rlinf_comm.errors import PeerLost
from rlinf_comm.records import record
from rlinf_comm.weights.layout import TensorSpec
from rlinf_comm.weights.plan import Piece, ReshardPlan

NUM_SLOTS = 2
"""Versions that a store keeps unless its creator asks for more: the one being received, and the next."""
_ALIGNMENT_BYTES = 64
NO_VERSION = -1
WORD_MODULUS = 1 << 64


@record
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
    num_slots: int
    """Versions that it keeps."""


class Where(IntEnum):
    """Where the version of a slot lies."""

    STORED = 0
    """In the slot."""
    REFERENCED = 1
    """In the sender's tensors, which do not change meanwhile; the slot is kept for it."""
    GONE = 2
    """It was lent, all receivers have taken it, and the sender's tensors have changed since."""


class ControlWords:
    """Indices of the control words of a plan's store."""

    def __init__(self, plan: ReshardPlan, num_pieces: int, num_slots: int) -> None:
        self._sender_words = 4 + 2 * num_slots
        self._receivers = 4 + self._sender_words * plan.num_src_ranks
        self._referenced_buffers = self._receivers + 6 * plan.num_dst_ranks
        self._first_buffers = list(accumulate(map(len, plan.src_buffers), initial=0))
        self._pieces = self._referenced_buffers + 3 * self._first_buffers[-1]
        self._num_pieces = num_pieces
        self.num_words = self._pieces + num_slots * 3 * num_pieces

    def sender(self, src_rank: int) -> int:
        return 4 + self._sender_words * src_rank

    def num_published(self, src_rank: int) -> int:
        return self.sender(src_rank) + 2

    def digested(self, src_rank: int) -> int:
        return self.sender(src_rank) + 3

    def slot_version(self, src_rank: int, slot: int) -> int:
        return self.sender(src_rank) + 4 + 2 * slot

    def slot_where(self, src_rank: int, slot: int) -> int:
        return self.sender(src_rank) + 5 + 2 * slot

    def receiver(self, dst_rank: int) -> int:
        return self._receivers + 6 * dst_rank

    def requested(self, dst_rank: int) -> int:
        return self.receiver(dst_rank) + 2

    def served(self, dst_rank: int) -> int:
        return self.receiver(dst_rank) + 3

    def reading(self, dst_rank: int) -> int:
        return self.receiver(dst_rank) + 4

    def checking(self, dst_rank: int) -> int:
        return self.receiver(dst_rank) + 5

    def referenced_buffer(self, src_rank: int, buffer: int) -> int:
        """Index of the first of a buffer's three words."""
        return self._referenced_buffers + 3 * (self._first_buffers[src_rank] + buffer)

    def piece(self, slot: int, index: int) -> int:
        """Index of the version of a slot's piece; the two words of the piece's digest follow."""
        return self._pieces + 3 * (slot * self._num_pieces + index)


def plan_words(plan: ReshardPlan) -> list[int]:
    """The plan's digest as four signed words."""
    raw = bytes.fromhex(plan.digest)
    return [int.from_bytes(raw[start : start + 8], "little", signed=True) for start in range(0, 32, 8)]


def signed_word(word: int) -> int:
    return word - WORD_MODULUS if word >= WORD_MODULUS // 2 else word


class WeightStore:
    """Shared memory for one reshard plan: the bytes of its pieces for each version that it keeps. One process creates
    it, the others open it."""

    def __init__(self, segment: _C.Segment, address: WeightStoreAddress) -> None:
        """Private: use WeightStore.create or WeightStore.open."""
        self.address = address
        self.words = _C.SharedWords(segment, address.num_words)
        self.slots_pointer = segment.pointer + _slots_offset(address.num_words)
        self._segment = segment

    @classmethod
    def create(
        cls,
        plan: ReshardPlan,
        *,
        name: str,
        slot_bytes: int | None = None,
        num_slots: int = NUM_SLOTS,
        num_more_words: int = 0,
    ) -> WeightStore:
        """An empty store for `plan`. Memory is only used once weights are published.

        Args:
            slot_bytes: Bytes of a slot; None: what all pieces need.
            num_slots: Versions that it keeps; publishing one more waits until all receivers have the oldest.
            num_more_words: Words behind the control words, for a kind of store that needs more; 0 at first.
        """
        pieces = plan.pieces
        control = ControlWords(plan, len(pieces), num_slots)
        slot_bytes = slot_bytes_of(pieces) if slot_bytes is None else slot_bytes
        num_words = control.num_words + num_more_words
        segment = _C.Segment.create(name, _slots_offset(num_words) + num_slots * slot_bytes)
        pid, start_ticks, fd, nonce = segment.address()
        store = cls(
            segment,
            WeightStoreAddress(
                name=name,
                creator_pid=pid,
                creator_start_ticks=start_ticks,
                fd=fd,
                nonce=nonce,
                num_words=num_words,
                num_slots=num_slots,
            ),
        )
        for index, word in enumerate(plan_words(plan)):
            store.words.store(index, word)
        for src_rank in range(plan.num_src_ranks):
            store.words.store(control.digested(src_rank), NO_VERSION)
            for slot in range(num_slots):
                store.words.store(control.slot_version(src_rank, slot), NO_VERSION)
        for dst_rank in range(plan.num_dst_ranks):
            for word in (control.requested, control.served, control.reading, control.checking):
                store.words.store(word(dst_rank), NO_VERSION)
        for slot in range(num_slots):
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

    def memory_at(self, pointer: int, num_bytes: int) -> memoryview:
        """Bytes of the store, from an address in it on."""
        start = pointer - self._segment.pointer
        return memoryview(self._segment)[start : start + num_bytes]

    @property
    def name(self) -> str:
        return self.address.name


def _slots_offset(num_words: int) -> int:
    return align(_C.SharedWords.bytes_needed(num_words))


def align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def slot_bytes_of(pieces: tuple[Piece, ...]) -> int:
    return sum(align(bytes_of(piece)) for piece in pieces)


def bytes_of(piece: Piece) -> int:
    return piece.box.num_elements * TensorSpec((), piece.dtype).element_bytes
