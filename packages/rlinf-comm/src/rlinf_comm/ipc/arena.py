"""Device memory of our own, exported once, and tensors in it."""

from __future__ import annotations

import bisect
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf_comm import _C
from rlinf_comm.cuda import as_region, row_major_strides
from rlinf_comm.errors import IpcError
from rlinf_comm.ipc.driver import Driver, Mapping, device_named, load_driver, uuid_text
from rlinf_comm.ipc.opened import OpenedArenas, mark_as_own
from rlinf_comm.ipc.transport import FABRIC, KINDS, LEGACY
from rlinf_comm.records import record

if TYPE_CHECKING:
    import torch

ALIGNMENT = 512
"""Bytes that the offset of each tensor is a multiple of, as in torch's caching allocator: loads can be wide, and no two
tensors share a cache line."""


@record
@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """What another process needs to open an arena. Packable, hashable."""

    kind: str
    token: bytes
    """64 bytes of a legacy or fabric handle; empty for a descriptor."""
    address: tuple[int, int, int, int] | None
    """Where a descriptor is asked for: (pid, start time, fd, nonce)."""
    uuid: bytes
    process: tuple[int, int]
    pointer: int
    """The arena's address in the process that made it."""
    num_bytes: int
    nonce: bytes
    """Tells arenas apart whose handles and addresses are equal, one after the other."""


@record
@dataclass(frozen=True, slots=True)
class IpcRecord:
    """A tensor in an arena. Packable: a few hundred bytes whatever the tensor's size."""

    arena: ArenaHandle
    offset: int
    """Bytes from the start of the arena."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements from one index to the next, for each dimension."""
    dtype: str
    """Name of the torch dtype without its prefix: "bfloat16"."""


class Ranges:
    """Which bytes of an arena are free: first fit, neighbours merge."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free: list[tuple[int, int]] = [(0, num_bytes)]
        self._lock = threading.RLock()  # a finalizer may run inside of take()

    def take(self, num_bytes: int) -> int | None:
        """The offset, a multiple of ALIGNMENT; None when no free range is long enough."""
        aligned_bytes = max(-(-num_bytes // ALIGNMENT), 1) * ALIGNMENT
        with self._lock:
            for index, (start, length) in enumerate(self._free):
                if length >= aligned_bytes:
                    rest = [(start + aligned_bytes, length - aligned_bytes)] if length > aligned_bytes else []
                    self._free[index : index + 1] = rest
                    return start
        return None

    def give(self, offset: int, num_bytes: int) -> None:
        """Gives back what take() gave."""
        length = max(-(-num_bytes // ALIGNMENT), 1) * ALIGNMENT
        with self._lock:
            index = bisect.bisect(self._free, (offset, 0))
            if index < len(self._free) and self._free[index][0] == offset + length:
                length += self._free.pop(index)[1]
            if index and sum(self._free[index - 1]) == offset:
                index -= 1
                offset, before = self._free.pop(index)
                length += before
            self._free.insert(index, (offset, length))

    def num_free(self) -> int:
        """Returns the number of free bytes."""
        with self._lock:
            return sum(length for _, length in self._free)


class DeviceMemory:
    """Bytes on a device, by the protocol that torch and CuPy take. `owner` lives as long."""

    def __init__(self, pointer: int, num_bytes: int, owner: Any) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (num_bytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


_living: weakref.WeakSet[IpcArena] = weakref.WeakSet()


def arena_with(pointer: int, num_bytes: int) -> IpcArena | None:
    """The arena of this process in which these bytes lie."""
    for arena in list(_living):
        start = arena.handle.pointer
        if start <= pointer and pointer + num_bytes <= start + arena.handle.num_bytes:
            return arena
    return None


class IpcArena:
    """Device memory of this process that others may open. It must outlive their use: see rlinf_comm.ipc.leases."""

    def __init__(self, driver: Driver, device: int, capacity_bytes: int, kind: str) -> None:
        self._driver = driver
        self.device = device
        self._mapping: Mapping | None = None
        self._fd: int | None = None
        token, address = b"", None
        if kind == LEGACY:
            pointer = driver.allocate(device, capacity_bytes)
            undo = weakref.finalize(self, driver.free, device, pointer)
        else:
            mapping = driver.create_mapping(device, capacity_bytes, kind == FABRIC)
            pointer, capacity_bytes = mapping[1], mapping[2]
            undo = weakref.finalize(self, driver.release_mapping, device, mapping)
            self._mapping = mapping
        self._release = undo
        undo.atexit = False  # the process ends, and the driver with it
        try:
            if kind == LEGACY:
                token = driver.export_legacy(device, pointer)
            elif kind == FABRIC:
                token = driver.export_fabric(self._mapping)  # type: ignore[arg-type]
            else:
                self._fd = driver.export_descriptor(self._mapping)  # type: ignore[arg-type]
                address = _C.serve_descriptor(self._fd)
        except OSError:
            self.close()
            raise
        self.handle = ArenaHandle(
            kind, token, address, driver.uuid(device), _C.current_process(), pointer, capacity_bytes, os.urandom(8)
        )
        mark_as_own(self.handle.nonce)
        _living.add(self)
        self._ranges = Ranges(capacity_bytes)

    @classmethod
    def create(
        cls, device: int, capacity_bytes: int, *, kind: str | None = None, driver: Driver | None = None
    ) -> IpcArena:
        """Takes the memory now.

        Args:
            device: ordinal in this process.
            capacity_bytes: may be rounded up.
            kind: handle kind, as the probe chose it; None: the first that the driver exports.

        Raises:
            IpcError: no driver, no memory, or no kind works; with each kind's reason.
        """
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes={capacity_bytes} must be at least 1")
        if kind is not None and kind not in KINDS:
            raise ValueError(f"kind={kind!r} is none of {KINDS}")
        driver = driver or load_driver()
        refusals = []
        for each in (kind,) if kind else KINDS:
            try:
                return cls(driver, device, capacity_bytes, each)
            except OSError as error:
                refusals.append(f"{each}: {error.args[-1]}")
        text = "; ".join(refusals)
        raise IpcError(f"no arena of {capacity_bytes} bytes that others can open on device {device}: {text}")

    def reserve(self, num_bytes: int) -> DeviceMemory:
        """Bytes of the arena, given back when the result (and what torch or CuPy made of it) is gone.

        Raises:
            IpcError: no free range is long enough.
        """
        offset = self._ranges.take(num_bytes)
        if offset is None:
            raise IpcError(
                f"the arena has {self._ranges.num_free()} of {self._ranges.num_bytes} bytes free, and no "
                f"{num_bytes} bytes in a row; drop tensors, or create it larger"
            )
        memory = DeviceMemory(self.handle.pointer + offset, num_bytes, self)
        weakref.finalize(memory, self._ranges.give, offset, num_bytes).atexit = False
        return memory

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized row-major tensor on the arena's device."""
        num_bytes = dtype.itemsize
        for length in shape:
            num_bytes *= length
        return tensor_over(self.reserve(num_bytes), num_bytes, shape, None, dtype, self.device)

    def export(self, array: Any) -> IpcRecord:
        """The record of an array (any view) in this arena; torch's, CuPy's or `reserve`'s.

        Raises:
            ValueError: it lies elsewhere, or has strides that are no multiples of its element size.
        """
        region = as_region(array)
        dtype = {"bool8": "bool"}.get(region.dtype, region.dtype)
        itemsize = int("".join(filter(str.isdigit, region.dtype))) // 8
        strides = region.strides
        low = region.pointer + sum(min(s * (n - 1), 0) for n, s in zip(region.shape, strides, strict=True))
        high = region.pointer + itemsize + sum(max(s * (n - 1), 0) for n, s in zip(region.shape, strides, strict=True))
        base = self.handle.pointer
        if not base <= low <= high <= base + self.handle.num_bytes:
            raise ValueError(
                f"an array of shape {region.shape} at {region.pointer:#x} is not in the arena {base:#x} + "
                f"{self.handle.num_bytes}; make it with arena.empty, or copy it there"
            )
        if any(stride % itemsize for stride in strides):
            raise ValueError(f"byte strides {strides} are no multiples of the element size {itemsize}")
        return IpcRecord(
            self.handle, region.pointer - base, region.shape, tuple(stride // itemsize for stride in strides), dtype
        )

    def close(self) -> None:
        """Frees the memory. Nobody may use it any more, here or elsewhere."""
        if self._fd is not None:
            _C.stop_serving_descriptor(self._fd)
            os.close(self._fd)
            self._fd = None
        _living.discard(self)
        self._release()


_opened: dict[int, OpenedArenas] = {}
_opened_lock = threading.Lock()


def opened_arenas(driver: Driver) -> OpenedArenas:
    """The one table of this process for a driver; a forked child has its own, since contexts do not cross a fork."""
    with _opened_lock:
        if os.getpid() not in _opened:
            _opened.clear()
            _opened[os.getpid()] = OpenedArenas(driver)
        return _opened[os.getpid()]


def open_memory(record: IpcRecord, *, device: int | None = None, arenas: OpenedArenas, driver: Driver) -> DeviceMemory:
    """The memory from the record's first element to the arena's end; its arena is open as long as the result lives.

    Args:
        device: the local device that will use it; None: the arena's own.
    """
    home = device_named(driver, record.arena.uuid)
    if home is None:
        visible = ", ".join(uuid_text(driver.uuid(each)) for each in range(driver.num_devices())) or "none"
        raise IpcError(
            f"the tensor is on {uuid_text(record.arena.uuid)}, which this process does not see (visible: {visible}); "
            "set CUDA_VISIBLE_DEVICES so that it does, or use host shared memory"
        )
    user = home if device is None else device
    base = arenas.open(record.arena, user)
    memory = DeviceMemory(base + record.offset, record.arena.num_bytes - record.offset, None)
    weakref.finalize(memory, arenas.close, record.arena, user).atexit = False
    return memory


def open_record(record: IpcRecord, *, device: int | None = None) -> torch.Tensor:
    """The tensor itself, in the sender's memory: no copy, and writes are seen on both sides.

    Nothing is waited for: order the two sides' work with rlinf_comm.ipc.leases.

    Raises:
        IpcError: the sender is gone, the device is not visible here, or the driver refuses; with the reason.
    """
    import torch

    driver = load_driver()
    memory = open_memory(record, device=device, arenas=opened_arenas(driver), driver=driver)
    home = device_named(driver, record.arena.uuid)
    dtype = getattr(torch, record.dtype)
    last = sum((n - 1) * max(s, 0) for n, s in zip(record.shape, record.strides, strict=True))
    num_bytes = 0 if 0 in record.shape else (last + 1) * dtype.itemsize
    return tensor_over(memory, num_bytes, record.shape, record.strides, dtype, home)


def tensor_over(
    memory: DeviceMemory,
    num_bytes: int,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    dtype: torch.dtype,
    device: int | None,
) -> torch.Tensor:
    """The first `num_bytes` as a tensor on the local `device`; strides in elements, None: row-major."""
    import torch

    if num_bytes == 0:
        return torch.empty(tuple(shape), dtype=dtype, device=f"cuda:{device}")
    flat = torch.as_tensor(memory, device=f"cuda:{device}")[:num_bytes].view(dtype)  # holds `memory`
    elements = strides if strides is not None else row_major_strides(tuple(shape), 1)
    return flat.as_strided(tuple(shape), tuple(elements))
