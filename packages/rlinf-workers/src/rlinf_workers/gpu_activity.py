"""How busy a GPU was, by its own counters: NVML's GPU performance monitoring (GPM), on Hopper and later.

A sample holds the state of the counters; two of them give the shares of the time between. All processes on the GPU
count. No GPU has run this code yet.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlinf_workers.nvml import NvmlDevice, known_device

COUNTERS: Mapping[str, int] = {"sm_active": 2, "tensor_active": 5, "dram_active": 10}
"""Name -> NVML_GPM_METRIC_SM_UTIL, _ANY_TENSOR_UTIL and _DRAM_BW_UTIL, all in per cent; the names are DCGM's."""
SHORTEST_S = 0.1
"""Between two samples; the driver's counters do not resolve less."""


class _Support(ctypes.Structure):
    """nvmlGpmSupport_t"""

    _fields_ = [("version", ctypes.c_uint), ("is_supported", ctypes.c_uint)]


class _Metric(ctypes.Structure):
    """nvmlGpmMetric_t, with the three texts that describe it."""

    _fields_ = [
        ("id", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("value", ctypes.c_double),
        ("texts", ctypes.c_char_p * 3),
    ]


class _Metrics(ctypes.Structure):
    """nvmlGpmMetricsGet_t with as many metrics as are asked for; the driver reads and writes no more."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("count", ctypes.c_uint),
        ("first", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("metrics", _Metric * len(COUNTERS)),
    ]


@dataclass(frozen=True, slots=True)
class GpuSample:
    """The counters at a time."""

    handle: ctypes.c_void_p
    taken_s: float


class GpuActivity(NvmlDevice):
    """The counters of one GPU.

    Raises: OSError also if the GPU has none.
    """

    def __init__(self, uuid: str, library: Any = None) -> None:
        super().__init__(uuid, library)
        support = _Support(version=1)
        self._call("nvmlGpmQueryDeviceSupport", self._handle, ctypes.byref(support))
        if not support.is_supported:
            raise OSError("NVML: this GPU has no performance monitoring")

    def begin(self) -> GpuSample | None:
        """A sample to be given to `since`; None where the counters cannot be read now."""
        try:
            return self.sample()
        except OSError:
            return None

    def sample(self) -> GpuSample:
        """To be freed by `since` or `free`. Raises: OSError, also where a container may not read counters."""
        handle = ctypes.c_void_p()
        self._call("nvmlGpmSampleAlloc", ctypes.byref(handle))
        try:
            self._call("nvmlGpmSampleGet", self._handle, handle)
        except OSError:
            self._library.nvmlGpmSampleFree(handle)
            raise
        return GpuSample(handle, time.monotonic())

    def since(self, first: GpuSample) -> tuple[float, dict[str, float]]:
        """Seconds since a sample, and the counters' shares of them: none where they cannot be read, or after less than
        `SHORTEST_S`. Frees the sample."""
        is_long = time.monotonic() - first.taken_s >= SHORTEST_S
        last = self.begin() if is_long else None
        try:
            if last is None:
                return 0.0, {}
            return last.taken_s - first.taken_s, self._between(first, last)
        except OSError:
            return 0.0, {}
        finally:
            for sample in filter(None, (first, last)):
                self.free(sample)

    def free(self, sample: GpuSample) -> None:
        self._library.nvmlGpmSampleFree(sample.handle)

    def _between(self, first: GpuSample, last: GpuSample) -> dict[str, float]:
        """Counter -> its share of the time, 0 to 1; without those that the GPU does not have. Raises: OSError."""
        request = _Metrics(version=1, count=len(COUNTERS), first=first.handle, last=last.handle)
        for metric, number in zip(request.metrics, COUNTERS.values(), strict=True):
            metric.id = number
        self._call("nvmlGpmMetricsGet", ctypes.byref(request))
        answers = zip(COUNTERS, request.metrics, strict=True)
        return {name: metric.value / 100 for name, metric in answers if metric.status == 0}


@cache
def gpu_activity(index: int) -> GpuActivity | None:
    """The counters of the GPU that torch numbers so in this process; None where they cannot be read."""
    return known_device(_readable, index)


def _readable(uuid: str) -> GpuActivity:
    """Raises: OSError."""
    activity = GpuActivity(uuid)
    activity.free(activity.sample())
    return activity
