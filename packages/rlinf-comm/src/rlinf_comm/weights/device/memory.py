"""The shared words and records with which the two ends of a device store agree on memory that receivers map.

A sender has a few *places*, each with at most one export: memory that receivers may map. Receivers keep their mappings
from version to version. To free an export, its sender withdraws it, receivers close their mappings, and then it is
freed; so neither side waits for the other in a sync.

Words, each written by one process, in addition to those of the store (rlinf_comm.weights.store.memory):
    sender    for each place: the number of the export, negative once it is withdrawn; for each slot: where
              its version is packed, if it is
    receiver  for each place of each sender: the number of the export that it has mapped, 0 for none; the identity of
              its device

A receiver stores the number that it is about to map and then reads the sender's word; a sender withdraws the number and
then reads the receivers' words. All words have one order, so at least one of the two sees the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_comm.codec import pack, unpack
from rlinf_comm.ipc.arena import ALIGNMENT, ArenaHandle
from rlinf_comm.records import record
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.store.memory import NUM_SLOTS, ControlWords, WeightStore, bytes_of

ECHO_BYTES = 4096
_HANDLE_BYTES = 512
"""Upper limit of a packed ArenaHandle, which has about 300 bytes, and of its share of a record."""
_PLACED_BYTES = 32
"""Upper limit of a packed place of a buffer."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Memory of a sender that receivers may map.

    Example: two buffers in one allocation, the second one 4096 bytes behind the first:
        handles = (handle,), buffers = ((0, 0), (0, 4096))
    """

    handles: tuple[ArenaHandle, ...]
    """By allocation."""
    buffers: tuple[tuple[int, int], ...] = ()
    """By buffer of the sender's layout: (allocation, bytes from its start), or (-1, 0) for one without elements; empty
    for an arena with packed pieces."""


class ExportWords:
    """Indices of the words, behind the control words of the store."""

    def __init__(self, plan: ReshardPlan, num_slots: int) -> None:
        self.num_places = num_slots + 1
        """One for each version that may wait for receivers, and then the sender's own tensors."""
        self.own_place = num_slots
        self._num_slots, self._num_senders = num_slots, plan.num_src_ranks
        self._first = ControlWords(plan, len(plan.pieces), num_slots).num_words
        self._receivers = self._first + (self.num_places + num_slots) * plan.num_src_ranks
        self._devices = self._receivers + self.num_places * plan.num_src_ranks * plan.num_dst_ranks
        self.num_words = self._devices + plan.num_dst_ranks - self._first

    def exported(self, src_rank: int, place: int) -> int:
        return self._first + (self.num_places + self._num_slots) * src_rank + place

    def slot_place(self, src_rank: int, slot: int) -> int:
        return self.exported(src_rank, self.num_places) + slot

    def mapped(self, dst_rank: int, src_rank: int, place: int) -> int:
        return self._receivers + (dst_rank * self._num_senders + src_rank) * self.num_places + place

    def device(self, dst_rank: int) -> int:
        return self._devices + dst_rank


def create_device_store(plan: ReshardPlan, *, name: str, num_slots: int = NUM_SLOTS) -> WeightStore:
    """An empty store for the two ends of this folder; anywhere, and without a device."""
    num_bytes = plan.num_src_ranks * _ExportRecords(plan, num_slots).num_bytes
    return WeightStore.create(
        plan,
        name=name,
        slot_bytes=-(-num_bytes // num_slots),
        num_slots=num_slots,
        num_more_words=ExportWords(plan, num_slots).num_words,
    )


@dataclass(frozen=True)
class Mailbox:
    """The pieces that each source rank hands out, one after the other in its arena."""

    offsets: tuple[int, ...]
    """By piece of the plan: bytes from the start of its sender's arena."""
    num_bytes: tuple[int, ...]
    """By source rank."""

    @classmethod
    def of(cls, plan: ReshardPlan) -> Mailbox:
        filled, offsets = [0] * plan.num_src_ranks, []
        for piece in plan.pieces:
            offsets.append(filled[piece.src_rank])
            filled[piece.src_rank] += -(-bytes_of(piece) // ALIGNMENT) * ALIGNMENT
        return cls(tuple(offsets), tuple(filled))


def mailbox_bytes(plan: ReshardPlan, src_rank: int) -> int:
    """Device memory that a source rank needs for each version that it keeps for receivers: what it serves, in the dtype
    that is served, each piece filled up to 512 bytes."""
    return Mailbox.of(plan).num_bytes[src_rank]


class _ExportRecords:
    """Sizes of the records of a sender's exports."""

    def __init__(self, plan: ReshardPlan, num_slots: int) -> None:
        most_buffers = max(map(len, plan.src_buffers), default=0)
        self._num_places, self._arena_bytes = num_slots + 1, 2 * _HANDLE_BYTES
        self.num_bytes = num_slots * self._arena_bytes + _HANDLE_BYTES + (_HANDLE_BYTES + _PLACED_BYTES) * most_buffers

    def of(self, store: WeightStore, src_rank: int, place: int) -> memoryview:
        start = src_rank * self.num_bytes + place * self._arena_bytes
        end = (src_rank + 1) * self.num_bytes if place == self._num_places - 1 else start + self._arena_bytes
        return store.memory_at(store.slots_pointer + start, end - start)


def write_export(store: WeightStore, plan: ReshardPlan, src_rank: int, place: int, export: Export) -> None:
    """Writes down what is at a place. Whoever sees a word that is stored later sees it."""
    packed, area = pack(export), _ExportRecords(plan, store.address.num_slots).of(store, src_rank, place)
    assert len(packed) <= len(area) - 4, (len(packed), len(area))
    area[: 4 + len(packed)] = len(packed).to_bytes(4, "little") + packed


def read_export(store: WeightStore, plan: ReshardPlan, src_rank: int, place: int) -> Export | None:
    """What was written last; None: nothing yet."""
    area = _ExportRecords(plan, store.address.num_slots).of(store, src_rank, place)
    num_bytes = int.from_bytes(area[:4], "little")
    return unpack(bytes(area[4 : 4 + num_bytes])) if num_bytes else None


def echo_of(handle: ArenaHandle) -> bytes:
    """What stands at the start of the arena with which a sender lets others find out whether they can read it."""
    return (handle.nonce * ECHO_BYTES)[:ECHO_BYTES]
