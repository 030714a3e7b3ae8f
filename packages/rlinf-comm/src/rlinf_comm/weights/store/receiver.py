"""The fetching and checking end of a weight store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm.copies import addresses_of
from rlinf_comm.errors import PeerLost, WeightMismatchError, WeightTimeout
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.report import SyncReport
from rlinf_comm.weights.store.memory import NO_VERSION, WORD_MODULUS, WeightStore, Where
from rlinf_comm.weights.store.shared_tensors import Mappings, SharedPlace
from rlinf_comm.weights.store.side import StoreSide
from rlinf_comm.weights.unlisted import listed

if TYPE_CHECKING:
    import torch


class StoreReceiver(StoreSide):
    """Fetches what one destination rank serves.

    Args:
        attests: False: what was copied is served as it is; no digest is made of it.
    """

    def __init__(self, store: WeightStore, plan: ReshardPlan, dst_rank: int, *, attests: bool = True) -> None:
        super().__init__(store, plan, dst_rank, role="receiver")
        self._attests = attests
        self._register(self._control.receiver(dst_rank))
        self._words.store(self._control.reading(dst_rank), NO_VERSION)  # one that died may have been reading
        self._src_ranks = sorted({placed.piece.src_rank for placed in self._own})
        self._mappings = {src_rank: Mappings() for src_rank in self._src_ranks}
        self._counted = (0, 0)
        """Maps and unmaps that reports have had."""

    def receive(self, tensors: Mapping[str, torch.Tensor], policy_version: int, timeout_s: float = 60.0) -> SyncReport:
        """Copies a version into `tensors` in place, and checks that they now hold what the senders published.

        Until this returns, and after it raised, the tensors must not be served. It may be called again.

        Args:
            tensors: This rank's buffers by name, exactly those of its layout; any strides.
            policy_version: Exactly this version.
            timeout_s: How long to wait for the senders.

        Raises:
            WeightMismatchError: tensors are missing or differ from what was published (named in the text and in
                `tensors`), or the version can no longer come; found and expected versions are in the text.
            WeightTimeout: the senders did not publish the version in time.
            LayoutError: a tensor is of another shape or dtype, is not of this layout, or not on the CPU; names it.
            PeerLost: a sender died.
        """
        return self.take(tensors, policy_version, timeout_s)()

    def take(
        self, tensors: Mapping[str, torch.Tensor], policy_version: int, timeout_s: float = 60.0
    ) -> Callable[[], SyncReport]:
        """The first half of `receive`: copies the version. What it returns is the other half, the check.

        The check only reads the tensors, and leaves the GIL to others meanwhile: it may run in another thread while
        they are used. Until it has returned, whatever is made with them must not leave, and they must neither change
        nor move. It is called before the next `take`.

        Raises: what `receive` raises; an error about tensors that differ or are missing comes from the check.
        """
        tensors = self._checked(tensors)
        control, words = self._control, self._words
        self.want(policy_version)
        wait_s, slots = self._wait_for_version(policy_version, timeout_s)

        start_s = time.monotonic()
        referenced_ranks = self._copy(tensors, slots, policy_version)
        copied_s = time.monotonic()

        def check() -> SyncReport:
            checking_s = time.monotonic()
            if self._attests:
                words.store(control.checking(self._rank), policy_version)
                words.notify_all()
                digests = self._digests(tensors)
                self._wait_for_digests(referenced_ranks, policy_version, timeout_s)
                self._verify(digests, slots, policy_version)
            words.store(control.served(self._rank), policy_version)
            words.notify_all()
            digest_s = time.monotonic() - checking_s
            return self._report(policy_version, wait_s=wait_s, copy_s=copied_s - start_s, digest_s=digest_s)

        return check

    def want(self, policy_version: int) -> None:
        """The beginning of `take`: says which version is wanted, and no more."""
        control, words = self._control, self._words
        if words.load(control.served(self._rank)) >= policy_version:
            words.store(
                control.served(self._rank), policy_version - 1
            )  # it must not be overwritten while it is read again
        words.store(control.requested(self._rank), policy_version)
        words.notify_all()

    def _copy(self, tensors: dict[str, torch.Tensor], slots: Mapping[int, int], policy_version: int) -> list[int]:
        """Fills the tensors, from the store or from where the senders have it. Returns: those who lend."""
        control, words = self._control, self._words
        words.store(control.reading(self._rank), policy_version)  # before it is asked where the version lies
        try:
            where = {src_rank: words.load(control.slot_where(src_rank, slot)) for src_rank, slot in slots.items()}
            for src_rank in self._src_ranks:
                if where[src_rank] == Where.GONE:
                    raise WeightMismatchError(
                        f"weight store {self._store.name!r}: expected version {policy_version}, but the tensors of "
                        f"sender {src_rank} have changed since all receivers had it; it does not come back",
                        expected_version=policy_version,
                    )
            referenced_ranks = [src_rank for src_rank in self._src_ranks if where[src_rank] == Where.REFERENCED]
            if not referenced_ranks:
                self._read(tensors, slots, policy_version)
            else:
                self._read_referenced(tensors, slots, referenced_ranks)
        finally:
            words.store(control.reading(self._rank), NO_VERSION)
            words.notify_all()
        return referenced_ranks

    def _read(self, tensors: dict[str, torch.Tensor], slots: Mapping[int, int], policy_version: int) -> None:
        """Copies this rank's pieces out of the slots of their senders."""
        self._transfer(tensors).receive.run(self._slot_addresses(slots), addresses_of(tensors.values()))

    def _read_referenced(
        self, tensors: dict[str, torch.Tensor], slots: Mapping[int, int], referenced_ranks: list[int]
    ) -> None:
        """The same, where some senders have theirs in their own tensors."""
        transfer, addresses = self._transfer(tensors), addresses_of(tensors.values())
        for number, src_rank in enumerate(self._src_ranks):
            if src_rank in referenced_ranks:
                program = transfer.by_reference(number, self._plan.src_buffers[src_rank])
                program.run(self._referenced_addresses(src_rank), addresses)
            else:
                transfer.stored(number).run(self._slot_addresses(slots), addresses)

    def _digests(self, tensors: dict[str, torch.Tensor]) -> list[int]:
        """The digests of the pieces as the tensors hold them."""
        return self._transfer(tensors).attest.run(addresses_of(tensors.values()))

    def _slot_addresses(self, slots: Mapping[int, int]) -> np.ndarray:
        return np.array([self._slot_address(slots[src_rank]) for src_rank in self._src_ranks], np.int64)

    def _referenced_addresses(self, src_rank: int) -> np.ndarray:
        """Where this process sees the buffers of a sender."""
        words, control = self._words, self._control
        places = []
        for number in range(len(self._plan.src_buffers[src_rank])):
            first = control.referenced_buffer(src_rank, number)
            places.append(SharedPlace(*(words.load(first + word) for word in range(3))))
        return self._mappings[src_rank].addresses_of(words.load(control.sender(src_rank)), places)

    def _counters(self) -> dict[str, int]:
        before, self._counted = self._counted, self._num_mapped()
        num_maps, num_unmaps = (now - then for now, then in zip(self._counted, before, strict=True))
        return {"num_maps": num_maps, "num_unmaps": num_unmaps}

    def _num_mapped(self) -> tuple[int, int]:
        """(maps, unmaps) so far."""
        mappings = self._mappings.values()
        return sum(one.num_maps for one in mappings), sum(one.num_unmaps for one in mappings)

    def _wait_for_digests(self, referenced_ranks: list[int], policy_version: int, timeout_s: float) -> None:
        """Senders digest what they have lent when they are asked."""
        words, control = self._words, self._control

        def late() -> list[int]:
            # One that has digested a later version has done so with this one, which this rank has not served, before.
            return [rank for rank in referenced_ranks if words.load(control.digested(rank)) < policy_version]

        def are_there() -> bool:
            for src_rank in late():
                if self._is_lost(control.sender(src_rank)):
                    raise PeerLost(
                        f"weight store {self._store.name!r}: the process of sender {src_rank} died before it had said "
                        f"what version {policy_version} is, which receiver {self._rank} copied and must not serve"
                    )
            return not late()

        if self._wait_until(are_there, timeout_s) is None:
            raise WeightTimeout(
                f"weight store {self._store.name!r}: sender {late()[0]} has not given the digests of version "
                f"{policy_version} within timeout_s={timeout_s}; receiver {self._rank} must not serve it",
                expected_version=policy_version,
            )

    def _wait_for_version(self, policy_version: int, timeout_s: float) -> tuple[float, dict[int, int]]:
        """(seconds waited, slot of each sender)."""
        slots: dict[int, int] = {}

        def is_complete() -> bool:
            for src_rank in self._src_ranks:
                versions = self._versions(src_rank)
                if policy_version in versions:
                    slots[src_rank] = versions.index(policy_version)
                elif max(versions) > policy_version:
                    raise WeightMismatchError(
                        f"weight store {self._store.name!r}: expected version {policy_version}, but sender {src_rank} "
                        f"has published {max(versions)} since; it does not come back",
                        expected_version=policy_version,
                        found_version=max(versions),
                    )
                elif self._is_lost(self._control.sender(src_rank)):
                    raise PeerLost(
                        f"weight store {self._store.name!r}: the process of sender {src_rank} died before it published "
                        f"version {policy_version}; its last is {max(versions)}"
                    )
            return len(slots) == len(self._src_ranks)

        wait_s = self._wait_until(is_complete, timeout_s)
        if wait_s is None:
            late = next(rank for rank in self._src_ranks if rank not in slots)
            latest = max(self._versions(late))
            raise WeightTimeout(
                f"weight store {self._store.name!r}: expected version {policy_version}, but sender {late} has "
                f"published {'nothing' if latest == NO_VERSION else f'version {latest}'} within timeout_s={timeout_s}",
                expected_version=policy_version,
                found_version=None if latest == NO_VERSION else latest,
            )
        return wait_s, slots

    def _versions(self, src_rank: int) -> list[int]:
        return [self._words.load(self._control.slot_version(src_rank, slot)) for slot in range(self._num_slots)]

    def _slot_number(self, src_rank: int) -> int:
        return self._src_ranks.index(src_rank)

    def _verify(self, digests: list[int], slots: dict[int, int], policy_version: int) -> None:
        """Compares the digests of the destination tensors with the published ones."""
        missing, differing = [], []
        for placed, served in zip(self._own, digests, strict=True):
            name = placed.piece.name
            first_word = self._control.piece(slots[placed.piece.src_rank], placed.index)
            low, high = self._words.load(first_word + 1), self._words.load(first_word + 2)
            if self._words.load(first_word) != policy_version:
                missing.append(name)
            elif (low % WORD_MODULUS, high % WORD_MODULUS) != (served % WORD_MODULUS, served // WORD_MODULUS):
                differing.append(name)
        if missing or differing:
            faults: list[str] = []
            if missing:
                faults.append(f"{listed(missing)} is not in the store in version {policy_version}")
            if differing:
                faults.append(f"{listed(differing)} differs from what its sender published")
            raise WeightMismatchError(
                f"weight store {self._store.name!r}: receiver {self._rank} must not serve version {policy_version}: "
                + "; ".join(faults),
                tensors=tuple(sorted({*missing, *differing})),
                expected_version=policy_version,
            )
