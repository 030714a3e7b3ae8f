"""The publishing end of a weight store."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm.copies import addresses_of
from rlinf_comm.errors import PeerLost, WeightTimeout
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.report import SyncReport
from rlinf_comm.weights.store.memory import NO_VERSION, NUM_SLOTS, WORD_MODULUS, WeightStore, signed_word
from rlinf_comm.weights.store.side import StoreSide

if TYPE_CHECKING:
    import torch


class WeightSender(StoreSide):
    """Publishes what one source rank stores."""

    def __init__(self, store: WeightStore, plan: ReshardPlan, src_rank: int) -> None:
        super().__init__(store, plan, src_rank, role="sender")
        self._register(self._control.sender(src_rank))
        self._dst_ranks = sorted(set(plan.table.dst_rank[plan.table.src_rank == src_rank].tolist()))

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int, timeout_s: float = 60.0) -> SyncReport:
        """Writes this rank's share of a version into the store. The tensors may change as soon as it returns.

        Args:
            tensors: This rank's buffers by name, exactly those of its layout; any strides. What a destination stores in
                another dtype is cast here.
            policy_version: Larger than any published before.
            timeout_s: How long to wait for receivers that have not taken the version before the last.

        Raises:
            WeightMismatchError: a tensor is missing; names it.
            LayoutError: a tensor is of another shape or dtype, is not of this layout, or not on the CPU; names it.
            WeightTimeout, PeerLost: a receiver did not come, or died; nothing was published.
        """
        tensors = self._checked(tensors)
        control, words, rank = self._control, self._words, self._rank
        last = max(words.load(control.slot_version(rank, slot)) for slot in range(NUM_SLOTS))
        if policy_version <= last or policy_version < 0:
            raise ValueError(
                f"weight store {self._store.name!r}: policy_version={policy_version} is not newer than {last}, "
                "which is published already; versions count up from 0"
            )
        slot = words.load(control.num_published(rank)) % NUM_SLOTS
        wait_s = self._wait_for_slot(slot, policy_version, timeout_s)
        words.store(control.slot_version(rank, slot), NO_VERSION)
        for placed in self._own:
            words.store(control.piece(slot, placed.index), NO_VERSION)
        start_s = time.monotonic()
        digests = self._write(tensors, slot)
        copy_s = time.monotonic() - start_s
        for placed, digest in zip(self._own, digests, strict=True):
            first_word = control.piece(slot, placed.index)
            words.store(first_word + 1, signed_word(digest % WORD_MODULUS))
            words.store(first_word + 2, signed_word(digest // WORD_MODULUS))
            words.store(first_word, policy_version)
        words.store(control.slot_version(rank, slot), policy_version)
        words.store(control.num_published(rank), words.load(control.num_published(rank)) + 1)
        words.notify_all()
        return self._report(policy_version, wait_s=wait_s, copy_s=copy_s, digest_s=0.0)

    def _write(self, tensors: dict[str, torch.Tensor], slot: int) -> list[int]:
        """Copies this rank's pieces into a slot; returns their digests."""
        slot_address = np.array([self._slot_address(slot)], np.int64)
        return self._transfer(tensors).publish.run_with_digests(addresses_of(tensors.values()), slot_address)

    def _slot_number(self, src_rank: int) -> int:
        return 0

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
            if words.load(control.served(rank)) < version and words.load(control.wanted(rank)) <= version
        ]
