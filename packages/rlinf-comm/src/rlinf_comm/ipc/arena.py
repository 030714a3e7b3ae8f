"""An allocation of device memory that other processes of the machine can open."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass

from rlinf_comm import _C
from rlinf_comm.errors import IpcError
from rlinf_comm.ipc.driver import DESCRIPTOR, KINDS, LEGACY, Driver, Mapping
from rlinf_comm.ipc.opened import OpenedArenas, mark_as_own
from rlinf_comm.records import record

ALIGNMENT = 512
"""Bytes that the offset of each tensor is a multiple of, as in torch's caching allocator: loads can be wide, and no two
tensors share a cache line."""


@record
@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """What another process needs to open an arena. Packable, hashable."""

    kind: str
    token: bytes
    """64 bytes of a legacy handle; empty for a descriptor."""
    address: tuple[int, int, int, int] | None
    """Where a descriptor is requested: (pid, start time, fd, nonce)."""
    process: tuple[int, int]
    pointer: int
    """The arena's address in the process that created it."""
    num_bytes: int
    nonce: bytes
    """Tells arenas apart whose handles and addresses are equal, one after the other."""


class IpcArena:
    """Device memory of this process that others may open. It must outlive their use."""

    def __init__(self, driver: Driver, device: int, capacity_bytes: int, kind: str) -> None:
        """Private: use IpcArena.create. Raises OSError when the driver does not export this kind."""
        mapping: Mapping | None = None
        self._fd: int | None = None
        token, address = b"", None
        if kind == LEGACY:
            pointer = driver.allocate(device, capacity_bytes)
            undo = weakref.finalize(self, driver.free, device, pointer)
        else:
            assert kind == DESCRIPTOR, kind
            mapping = driver.create_mapping(device, capacity_bytes)
            pointer, capacity_bytes = mapping[1], mapping[2]
            undo = weakref.finalize(self, driver.release_mapping, device, mapping)
        self._release = undo
        undo.atexit = False  # the process ends, and the driver with it
        try:
            if mapping is None:
                token = driver.export_legacy(device, pointer)
            else:
                self._fd = driver.export_descriptor(mapping)
                address = _C.serve_descriptor(self._fd)
        except OSError:
            self.close()
            raise
        self.handle = ArenaHandle(kind, token, address, _C.current_process(), pointer, capacity_bytes, os.urandom(8))
        mark_as_own(self.handle.nonce)

    @classmethod
    def create(cls, device: int, capacity_bytes: int, *, driver: Driver) -> IpcArena:
        """Allocates the memory, with the first kind of handle that the driver exports.

        Args:
            device: ordinal in this process.
            capacity_bytes: may be rounded up.

        Raises:
            IpcError: no memory, or no kind works; with each kind's reason.
        """
        refusals = []
        for kind in KINDS:
            try:
                return cls(driver, device, capacity_bytes, kind)
            except OSError as error:
                refusals.append(f"{kind}: {error.args[-1]}")
        text = "; ".join(refusals)
        raise IpcError(f"no arena of {capacity_bytes} bytes that others can open on device {device}: {text}")

    def close(self) -> None:
        """Frees the memory. Nobody may use it any more, here or elsewhere."""
        if self._fd is not None:
            _C.stop_serving_descriptor(self._fd)
            os.close(self._fd)
            self._fd = None
        self._release()


def export_allocation(driver: Driver, device: int, pointer: int) -> ArenaHandle:
    """What another process needs to open memory that a library of this process has allocated, such as torch, which must
    not free it meanwhile. Raises OSError if the driver does not export it, for example mapped memory."""
    base, num_bytes = driver.allocation_of(device, pointer)
    token = driver.export_legacy(device, base)
    handle = ArenaHandle(LEGACY, token, None, _C.current_process(), base, num_bytes, os.urandom(8))
    mark_as_own(handle.nonce)
    return handle


_opened: dict[int, OpenedArenas] = {}
_opened_lock = threading.Lock()


def opened_arenas(driver: Driver) -> OpenedArenas:
    """The one table of this process for a driver; a forked child has its own, since contexts do not cross a fork."""
    with _opened_lock:
        if os.getpid() not in _opened:
            _opened.clear()
            _opened[os.getpid()] = OpenedArenas(driver)
        return _opened[os.getpid()]
