"""GPU memory as the driver counts it: what is free, and what each process holds, contexts and graphs included.

torch counts only what its own allocator holds in the calling process. The driver sees all processes, also those that an
engine starts.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Sequence
from functools import cache

from rlinf_workers.nvml import NvmlDevice, known_device

CONTEXT_BYTES = 1126 << 20
"""CUDA's own memory in each process: its context, kernels and workspaces. With the other constants of
`rlinf.planning.memory` it gives 23.6 and 53.7 GiB for the two jobs whose processes held 23.5 and 51.7 GiB of an H100
(docs/memory.md)."""
_TOO_SMALL = 7
"""NVML_ERROR_INSUFFICIENT_SIZE: the array has fewer places than there are processes."""


class _MemoryInfo(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t of the functions ending in _v3."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class GpuMemory(NvmlDevice):
    """The memory of one GPU."""

    def free_bytes(self) -> int:
        memory = _MemoryInfo()
        self._call("nvmlDeviceGetMemoryInfo", self._handle, ctypes.byref(memory))
        return memory.free

    def process_bytes(self) -> dict[int, int]:
        """Process id -> bytes. In a container the ids may be those outside of it."""
        places = 64
        while True:
            count, entries = ctypes.c_uint(places), (_ProcessInfo * places)()
            status = self._library.nvmlDeviceGetComputeRunningProcesses_v3(self._handle, ctypes.byref(count), entries)
            if status != _TOO_SMALL:
                break
            places = 2 * max(places, count.value)
        if status:
            raise OSError(f"NVML: listing the processes of a GPU failed with status {status}")
        unknown = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
        return {one.pid: one.used for one in entries[: count.value] if one.used != unknown}


class GpuUse:
    """The most that a worker's processes held of their GPUs, looked at when it has just computed: torch and an engine's
    processes keep the memory of their peak then."""

    def __init__(self) -> None:
        self.engine_bytes = 0
        """Of an engine's own processes, on the fullest of the GPUs."""
        self.held_bytes: int | None = None
        """Of all processes, CUDA contexts and graphs included; None: never looked at."""

    def look(
        self, engine_processes: Collection[int], indices: Sequence[int], engine_reserved: Callable[[], int | None]
    ) -> None:
        """Reads the present values; torch itself knows how much more this process held at its peak. Where the driver
        lists other process ids, as in a container, torch's own figures count, with `CONTEXT_BYTES` for each process.

        Args:
            engine_reserved: returns what torch has reserved at most in one of the engine's processes, if they tell.
        """
        import torch

        engine = held_gpu_bytes(engine_processes, indices)
        if engine is None and engine_processes:
            reserved = engine_reserved()
            engine = None if reserved is None else reserved + CONTEXT_BYTES
        own = held_gpu_bytes([os.getpid()], indices[:1])
        most = torch.cuda.max_memory_reserved()
        own = (most and most + CONTEXT_BYTES) if own is None else own + most - torch.cuda.memory_reserved()
        self.engine_bytes = max(self.engine_bytes, engine or 0)
        self.held_bytes = max(self.held_bytes or 0, own + (engine or 0))


@cache
def gpu_memory(index: int) -> GpuMemory | None:
    """The memory of the GPU that torch numbers so in this process; None where NVML cannot be asked."""
    return known_device(GpuMemory, index)


def free_gpu_bytes(indices: Sequence[int]) -> int:
    """Least free memory of these GPUs."""
    import torch

    memories = [gpu_memory(index) for index in indices]
    return min(
        torch.cuda.mem_get_info(index)[0] if memory is None else memory.free_bytes()
        for index, memory in zip(indices, memories, strict=True)
    )


def held_gpu_bytes(process_ids: Collection[int], indices: Sequence[int]) -> int | None:
    """Largest number of bytes that these processes together hold on one of the GPUs; None if NVML does not list them,
    as in a container with process ids of its own."""
    held = []
    for index in indices:
        if (memory := gpu_memory(index)) is None:
            return None
        try:
            of_process = memory.process_bytes()
        except OSError:  # a driver that does not count by process
            return None
        if listed := [of_process[pid] for pid in process_ids if pid in of_process]:
            held.append(sum(listed))
    return max(held, default=None)
