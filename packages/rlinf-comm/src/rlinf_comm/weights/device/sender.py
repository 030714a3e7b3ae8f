"""The publishing end of a device store."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm.copies import CopyTable, DigestTable, addresses_of
from rlinf_comm.ipc.arena import IpcArena
from rlinf_comm.weights.device.device import TransferDevice
from rlinf_comm.weights.device.memory import ECHO_BYTES, Mailbox, echo_of, write_handle
from rlinf_comm.weights.device.side import DeviceSide
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.report import SyncReport
from rlinf_comm.weights.store.memory import WeightStore
from rlinf_comm.weights.store.sender import StoreSender
from rlinf_comm.weights.transfer import TransferPrograms

if TYPE_CHECKING:
    import torch

_LOOK_S = 1.0
"""A thread that waits for receivers looks this often for those that it was not told of."""


class DeviceWeightSender(DeviceSide, StoreSender):
    """Publishes what one source rank stores, in memory of its device.

    Raises:
        IpcError: the device cannot share memory, or has none left for 4 KB; says why.
    """

    def __init__(self, store: WeightStore, plan: ReshardPlan, src_rank: int, device: TransferDevice) -> None:
        super().__init__(store, plan, src_rank)
        self._device, self._mailbox = device, Mailbox.of(plan)
        self._arenas: dict[int, IpcArena] = {}
        """By slot, while a version is in it."""
        self._givers: dict[int, threading.Thread] = {}
        """By slot: waits for the receivers, and gives the arena back."""
        self._echo: IpcArena | None = device.new_arena(ECHO_BYTES)
        handle = self._echo.handle
        device.driver.write(device.ordinal, handle.pointer, echo_of(handle))
        write_handle(store, plan, 0, src_rank, handle)

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int, timeout_s: float = 60.0) -> SyncReport:
        """As WeightSender.publish, into device memory, which is taken here and given back when all receivers have the
        version. Tensors that are all on the host are packed there, for the time that this takes.

        Raises:
            IpcError: the device has no room for this rank's share; says how much it is.
            LayoutError: a tensor is elsewhere than the others, or as in WeightSender.publish.
        """
        report = super().publish(tensors, policy_version, timeout_s)
        slot = (self._words.load(self._control.num_published(self._rank)) - 1) % self._num_slots
        giver = threading.Thread(
            target=self._give_back,
            args=(slot, policy_version),
            name=f"{self._store.name} {policy_version}",
            daemon=True,
        )
        self._givers[slot] = giver
        giver.start()
        return report

    def num_held_bytes(self) -> int:
        """Device memory that published versions take at the moment."""
        return sum(arena.handle.num_bytes for arena in list(self._arenas.values()))

    def _write(self, tensors: dict[str, torch.Tensor], slot: int) -> list[int]:
        if self._echo is not None:
            self._echo.close()
            self._echo = None
        if slot in self._givers:
            self._givers.pop(slot).join()  # all have what was in the slot
        num_bytes = self._mailbox.num_bytes[self._rank]
        arena = self._arenas.pop(slot, None) or self._device.new_arena(max(num_bytes, 1))
        self._arenas[slot] = arena  # also when it cannot be filled: the next try takes it
        own, target = addresses_of(tensors.values()), np.array([arena.handle.pointer], np.int64)
        if self._are_on_host(tensors):
            digests = self._write_from_host(tensors, own, arena.handle.pointer, num_bytes)
        else:
            copies, boxes = self._prepare(tensors)
            copies.run(own, target)
            digests = boxes.run(np.concatenate([own, target]))
        write_handle(self._store, self._plan, slot, self._rank, arena.handle)
        return digests

    def _write_from_host(
        self, tensors: dict[str, torch.Tensor], own: np.ndarray, target: int, num_bytes: int
    ) -> list[int]:
        import torch

        packed = torch.empty(max(num_bytes, 1), dtype=torch.uint8)
        digests = self._transfer(tensors).publish.run_with_digests(own, addresses_of([packed]))
        self._device.bytes_at(target, len(packed)).copy_(packed)
        return digests

    def _give_back(self, slot: int, policy_version: int) -> None:
        while True:
            seen = self._words.sequence()
            if not self._receivers_before(policy_version):
                break
            self._words.wait(seen, _LOOK_S)
        self._arenas.pop(slot).close()

    def _tables(self, transfer: TransferPrograms) -> tuple[CopyTable, DigestTable]:
        return transfer.publish.table, transfer.published

    def _store_bytes(self) -> list[int]:
        return [max(self._mailbox.num_bytes[self._rank], 1)]
