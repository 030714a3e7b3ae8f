"""Arenas of other processes, opened once however often they are used, and closed when nobody uses them any more."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlinf_comm import _C
from rlinf_comm.errors import IpcError
from rlinf_comm.ipc.driver import DESCRIPTOR, LEGACY, Driver, Mapping

if TYPE_CHECKING:
    from rlinf_comm.ipc.arena import ArenaHandle


@dataclass
class _Entry:
    pointer: int
    mapping: Mapping | None
    count: int


_own_nonces: set[bytes] = set()


def mark_as_own(nonce: bytes) -> None:
    """The arena of this nonce was made in this process."""
    _own_nonces.add(nonce)


def is_own(handle: ArenaHandle) -> bool:
    """Whether this process made the arena. Its number alone does not tell: containers give out the same ones."""
    return handle.nonce in _own_nonces and handle.process == _C.current_process()  # a forked child knows the nonce, too


class OpenedArenas:
    """Others' arenas that are open here, by handle and local device. `open` and `close` come in pairs. Thread-safe."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._entries: dict[tuple[ArenaHandle, int], _Entry] = {}

    def open(self, handle: ArenaHandle, device: int) -> int:
        """The arena's address here, for kernels of the local `device`.

        Raises:
            IpcError: the process is gone, or the driver refuses; says which.
        """
        if is_own(handle):
            return handle.pointer  # a process cannot open its own handle, and need not
        with self._lock:
            entry = self._entries.get((handle, device))
            if entry is None:
                # The owner of the other kind is asked for its descriptor.
                if handle.kind == LEGACY and not _C.is_alive(*handle.process):
                    raise IpcError(f"process {handle.process[0]}, whose device memory this is, is gone")
                entry = self._entries[handle, device] = self._import(handle, device)
            entry.count += 1
            return entry.pointer

    def close(self, handle: ArenaHandle, device: int) -> None:
        """Gives back one `open`."""
        if is_own(handle):
            return
        with self._lock:
            entry = self._entries.get((handle, device))
            assert entry is not None, "closed more often than opened"
            entry.count -= 1
            if entry.count == 0:
                del self._entries[handle, device]
                self._release(handle, device, entry)

    def num_open(self) -> int:
        """Arenas that are open."""
        with self._lock:
            return len(self._entries)

    def _import(self, handle: ArenaHandle, device: int) -> _Entry:
        try:
            if handle.kind == LEGACY:
                return _Entry(self._driver.open_legacy(device, handle.token), None, 0)
            assert handle.kind == DESCRIPTOR and handle.address is not None, "a handle of an unknown kind"
            fd = _C.receive_descriptor(handle.address)
            try:
                mapping = self._driver.import_descriptor(device, fd, handle.num_bytes)
            finally:
                os.close(fd)  # the mapping has its own reference
        except (OSError, ValueError) as error:
            text = error.args[-1] if error.args else error
            raise IpcError(f"cannot open the {handle.kind} handle of process {handle.process[0]}: {text}") from error
        return _Entry(mapping[1], mapping, 0)

    def _release(self, handle: ArenaHandle, device: int, entry: _Entry) -> None:
        if handle.kind == LEGACY:
            self._driver.close_legacy(device, entry.pointer)
        else:
            assert entry.mapping is not None
            self._driver.release_mapping(device, entry.mapping)
