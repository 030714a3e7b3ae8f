"""The publishing end of a weight store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm.copies import addresses_of
from rlinf_comm.errors import PeerLost, WeightTimeout
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.report import SyncReport
from rlinf_comm.weights.store.memory import NO_VERSION, WORD_MODULUS, WeightStore, Where, signed_word
from rlinf_comm.weights.store.shared_tensors import SharedTensors
from rlinf_comm.weights.store.side import StoreSide

if TYPE_CHECKING:
    import torch

_READERS_S = 60.0
"""Longer than any receiver copies."""
_WAKE_S = 0.1


@dataclass(frozen=True, slots=True)
class _Referenced:
    """A version that receivers read where the sender has it."""

    tensors: dict[str, torch.Tensor]
    policy_version: int
    slot: int
    """Kept for it in the store."""


class StoreSender(StoreSide):
    """Publishes what one source rank stores."""

    def __init__(self, store: WeightStore, plan: ReshardPlan, src_rank: int) -> None:
        super().__init__(store, plan, src_rank, role="sender")
        self._register(self._control.sender(src_rank))
        self._dst_ranks = sorted(set(plan.table.dst_rank[plan.table.src_rank == src_rank].tolist()))
        self._shared_tensors = SharedTensors()
        self._num_moved = 0
        self._referenced: _Referenced | None = None
        self._lock = threading.Lock()
        """Held by who ends the referenced, and by who reads what is lent for its digests."""
        for slot in range(self._num_slots):  # what one that died had lent
            if self._words.load(self._control.slot_where(src_rank, slot)) == Where.REFERENCED:
                self._words.store(self._control.slot_where(src_rank, slot), Where.GONE)

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int, timeout_s: float = 60.0) -> SyncReport:
        """Writes this rank's share of a version into the store. The tensors may change as soon as it returns.

        Args:
            tensors: This rank's buffers by name, exactly those of its layout; any strides. What a destination stores in
                another dtype is cast here.
            policy_version: Larger than any published before.
            timeout_s: How long to wait for receivers that have not taken the oldest version that the store keeps.

        Raises:
            WeightMismatchError: a tensor is missing; names it.
            LayoutError: a tensor is of another shape or dtype, is not of this layout, or not on the CPU; names it.
            WeightTimeout, PeerLost: a receiver did not come, or died; nothing was published.
        """
        tensors = self._checked(tensors)
        slot, wait_s = self._free_slot(policy_version, timeout_s)
        start_s = time.monotonic()
        self._store_digests(self._write(tensors, slot, policy_version), slot, policy_version)
        copy_s = time.monotonic() - start_s
        self._announce(slot, policy_version, Where.STORED)
        return self._report(policy_version, wait_s=wait_s, copy_s=copy_s, digest_s=0.0)

    def publish_by_reference(
        self, tensors: Mapping[str, torch.Tensor], policy_version: int, timeout_s: float = 60.0
    ) -> SyncReport:
        """As `publish`, but the receivers read the tensors where they are and nothing is copied. Call `finish_reads`
        before the tensors change. You may drop them; this object keeps them.

        That takes contiguous tensors that the last version was published from too: their memory moves to where others
        see it, once. Any others are copied into the store, as `publish` does. So it is where shared memory has no room
        for them (/dev/shm) or this process may not open that many files.
        """
        tensors = self._checked(tensors)
        store_places = self._shared(tensors)
        if store_places is None:
            return self.publish(tensors, policy_version, timeout_s)
        slot, wait_s = self._free_slot(policy_version, timeout_s)
        store_places(slot)
        self._referenced = referenced = _Referenced(tensors, policy_version, slot)
        self._announce(slot, policy_version, Where.REFERENCED)
        threading.Thread(target=self._digest_when_asked, args=(referenced,), name="weight digests", daemon=True).start()
        return self._report(policy_version, wait_s=wait_s, copy_s=0.0, digest_s=0.0)

    def _shared(self, tensors: dict[str, torch.Tensor]) -> Callable[[int], None] | None:
        """Makes the tensors readable for receivers. Returns a function that records where they are, for a slot, once
        nobody reads what was lent before; None: they cannot be lent."""
        places = self._shared_tensors.places_of(list(tensors.values()))
        if places is None:
            return None

        def store_places(slot: int) -> None:
            for number, place in enumerate(places):
                for word, value in enumerate((place.fd, place.inode, place.offset_bytes)):
                    self._words.store(self._control.referenced_buffer(self._rank, number) + word, value)

        return store_places

    def finish_reads(self) -> None:
        """Returns when nobody reads what was lent last; before the tensors change.

        Receivers that have not taken the version find it in the store, into which it is copied now; all others cost
        nothing. It waits for receivers that copy at this moment, and for nothing else. From any thread, and again.

        Where it raises, the tensors are still lent: they must not change before another call has returned.

        Raises:
            WeightTimeout: one that copies does not come to its end.
            IpcError: a device store has no memory for the copy.
        """
        with self._lock:
            referenced = self._referenced
            if referenced is None:
                return
            version, where_word = referenced.policy_version, self._control.slot_where(self._rank, referenced.slot)
            if self._words.load(where_word) == Where.REFERENCED:  # or a call before this one did not come to its end
                where = self._store_if_needed(referenced)
                # Who looks from now on finds it there; who looked before has said that it reads.
                self._words.store(where_word, where)
                self._words.notify_all()
            if self._wait_until(lambda: not self._readers_of(version), _READERS_S) is None:
                raise WeightTimeout(
                    f"weight store {self._store.name!r}: receivers {self._readers_of(version)} still copy version "
                    f"{version} out of the tensors of sender {self._rank}, which must not change, after {_READERS_S} s",
                    expected_version=version,
                )
            self._referenced = None

    def _store_if_needed(self, referenced: _Referenced) -> Where:
        """Copies a lent version into the store, if a receiver has not taken it."""
        version = referenced.policy_version
        if not self._receivers_before(version):
            return Where.GONE
        digests = self._write(referenced.tensors, referenced.slot, version)
        if self._words.load(self._control.digested(self._rank)) != version:  # or they may be compared just now
            self._store_digests(digests, referenced.slot, version)
        return Where.STORED

    def wait_for_wanted(self, after: int, timeout_s: float) -> int | None:
        """The first of the versions past `after` that a receiver wants; None: nobody wants one within the time."""

        def pending() -> list[int]:
            versions = (self._words.load(self._control.requested(rank)) for rank in self._dst_ranks)
            return [version for version in versions if version > after]

        self._wait_until(lambda: bool(pending()), timeout_s)
        return min(pending(), default=None)

    def _digest_when_asked(self, referenced: _Referenced) -> None:
        """Digests what is lent when the first receiver checks what it has taken: not while any waits for its copy."""
        words, control = self._words, self._control
        checking_words = [control.checking(rank) for rank in self._dst_ranks]
        while True:
            seen = words.sequence()
            if self._referenced is not referenced:
                return
            if any(words.load(word) == referenced.policy_version for word in checking_words):
                break
            words.wait(seen, _WAKE_S)
        with self._lock:
            if self._referenced is referenced:
                digests = self._digests_of(referenced.tensors)
                self._store_digests(digests, referenced.slot, referenced.policy_version)
                words.notify_all()

    def _counters(self) -> dict[str, int]:
        before, self._num_moved = self._num_moved, self._shared_tensors.num_moved
        return {"num_allocations": self._num_moved - before}

    def _digests_of(self, tensors: dict[str, torch.Tensor]) -> list[int]:
        """The digests of the pieces, as they are served, in tensors that are lent."""
        return self._transfer(tensors).attest.run(addresses_of(tensors.values()))

    # -- slots -----------------------------------------------------------------------------------------------------

    def _free_slot(self, policy_version: int, timeout_s: float) -> tuple[int, float]:
        """(the slot for a new version, which holds nothing now, seconds waited for it)"""
        self.finish_reads()
        control, words, rank = self._control, self._words, self._rank
        last = max(words.load(control.slot_version(rank, slot)) for slot in range(self._num_slots))
        if policy_version <= last or policy_version < 0:
            raise ValueError(
                f"weight store {self._store.name!r}: policy_version={policy_version} is not newer than {last}, "
                "which is published already; versions count up from 0"
            )
        slot = words.load(control.num_published(rank)) % self._num_slots
        wait_s = self._wait_for_slot(slot, policy_version, timeout_s)
        words.store(control.slot_version(rank, slot), NO_VERSION)
        for placed in self._own:
            words.store(control.piece(slot, placed.index), NO_VERSION)
        return slot, wait_s

    def _write(self, tensors: dict[str, torch.Tensor], slot: int, policy_version: int) -> list[int]:
        """Copies this rank's pieces into a slot; returns their digests."""
        slot_address = np.array([self._slot_address(slot)], np.int64)
        return self._transfer(tensors).publish.run_with_digests(addresses_of(tensors.values()), slot_address)

    def _store_digests(self, digests: Sequence[int], slot: int, policy_version: int) -> None:
        words, control = self._words, self._control
        for placed, digest in zip(self._own, digests, strict=True):
            first_word = control.piece(slot, placed.index)
            words.store(first_word + 1, signed_word(digest % WORD_MODULUS))
            words.store(first_word + 2, signed_word(digest // WORD_MODULUS))
            words.store(first_word, policy_version)
        words.store(control.digested(self._rank), policy_version)

    def _announce(self, slot: int, policy_version: int, where: Where) -> None:
        words, control, rank = self._words, self._control, self._rank
        words.store(control.slot_where(rank, slot), where)
        words.store(control.slot_version(rank, slot), policy_version)
        words.store(control.num_published(rank), words.load(control.num_published(rank)) + 1)
        words.notify_all()

    def _slot_number(self, src_rank: int) -> int:
        return 0

    # -- receivers -------------------------------------------------------------------------------------------------

    def _wait_for_slot(self, slot: int, policy_version: int, timeout_s: float) -> float:
        """Waits until no receiver needs what is in the slot; returns the seconds waited."""
        old = self._words.load(self._control.slot_version(self._rank, slot))

        def is_free() -> bool:
            waiting_for = self._receivers_before(old)
            lost = [rank for rank in waiting_for if self._is_lost(self._control.receiver(rank))]
            if lost:
                raise PeerLost(
                    f"weight store {self._store.name!r}: the process of receiver {lost[0]} died before it took version "
                    f"{old}; version {policy_version} was not published"
                )
            return not waiting_for

        wait_s = self._wait_until(is_free, timeout_s)
        if wait_s is None:
            raise WeightTimeout(
                f"weight store {self._store.name!r}: receivers {self._receivers_before(old)} have not taken "
                f"version {old} within timeout_s={timeout_s}, and version {policy_version} needs its place",
                expected_version=policy_version,
                found_version=old,
            )
        return wait_s

    def _receivers_before(self, version: int) -> list[int]:
        if version == NO_VERSION:
            return []
        words, control = self._words, self._control
        return [
            rank
            for rank in self._dst_ranks
            if words.load(control.served(rank)) < version and words.load(control.requested(rank)) <= version
        ]

    def _readers_of(self, version: int) -> list[int]:
        words, control = self._words, self._control
        reading = [rank for rank in self._dst_ranks if words.load(control.reading(rank)) == version]
        return [rank for rank in reading if not self._is_lost(control.receiver(rank))]
