"""What this package needs of the CUDA driver, as a protocol. `_C.CudaDriver` is the real one."""

from __future__ import annotations

import functools
from typing import Protocol

from rlinf_comm import _C
from rlinf_comm.errors import IpcError

LEGACY, DESCRIPTOR = "legacy", "descriptor"
KINDS = (LEGACY, DESCRIPTOR)
"""Kinds of handles, best first: cudaIpc needs nothing else, a descriptor needs the sender's socket."""

Mapping = tuple[int, int, int]
"""(handle, pointer, bytes) of memory that was mapped by the virtual memory functions."""


class Driver(Protocol):
    """Failures are OSError with the driver's name of the error. Pointers are integers."""

    def allocate(self, device: int, num_bytes: int, /) -> int: ...
    def free(self, device: int, pointer: int, /) -> None: ...
    def allocation_of(self, device: int, pointer: int, /) -> tuple[int, int]:
        """(first address, bytes) of the allocation that a pointer lies in."""
        ...

    def export_legacy(self, device: int, pointer: int, /) -> bytes: ...
    def open_legacy(self, device: int, handle: bytes, /) -> int: ...
    def close_legacy(self, device: int, pointer: int, /) -> None: ...
    def create_mapping(self, device: int, num_bytes: int, /) -> Mapping: ...
    def export_descriptor(self, mapping: Mapping, /) -> int: ...
    def import_descriptor(self, device: int, fd: int, num_bytes: int, /) -> Mapping: ...
    def release_mapping(self, device: int, mapping: Mapping, /) -> None: ...
    def read(self, device: int, source: int, num_bytes: int, /) -> bytes: ...
    def write(self, device: int, target: int, content: bytes, /) -> None: ...


@functools.lru_cache(maxsize=1)
def load_driver() -> Driver:
    """The process's CUDA driver.

    Raises:
        IpcError: none, or one without a device.
    """
    try:
        return _C.CudaDriver.load()
    except ValueError as error:
        raise IpcError(str(error)) from None
