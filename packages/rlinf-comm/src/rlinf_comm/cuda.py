"""Copies, casts and digests in device memory: a copy table as one kernel launch on a stream of the caller's.

    program = CudaCopyProgram(table)
    program.run(pointers_of(sources), pointers_of(destinations), stream=stream, max_ctas=16)

The table is that of `rlinf_comm.copies`. Its tiles depend on the addresses (they decide how wide the loads can be), so
a program lowers and uploads them when it sees addresses that are not those of the run before. Imports without a driver;
`run` raises DeviceUnavailable there. The native side: csrc/include/rlinf/comm/cuda/copy_tile.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlinf_comm import _C
from rlinf_comm.copies import CODE_BYTES, DigestTable
from rlinf_comm.errors import CommError

DEFAULT_MAX_CTAS = 32
"""Thread blocks of 8 warps: a part of the device, so that a copy can run beside a step. Raise it on an idle one."""

_COLUMNS = (
    "src_buffer",
    "dst_buffer",
    "src_offset",
    "dst_offset",
    "lengths",
    "src_strides",
    "dst_strides",
    "src_dtype",
    "dst_dtype",
)
_CUDA_DEVICE_TYPES = (2, 13)  # DLPack: kDLCUDA, kDLCUDAManaged
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_INTERFACE_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex", "b": "bool"}


class DeviceUnavailable(CommError):
    """This build has no kernels, or this machine no CUDA device; the text says which."""


def check_device() -> None:
    """Raises DeviceUnavailable when nothing can run on a device here."""
    if not _C.has_cuda_kernels():
        raise DeviceUnavailable(
            "rlinf-comm was built without CUDA; rebuild it where nvcc is found, or with RLINF_CUDA=ON"
        )
    if _C.num_cuda_devices() == 0:
        raise DeviceUnavailable("no CUDA device: the driver is missing or too old, or CUDA_VISIBLE_DEVICES hides all")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRegion:
    """Device memory of somebody's array. The array must outlive it."""

    pointer: int
    """Address of the first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes."""
    dtype: str
    """Name with bits: "float32", "bfloat16", "uint8", "bool8"."""
    device: int | None
    """Ordinal in this process; None when the protocol does not say (__cuda_array_interface__)."""


def as_region(array: Any) -> DeviceRegion:
    """What `array` (torch, cupy, anything with DLPack or __cuda_array_interface__) holds in device memory.

    DLPack is asked first, since it alone knows bfloat16 and the device. No stream is waited for: the caller orders its
    work.

    Raises:
        TypeError: neither protocol.
        ValueError: the array is not in CUDA memory.
    """
    if getattr(array, "requires_grad", False):
        array = array.detach()  # a parameter: torch does not export those
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        device_type, device = array.__dlpack_device__()
        if int(device_type) not in _CUDA_DEVICE_TYPES:
            raise ValueError(f"{type(array).__name__} is not in CUDA memory (DLPack device type {int(device_type)})")
        return _region_of_dlpack(array, int(device))
    if hasattr(array, "__cuda_array_interface__"):
        return _region_of_interface(array.__cuda_array_interface__)
    raise TypeError(f"{type(array).__name__} has neither __dlpack__ nor __cuda_array_interface__")


def row_major_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def _region_of_interface(interface: dict[str, Any]) -> DeviceRegion:
    dtype = np.dtype(interface["typestr"])
    if dtype.kind not in _INTERFACE_KINDS:
        raise ValueError(f"the typestr {interface['typestr']!r} is none of {sorted(_INTERFACE_KINDS)}")
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    return DeviceRegion(
        pointer=int(interface["data"][0] or 0),
        shape=shape,
        strides=tuple(strides) if strides is not None else row_major_strides(shape, dtype.itemsize),
        dtype=f"{_INTERFACE_KINDS[dtype.kind]}{dtype.itemsize * 8}",
        device=None,
    )


class _DLTensor(ctypes.Structure):
    """The DLTensor of the DLPack specification, first member of the unversioned capsule's struct."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _region_of_dlpack(array: Any, device: int) -> DeviceRegion:
    capsule = array.__dlpack__(stream=-1)  # -1: no synchronization
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _DLTensor.from_address(pointer_of(capsule, b"dltensor"))
    if tensor.lanes != 1 or tensor.code not in _DLPACK_KINDS or tensor.bits % 8:
        raise ValueError(f"DLPack type (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes) is not supported")
    itemsize = tensor.bits // 8
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = (
        tuple(stride * itemsize for stride in tensor.strides[: tensor.ndim])
        if tensor.strides
        else row_major_strides(shape, itemsize)
    )
    return DeviceRegion(
        pointer=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        dtype=f"{_DLPACK_KINDS[tensor.code]}{tensor.bits}",
        device=device,
    )


def pointers_of(arrays: Iterable[Any]) -> npt.NDArray[np.int64]:
    """The address of each array's first element, as `run` takes them."""
    return np.array([as_region(array).pointer for array in arrays], dtype=np.int64)


def stream_handle(stream: Any) -> int:
    """The handle of a stream, which may be an integer, a torch stream (`cuda_stream`) or a cupy stream (`ptr`)."""
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    return int(stream)


class CudaCopyProgram:
    """A copy table, run on the device as often as wanted.

    Args:
        table: a `rlinf_comm.copies.CopyTable`, or anything with its fields.
        device: ordinal of the device that runs the kernel; peers' memory must be mapped into it.
    """

    def __init__(self, table: Any, *, device: int = 0) -> None:
        self._columns = [np.ascontiguousarray(getattr(table, name)) for name in _COLUMNS]
        self._device = device
        self._addresses: bytes | None = None
        self._tiles: _C.DeviceBytes | None = None

    def lower(self, src_pointers: npt.ArrayLike, dst_pointers: npt.ArrayLike) -> bytes:
        """The kernel's tiles for these addresses; needs no device."""
        sides = [np.asarray(pointers, dtype=np.int64) for pointers in (src_pointers, dst_pointers)]
        return _C.lower_copies(*self._columns, *sides)

    def run(
        self,
        src_pointers: npt.ArrayLike,
        dst_pointers: npt.ArrayLike,
        *,
        stream: Any,
        max_ctas: int = DEFAULT_MAX_CTAS,
    ) -> None:
        """Enqueues the copies on `stream` (an integer handle, or a torch or cupy stream) and returns.

        The pointers are base addresses, one for each buffer number of the table. New addresses cost a lowering and an
        upload, which waits for the program's runs before.

        Raises:
            DeviceUnavailable: no kernels in this build, or no device.
            ValueError: the table cannot be lowered, `max_ctas` is below 1.
        """
        check_device()
        sides = [np.asarray(pointers, dtype=np.int64) for pointers in (src_pointers, dst_pointers)]
        addresses = b"|".join(side.tobytes() for side in sides)
        if self._tiles is None or addresses != self._addresses:
            self._tiles = _C.DeviceBytes(self.lower(*sides), self._device)
            self._addresses = addresses
        _C.run_copy_tiles(self._tiles, max_ctas, stream_handle(stream))


DigestBox = tuple[int, int, int, Sequence[int], Sequence[int], Sequence[int], int]
"""(address, element bytes, first flat index, shape, memory strides in bytes, index strides in elements, sum number)."""


def device_digests(
    boxes: Sequence[DigestBox], num_sums: int, *, stream: Any, device: int = 0, max_ctas: int = DEFAULT_MAX_CTAS
) -> list[int]:
    """The digests (rlinf_comm.weights.digest) of boxes in device memory, summed by number. Waits for the stream.

    Raises:
        DeviceUnavailable: no kernels in this build, or no device.
        ValueError: a sum's number is not below `num_sums`, or an element size that has no digest.
    """
    for box in boxes:
        if not 0 <= box[6] < num_sums:
            raise ValueError(f"a box adds to sum {box[6]}, but num_sums={num_sums}")
    check_device()
    return _sums(_C.DeviceBytes(_C.lower_digests(boxes), device), num_sums, stream, max_ctas)


def _sums(tiles: _C.DeviceBytes, num_sums: int, stream: Any, max_ctas: int) -> list[int]:
    sums = _C.run_digest_tiles(tiles, num_sums, max_ctas, stream_handle(stream))
    return [low | high << 64 for low, high in sums]


class CudaDigestProgram:
    """The digests of a table's boxes, computed on the device as often as wanted.

    Args:
        table: without casts: the kernel digests what is stored.
        device: ordinal of the device that runs the kernel.

    Raises:
        ValueError: a box is to be digested as another dtype than it is stored in.
    """

    def __init__(self, table: DigestTable, *, device: int = 0) -> None:
        if not np.array_equal(table.dtype, table.as_dtype):
            raise ValueError("a device digests what is stored; boxes that are to be cast have to be copied first")
        self._table = table
        self._device = device
        self._addresses: bytes | None = None
        self._tiles: _C.DeviceBytes | None = None

    def lower(self, pointers: npt.ArrayLike) -> bytes:
        """The kernel's tiles for these addresses; needs no device."""
        table, bases = self._table, np.asarray(pointers, dtype=np.int64)
        addresses = (bases[table.buffer] + table.offset).tolist()
        sizes = CODE_BYTES[table.dtype].tolist()
        rows = (table.first_index, table.lengths, table.strides, table.index_strides, table.digest)
        return _C.lower_digests(list(zip(addresses, sizes, *(row.tolist() for row in rows), strict=True)))

    def run(self, pointers: npt.ArrayLike, *, stream: Any, max_ctas: int = DEFAULT_MAX_CTAS) -> list[int]:
        """The table's digests, each the 128-bit sum over its boxes. Waits for the stream.

        New addresses cost a lowering and an upload, as in a CudaCopyProgram.

        Raises:
            DeviceUnavailable: no kernels in this build, or no device.
        """
        check_device()
        addresses = np.asarray(pointers, dtype=np.int64).tobytes()
        if self._tiles is None or addresses != self._addresses:
            self._tiles = _C.DeviceBytes(self.lower(pointers), self._device)
            self._addresses = addresses
        return _sums(self._tiles, self._table.num_digests, stream, max_ctas)
