"""How a bucket is packed, unpacked and attested: in host memory, or on the device where the rank's tensors are.

A bucket is a row of bytes, in numpy's hands on the host and in torch's on a device. Links carry both (peers copy those
of a device to the host), and either end takes what the other one packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rlinf_comm import kept_pages
from rlinf_comm.copies import Int64s, addresses_of
from rlinf_comm.weights.region import device_type_of
from rlinf_comm.weights.transfer import TransferPrograms

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from rlinf_comm.weights.device.device import Copies, Digests, TransferDevice

    Bytes = npt.NDArray[np.uint8]


_KEPT_BYTES = 1 << 20
"""Buckets of at least so many bytes are packed in pages that have been used before."""


class Packing(Protocol):
    """One bucket between two ranks, for the tensors of one of them. `own` are the addresses of those."""

    def pack(self, own: Int64s) -> tuple[Bytes | torch.Tensor, list[int]]:
        """The bucket, and the digest of each of its boxes as a destination will serve it."""
        ...

    def unpack(self, data: Bytes | torch.Tensor, own: Int64s) -> None:
        """Puts a bucket, wherever it is, in its places."""
        ...

    def digests(self, own: Int64s) -> list[int]:
        """Of what the tensors hold in the bucket's places."""
        ...


class HostPacking:
    """For tensors of the host."""

    def __init__(self, transfer: TransferPrograms, num_bytes: int) -> None:
        self._transfer, self._num_bytes = transfer, num_bytes

    def pack(self, own: Int64s) -> tuple[Bytes, list[int]]:
        data = self._room()
        digests = self._transfer.publish.run_with_digests(own, np.array([data.ctypes.data], np.int64))
        return data, digests

    def unpack(self, data: Bytes | torch.Tensor, own: Int64s) -> None:
        row = data if isinstance(data, np.ndarray) else data.cpu().numpy()
        self._transfer.receive.run(np.array([row.ctypes.data], np.int64), own)

    def digests(self, own: Int64s) -> list[int]:
        return self._transfer.attest.run(own)

    def _room(self) -> Bytes:
        if self._num_bytes < _KEPT_BYTES:
            return np.zeros(self._num_bytes, np.uint8)
        data = np.frombuffer(kept_pages.take(self._num_bytes), np.uint8)
        data[self._gaps] = 0  # deltas compare them too
        return data

    @cached_property
    def _gaps(self) -> Int64s:
        """The places of the bytes between the boxes."""
        places = self._transfer.stored_at()
        ends = [0, *(start + num_bytes for start, num_bytes in places)]
        starts = [*(start for start, _ in places), self._num_bytes]
        return np.concatenate([np.arange(end, start) for end, start in zip(ends, starts, strict=True)])


class DevicePacking:
    """For tensors of a device: nothing passes through host memory here."""

    def __init__(self, transfer: TransferPrograms, num_bytes: int, device: TransferDevice) -> None:
        self._transfer, self._num_bytes, self._device = transfer, num_bytes, device

    def pack(self, own: Int64s) -> tuple[torch.Tensor, list[int]]:
        import torch

        data = torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device.type)
        target = addresses_of([data])
        return data, self._packs.run_with_digests(own, target)

    def unpack(self, data: Bytes | torch.Tensor, own: Int64s) -> None:
        import torch

        row = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
        row = row.to(self._device.type)
        self._unpacks.run(addresses_of([row]), own)

    def digests(self, own: Int64s) -> list[int]:
        return self._served.run(own)

    @cached_property
    def _packs(self) -> Copies:
        return self._device.copies(self._transfer.publish)

    @cached_property
    def _unpacks(self) -> Copies:
        return self._device.copies(self._transfer.receive)

    @cached_property
    def _served(self) -> Digests:
        return self._device.digests(self._transfer.held)


def are_on(device: TransferDevice | None, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a rank's tensors are packed on its device."""
    return device is not None and device_type_of(tensors, device.type) == device.type
