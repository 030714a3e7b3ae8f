"""What the two ends of a device store have in common: where pieces lie, and the programs for a rank's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from rlinf_comm.copies import CopyProgram
from rlinf_comm.weights.device.device import Copies, Digests, TransferDevice
from rlinf_comm.weights.device.memory import Mailbox
from rlinf_comm.weights.region import checked_tensors, device_type_of
from rlinf_comm.weights.store.side import StoreSide
from rlinf_comm.weights.transfer import Part, TransferPrograms

if TYPE_CHECKING:
    import torch


class DevicePrograms:
    """What a rank's device does in a sync of tensors with certain strides."""

    def __init__(self, transfer: TransferPrograms, device: TransferDevice) -> None:
        self.transfer, self._device = transfer, device
        self._copies: dict[int, Copies] = {}
        self._through: list[Copies] | None = None

    def of(self, program: CopyProgram) -> Copies:
        """One of the transfer's own programs, prepared once."""
        if id(program) not in self._copies:
            self._copies[id(program)] = self._device.copies(program)
        return self._copies[id(program)]

    @cached_property
    def held(self) -> Digests:
        """The digests of what the tensors hold; they are in the dtype that is served."""
        return self._device.digests(self.transfer.held)

    def published_through(self, num_bytes: int) -> list[Copies]:
        """What the transfer's function of that name returns, prepared once for the `num_bytes` of the first call."""
        if self._through is None:
            self._through = [self._device.copies(one) for one in self.transfer.published_through(num_bytes)]
        return self._through


class DeviceSide(StoreSide):
    """A rank's tensors are on its device, or all of them on the host: a model may not have come to its device yet."""

    _device: TransferDevice
    _mailbox: Mailbox
    _programs: DevicePrograms | None = None

    def _checked(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        who, kind = f"{self._role} {self._rank}", device_type_of(tensors, self._device.type)
        return checked_tensors(f"weight store {self._store.name!r}", who, self._buffers, tensors, device_type=kind)

    def _are_on_host(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        return self._device.type != device_type_of(tensors, self._device.type)

    def _parts(self) -> list[Part]:
        return [
            replace(part, store_offset=self._mailbox.offsets[placed.index])
            for part, placed in zip(super()._parts(), self._own, strict=True)
        ]

    def _on_device(self, tensors: dict[str, torch.Tensor]) -> DevicePrograms:
        """The programs for these tensors on the device; made again when their strides change."""
        transfer = self._transfer(tensors)
        if self._programs is None or self._programs.transfer is not transfer:
            self._programs = DevicePrograms(transfer, self._device)
        return self._programs
