"""GPU memory by process, read from a library that stands in for NVML."""

import ctypes
import os
from types import SimpleNamespace

import pytest
import torch

from rlinf_workers import gpu_memory
from rlinf_workers.gpu_memory import CONTEXT_BYTES, GpuMemory, GpuUse, free_gpu_bytes, held_gpu_bytes


def nvml(processes, *, free=7 << 30):
    """A driver's library with one GPU; `processes` are (pid, bytes)."""
    places = []

    def list_processes(handle, count, entries):
        places.append(len(entries))
        if len(entries) < len(processes):
            return 7
        count._obj.value = len(processes)
        for place, (pid, used) in zip(entries, processes, strict=False):
            place.pid, place.used = pid, used
        return 0

    def read_memory(handle, memory):
        memory._obj.free = free
        return 0

    functions = {
        "nvmlInit_v2": lambda: 0,
        "nvmlDeviceGetHandleByUUID": lambda uuid, handle: 0 if uuid == b"GPU-1" else 2,
        "nvmlDeviceGetMemoryInfo": read_memory,
        "nvmlDeviceGetComputeRunningProcesses_v3": list_processes,
    }
    return SimpleNamespace(places=places, **functions)


def test_processes_are_listed_however_many_there_are():
    library = nvml([(pid, pid << 20) for pid in range(100)])
    assert GpuMemory("GPU-1", library).process_bytes() == {pid: pid << 20 for pid in range(100)}
    assert library.places == [64, 128]
    unknown = nvml([(1, ctypes.c_ulonglong(-1).value), (2, 5)])
    assert GpuMemory("GPU-1", unknown).process_bytes() == {2: 5}
    with pytest.raises(OSError, match="HandleByUUID failed with status 2"):
        GpuMemory("GPU-2", library)


def test_an_engines_processes_count_with_the_worker_on_the_fullest_of_their_gpus(monkeypatch):
    gpus = [
        GpuMemory("GPU-1", nvml(one, free=free)) for one, free in (([(10, 3), (11, 20), (99, 500)], 9), ([(12, 30)], 5))
    ]
    monkeypatch.setattr(gpu_memory, "gpu_memory", gpus.__getitem__)
    assert held_gpu_bytes([10, 11, 12], range(2)) == 30
    assert held_gpu_bytes([10, 11], range(1)) == 23
    assert held_gpu_bytes([4], range(2)) is None, "ids of another namespace"
    assert free_gpu_bytes(range(2)) == 5


def test_a_workers_peak_has_its_engines_processes_and_what_torch_freed_again(monkeypatch):
    use, own = GpuUse(), os.getpid()
    for processes, reserved in (
        ([(own, 100), (7, 50)], (80, 80)),
        ([(own, 60), (7, 70)], (80, 40)),
        ([(9, 1)], (0, 0)),
    ):
        gpu = GpuMemory("GPU-1", nvml(processes))
        monkeypatch.setattr(gpu_memory, "gpu_memory", lambda index, gpu=gpu: gpu)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda reserved=reserved: reserved[0])
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda reserved=reserved: reserved[1])
        use.look([7], range(1), lambda: None)
    assert use.engine_bytes == 70, "between turns an engine may hold less"
    assert use.held_bytes == 60 + (80 - 40) + 70


def test_where_the_driver_lists_other_ids_processes_tell_what_torch_reserved(monkeypatch):
    gpu = GpuMemory("GPU-1", nvml([(4000001, 100)]))
    monkeypatch.setattr(gpu_memory, "gpu_memory", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 80)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 40)
    use = GpuUse()
    assert use.held_bytes is None
    use.look([7], range(1), lambda: 500)
    assert use.engine_bytes == 500 + CONTEXT_BYTES and use.held_bytes == 80 + 500 + 2 * CONTEXT_BYTES
    alone = GpuUse()
    alone.look([], range(1), lambda: None)
    assert alone.engine_bytes == 0 and alone.held_bytes == 80 + CONTEXT_BYTES
