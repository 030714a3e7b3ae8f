"""The fetching and checking end of a device store."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm.copies import CopyProgram, Int64s, addresses_of
from rlinf_comm.errors import IpcError, PeerLost, WeightMismatchError
from rlinf_comm.weights.device.device import Digests, TransferDevice
from rlinf_comm.weights.device.mappings import KeptMappings, Opened
from rlinf_comm.weights.device.memory import ECHO_BYTES, ExportWords, Mailbox, echo_of, read_export
from rlinf_comm.weights.device.side import DeviceSide
from rlinf_comm.weights.layout import TensorSpec
from rlinf_comm.weights.manifest import DIGEST_MODULUS
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.report import SyncReport
from rlinf_comm.weights.store.memory import NO_VERSION, WeightStore
from rlinf_comm.weights.store.receiver import StoreReceiver

if TYPE_CHECKING:
    import torch


_NUM_READ_BACK = 8


@dataclass(frozen=True, slots=True)
class _Copied:
    """What the last copy wrote."""

    addresses: bytes
    """Of its sources and of its own tensors."""
    digests: list[int]
    """By part of the plan."""
    held: Digests
    """Reads the tensors back."""


class DeviceWeightReceiver(DeviceSide, StoreReceiver):
    """Fetches what one destination rank serves, out of the memory of the senders' devices.

    Raises:
        IpcError: the memory of a sender that is there already cannot be read from this device; says why.
    """

    def __init__(
        self, store: WeightStore, plan: ReshardPlan, dst_rank: int, device: TransferDevice, *, attests: bool = True
    ) -> None:
        super().__init__(store, plan, dst_rank, attests=attests)
        self._device, self._mailbox = device, Mailbox.of(plan)
        self._places = ExportWords(plan, self._num_slots)
        self._words.store(self._places.device(dst_rank), device.identity)
        self._kept = KeptMappings(store, plan, dst_rank, device)
        weakref.finalize(self, self._kept.end).atexit = False  # the process ends, and its mappings with it
        self._copied: _Copied | None = None
        self._has_ties = any(placed.source is None for placed in self._own)
        self._read_back: list[bytes] = []
        """Addresses, of sources and own tensors, whose copies were read back by another program."""
        for src_rank in self._src_ranks:
            if max(self._versions(src_rank)) == NO_VERSION:
                self._try(src_rank)

    def take(
        self, tensors: Mapping[str, torch.Tensor], policy_version: int, timeout_s: float = 60.0
    ) -> Callable[[], SyncReport]:
        """As StoreReceiver.take, on the device. Once it was checked, the memory of a version may hold another one.

        The copy digests what it writes in the same pass. The first time that it runs with certain addresses, the check
        also reads the tensors back with the digest kernel, which knows nothing of the copy's tiles. Where tensors are
        tied it always does, since two copies write to their memory.

        Raises:
            PeerLost: also when a sender died after it published, since its device memory died with it.
            IpcError: the memory of a sender cannot be opened.
            WeightMismatchError: also for a version that this rank has checked before, or passed over.
        """
        served = self._words.load(self._control.served(self._rank))
        if served >= policy_version:
            raise WeightMismatchError(
                f"weight store {self._store.name!r}: receiver {self._rank} took version {served} before, and asks for "
                f"version {policy_version}; the memory of a version is used for another one once all have it",
                expected_version=policy_version,
                found_version=served,
            )
        return super().take(tensors, policy_version, timeout_s)

    def _read(self, tensors: dict[str, torch.Tensor], slots: Mapping[int, int], policy_version: int) -> None:
        with self._kept.open() as opened:
            places = [self._packed_at(opened, rank, slots[rank], policy_version) for rank in self._src_ranks]
            program = self._transfer(tensors).receive
            if self._are_on_host(tensors):
                self._copy_through_host(program, places, self._store_bytes(), tensors)
            else:
                self._copied = self._copy_on_device(tensors, [(program, np.array(places, np.int64))])
        for src_rank in self._src_ranks:
            self._check_alive(src_rank, policy_version)

    def _read_referenced(
        self, tensors: dict[str, torch.Tensor], slots: Mapping[int, int], referenced_ranks: list[int]
    ) -> None:
        transfer, on_host = self._transfer(tensors), self._are_on_host(tensors)
        policy_version = self._words.load(self._control.requested(self._rank))
        with self._kept.open() as opened:
            reads = []
            for number, src_rank in enumerate(self._src_ranks):
                if src_rank in referenced_ranks:
                    program = transfer.by_reference(number, self._plan.src_buffers[src_rank])
                    sources = self._lent_at(opened, src_rank, policy_version)
                    sizes = self._buffer_bytes(src_rank)
                else:
                    program = transfer.stored(number)
                    sources = [0] * len(self._src_ranks)
                    sources[number] = self._packed_at(opened, src_rank, slots[src_rank], policy_version)
                    sizes = self._store_bytes()
                reads.append((program, sources, sizes))
            if on_host:
                for program, sources, sizes in reads:
                    self._copy_through_host(program, sources, sizes, tensors)
            else:
                copies = [(program, np.array(sources, np.int64)) for program, sources, _ in reads]
                self._copied = self._copy_on_device(tensors, copies)
        for src_rank in self._src_ranks:
            self._check_alive(src_rank, policy_version)

    def _copy_through_host(
        self, program: CopyProgram, sources: Sequence[int], sizes: Sequence[int], tensors: dict[str, torch.Tensor]
    ) -> None:
        """Tensors that have not come to their device yet."""
        import torch

        blank = torch.empty(1, dtype=torch.uint8)
        read = [
            self._device.bytes_at(source, size).cpu() if source and size else blank
            for source, size in zip(sources, sizes, strict=True)
        ]
        program.run(addresses_of(read), addresses_of(tensors.values()))

    def _copy_on_device(
        self, tensors: dict[str, torch.Tensor], copies: Sequence[tuple[CopyProgram, Int64s]]
    ) -> _Copied | None:
        """Runs programs from their sources. Returns None if nobody asks for digests."""
        programs, own = self._on_device(tensors), addresses_of(tensors.values())
        if not self._attests:
            for program, sources in copies:
                programs.of(program).run(sources, own)
            return None
        sums = [0] * len(self._own)
        for program, sources in copies:
            digests = programs.of(program).run_with_digests(sources, own)
            sums = [(one + other) % DIGEST_MODULUS for one, other in zip(sums, digests, strict=True)]
        addresses = b"|".join([own.tobytes(), *(sources.tobytes() for _, sources in copies)])
        return _Copied(addresses, sums, programs.held)

    def _digests(self, tensors: dict[str, torch.Tensor]) -> list[int]:
        """The digests of what the copy wrote, once another program has found tensors at these addresses to have them;
        until then, those of what that program reads."""
        if self._are_on_host(tensors):
            return super()._digests(tensors)
        copied = self._copied
        assert copied is not None, "the tensors were copied before"
        if copied.addresses in self._read_back:
            return copied.digests
        read = copied.held.run(addresses_of(tensors.values()))
        if read == copied.digests and not self._has_ties:
            self._read_back = [copied.addresses, *self._read_back[: _NUM_READ_BACK - 1]]
        return read

    def _packed_at(self, opened: Opened, src_rank: int, slot: int, policy_version: int) -> int:
        """The address of what a sender has packed for a slot."""
        with self._naming(src_rank, policy_version):
            (address,) = opened.addresses_of(src_rank, self._words.load(self._places.slot_place(src_rank, slot)))
        return address

    def _lent_at(self, opened: Opened, src_rank: int, policy_version: int) -> list[int]:
        """The addresses of a sender's own buffers, which stay until this rank has copied them. Where the slot's version
        is by now cannot be asked: the sender may be packing it at this moment."""
        with self._naming(src_rank, policy_version):
            return opened.buffers_of(src_rank, self._places.own_place)

    @contextmanager
    def _naming(self, src_rank: int, policy_version: int) -> Iterator[None]:
        """Raises: PeerLost or IpcError, with what could not be mapped."""
        self._check_alive(src_rank, policy_version)
        try:
            yield
        except IpcError as error:
            self._check_alive(src_rank, policy_version)
            raise IpcError(
                f"weight store {self._store.name!r}: version {policy_version} of sender {src_rank}: {error}"
            ) from error

    def _check_alive(self, src_rank: int, policy_version: int) -> None:
        if self._is_lost(self._control.sender(src_rank)):
            raise PeerLost(
                f"weight store {self._store.name!r}: the process of sender {src_rank} died after it published version "
                f"{policy_version}, and its device memory went with it"
            )

    def _try(self, src_rank: int) -> None:
        """Reads what a sender has put in its device's memory to be read."""
        refusal = self._echo_refusal(src_rank)
        if refusal is not None:
            raise IpcError(
                f"weight store {self._store.name!r}: receiver {self._rank} cannot read the device memory of sender "
                f"{src_rank}: {refusal}"
            )

    def _echo_refusal(self, src_rank: int) -> str | None:
        """None: it can be read, or nothing is there yet."""
        export = read_export(self._store, self._plan, src_rank, 0)
        if export is None:
            return None
        (handle,) = export.handles
        try:
            with self._kept.open() as opened:
                (address,) = opened.addresses_of(src_rank, 0)
                echo = self._device.driver.read(self._device.ordinal, address, ECHO_BYTES)
        except IpcError as error:
            return str(error)
        except OSError as error:
            return str(error.args[-1])
        return None if echo == echo_of(handle) else f"{ECHO_BYTES} bytes came wrong"

    def _num_mapped(self) -> tuple[int, int]:
        return self._kept.num_maps, self._kept.num_unmaps

    def _buffer_bytes(self, src_rank: int) -> list[int]:
        buffers = self._plan.src_buffers[src_rank].values()
        return [spec.num_elements * TensorSpec((), spec.dtype).element_bytes for spec in buffers]

    def _store_bytes(self) -> list[int]:
        return [max(self._mailbox.num_bytes[src_rank], 1) for src_rank in self._src_ranks]
