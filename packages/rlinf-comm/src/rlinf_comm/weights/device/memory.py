"""Where the senders of a device store write down their arenas, and where the pieces lie in an arena."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_comm.codec import pack, unpack
from rlinf_comm.ipc.arena import ALIGNMENT, ArenaHandle
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.store.memory import NUM_SLOTS, WeightStore, bytes_of

ECHO_BYTES = 4096
_RECORD_BYTES = 1024
"""Room for a packed ArenaHandle, which has about 300 bytes."""


def create_device_store(plan: ReshardPlan, *, name: str, num_slots: int = NUM_SLOTS) -> WeightStore:
    """An empty store for the two ends of this folder; anywhere, and without a device."""
    return WeightStore.create(plan, name=name, slot_bytes=plan.num_src_ranks * _RECORD_BYTES, num_slots=num_slots)


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
    """Device memory that a source rank holds from its `publish` until all receivers have taken the version: what it
    serves, in the dtype that is served, each piece filled up to 512 bytes. Twice that while an older version waits."""
    return Mailbox.of(plan).num_bytes[src_rank]


def write_handle(store: WeightStore, plan: ReshardPlan, slot: int, src_rank: int, handle: ArenaHandle) -> None:
    """Says where the content of a sender's slot is. Whoever sees a word that is stored later sees it."""
    packed = pack(handle)
    assert len(packed) <= _RECORD_BYTES - 4, len(packed)
    _record(store, plan, slot, src_rank)[: 4 + len(packed)] = len(packed).to_bytes(4, "little") + packed


def read_handle(store: WeightStore, plan: ReshardPlan, slot: int, src_rank: int) -> ArenaHandle | None:
    """What was written last; None: nothing yet."""
    record = _record(store, plan, slot, src_rank)
    num_bytes = int.from_bytes(record[:4], "little")
    return unpack(bytes(record[4 : 4 + num_bytes])) if num_bytes else None


def echo_of(handle: ArenaHandle) -> bytes:
    """What stands at the start of the arena with which a sender lets others find out whether they can read it."""
    return (handle.nonce * ECHO_BYTES)[:ECHO_BYTES]


def _record(store: WeightStore, plan: ReshardPlan, slot: int, src_rank: int) -> memoryview:
    place = store.slots_pointer + (slot * plan.num_src_ranks + src_rank) * _RECORD_BYTES
    return store.memory_at(place, _RECORD_BYTES)
