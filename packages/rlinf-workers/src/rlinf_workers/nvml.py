"""NVML (libnvidia-ml.so.1 of the driver), called through ctypes: no package is needed, and no CUDA context created."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

Device = TypeVar("Device", bound="NvmlDevice")
LIBRARY = "libnvidia-ml.so.1"


class NvmlDevice:
    """One GPU, as the driver knows it.

    Args:
        uuid: as NVML names it, for example `GPU-8f2b...`.
        library: stands in for the driver's, in tests.
    Raises: OSError if the driver's library is missing or does not know the GPU.
    """

    def __init__(self, uuid: str, library: Any = None) -> None:
        self._library = library or ctypes.CDLL(LIBRARY)
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))

    def _call(self, name: str, *arguments: Any) -> None:
        """Raises: OSError if the function fails; AttributeError if the driver lacks it."""
        if status := getattr(self._library, name)(*arguments):
            raise OSError(f"NVML: {name} failed with status {status}")


def known_device(make: Callable[[str], Device], index: int) -> Device | None:
    """What `make` makes of the UUID of the GPU that torch numbers so in this process; None without CUDA, and where the
    driver cannot be asked."""
    import torch

    try:
        return make(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    except (OSError, AttributeError, RuntimeError, AssertionError):
        return None
