"""The fetching and checking end of a device store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm.copies import CopyTable, DigestTable, addresses_of
from rlinf_comm.errors import IpcError, PeerLost, WeightMismatchError
from rlinf_comm.ipc.arena import ArenaHandle
from rlinf_comm.weights.device.device import TransferDevice
from rlinf_comm.weights.device.memory import ECHO_BYTES, Mailbox, echo_of, read_handle
from rlinf_comm.weights.device.side import DeviceSide
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.report import SyncReport
from rlinf_comm.weights.store.memory import NO_VERSION, WeightStore
from rlinf_comm.weights.store.receiver import StoreReceiver
from rlinf_comm.weights.transfer import TransferPrograms

if TYPE_CHECKING:
    import torch


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
        for src_rank in self._src_ranks:
            if max(self._versions(src_rank)) == NO_VERSION:
                self._try(src_rank)

    def take(
        self, tensors: Mapping[str, torch.Tensor], policy_version: int, timeout_s: float = 60.0
    ) -> Callable[[], SyncReport]:
        """As WeightReceiver.take, on the device. A version that was checked is gone: its memory is given back.

        Raises:
            PeerLost: also when a sender died after it published, since its device memory died with it.
            IpcError: the memory of a sender cannot be opened.
            WeightMismatchError: also for a version that this rank has checked before, or passed over.
        """
        served = self._words.load(self._control.served(self._rank))
        if served >= policy_version:
            raise WeightMismatchError(
                f"weight store {self._store.name!r}: receiver {self._rank} took version {served} before, and asks for "
                f"version {policy_version}; a version in device memory is given up once all have it",
                expected_version=policy_version,
                found_version=served,
            )
        return super().take(tensors, policy_version, timeout_s)

    def _read(self, tensors: dict[str, torch.Tensor], slots: Mapping[int, int], policy_version: int) -> None:
        with ExitStack() as opened:
            places = [
                opened.enter_context(self._open(src_rank, slots[src_rank], policy_version))
                for src_rank in self._src_ranks
            ]
            own = addresses_of(tensors.values())
            if self._are_on_host(tensors):
                sizes = self._store_bytes()
                packed = [self._device.bytes_at(*one).cpu() for one in zip(places, sizes, strict=True)]
                self._transfer(tensors).receive.run(addresses_of(packed), own)
            else:
                self._prepare(tensors)[0].run(np.array(places, np.int64), own)
        for src_rank in self._src_ranks:
            self._check_alive(src_rank, policy_version)

    def _digests(self, tensors: dict[str, torch.Tensor]) -> list[int]:
        if self._are_on_host(tensors):
            return super()._digests(tensors)
        return self._prepare(tensors)[1].run(addresses_of(tensors.values()))

    @contextmanager
    def _open(self, src_rank: int, slot: int, policy_version: int) -> Iterator[int]:
        """The address of what a sender has in a slot."""
        self._check_alive(src_rank, policy_version)
        handle = read_handle(self._store, self._plan, slot, src_rank)
        assert handle is not None, "a version is announced after its memory"
        try:
            place = self._device.arenas.open(handle, self._device.ordinal)
        except IpcError as error:
            self._check_alive(src_rank, policy_version)
            raise IpcError(
                f"weight store {self._store.name!r}: version {policy_version} of sender {src_rank}: {error}"
            ) from error
        try:
            yield place
        finally:
            self._device.arenas.close(handle, self._device.ordinal)

    def _check_alive(self, src_rank: int, policy_version: int) -> None:
        if self._is_lost(self._control.sender(src_rank)):
            raise PeerLost(
                f"weight store {self._store.name!r}: the process of sender {src_rank} died after it published version "
                f"{policy_version}, and its device memory went with it"
            )

    def _try(self, src_rank: int) -> None:
        """Reads what a sender has put in its device's memory to be read."""
        handle = read_handle(self._store, self._plan, 0, src_rank)
        if handle is None:
            return
        refusal = self._echo_refusal(handle)
        if refusal is not None:
            raise IpcError(
                f"weight store {self._store.name!r}: receiver {self._rank} cannot read the device memory of sender "
                f"{src_rank}: {refusal}"
            )

    def _echo_refusal(self, handle: ArenaHandle) -> str | None:
        device = self._device
        try:
            place = device.arenas.open(handle, device.ordinal)
        except IpcError as error:
            return str(error)
        try:
            echo = device.driver.read(device.ordinal, place, ECHO_BYTES)
            return None if echo == echo_of(handle) else f"{ECHO_BYTES} bytes came wrong"
        except OSError as error:
            return str(error.args[-1])
        finally:
            device.arenas.close(handle, device.ordinal)

    def _tables(self, transfer: TransferPrograms) -> tuple[CopyTable, DigestTable]:
        return transfer.receive.table, transfer.held

    def _store_bytes(self) -> list[int]:
        return [max(self._mailbox.num_bytes[src_rank], 1) for src_rank in self._src_ranks]
