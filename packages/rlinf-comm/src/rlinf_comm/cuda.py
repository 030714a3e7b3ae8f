"""Copies, casts and digests in device memory: a copy table as one kernel launch on a stream of the caller's.

    program = CudaCopyProgram(table)
    program.run(addresses_of(sources), addresses_of(destinations), stream=stream, max_ctas=16)

The table is that of `rlinf_comm.copies`. Its tiles depend on the addresses (they decide how wide the loads can be), so
a program lowers and uploads them when it sees addresses that are not those of the run before. Imports without a driver;
`run` raises DeviceUnavailable there. The native side: csrc/include/rlinf/comm/cuda/copy_tile.h.
"""

from __future__ import annotations

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


def _handle_of(stream: Any) -> int:
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
        _C.run_copy_tiles(self._tiles, max_ctas, _handle_of(stream))


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
        sums = _C.run_digest_tiles(self._tiles, self._table.num_digests, max_ctas, _handle_of(stream))
        return [low | high << 64 for low, high in sums]
