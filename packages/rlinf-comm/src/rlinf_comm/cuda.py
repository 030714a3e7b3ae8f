"""Copies, casts and digests in device memory: a copy table as one kernel launch on a stream of the caller's.

    program = CudaCopyProgram(table)
    program.run(addresses_of(sources), addresses_of(destinations), stream=stream, max_ctas=16)

The table is that of `rlinf_comm.copies`. Its tiles depend on the addresses (they decide how wide the loads can be), so
a program lowers and uploads them when it sees addresses that are not among the last few. Imports without a driver;
`run` raises DeviceUnavailable there. The native side: csrc/include/rlinf/comm/cuda/copy_tile.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlinf_comm import _C
from rlinf_comm.copies import CODE_BYTES, DigestTable
from rlinf_comm.errors import CommError

DEFAULT_MAX_CTAS = 32
"""Thread blocks of 8 warps: a part of the device, so that a copy can run beside a step. Raise it on an idle one."""

_NUM_ADDRESSES = 4
"""Sets of addresses whose tiles stay on the device: more than versions usually wait in one sync."""

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


class _Uploads:
    """What was lowered for addresses and uploaded, for the last few of them: a sender's arenas take turns."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._tiles: dict[bytes, tuple[_C.DeviceBytes, ...]] = {}

    def of(self, *sides: npt.NDArray[np.int64], lower: Callable[..., Sequence[bytes]]) -> tuple[_C.DeviceBytes, ...]:
        addresses = b"|".join(side.tobytes() for side in sides)
        tiles = self._tiles.pop(addresses, None)
        if tiles is None:
            tiles = tuple(_C.DeviceBytes(lowered, self._device) for lowered in lower(*sides))
        while len(self._tiles) >= _NUM_ADDRESSES:
            del self._tiles[next(iter(self._tiles))]
        self._tiles[addresses] = tiles
        return tiles


class CudaCopyProgram:
    """A copy table, run on the device as often as wanted.

    Args:
        table: a `rlinf_comm.copies.CopyTable`, or anything with its fields.
        digests: for `run_with_digests`; as for a `rlinf_comm.copies.CopyProgram`.
        device: ordinal of the device that runs the kernel; peers' memory must be mapped into it.

    Raises:
        ValueError: the digests are not of the boxes that are copied.
    """

    def __init__(self, table: Any, digests: DigestTable | None = None, *, device: int = 0) -> None:
        if digests is not None and not np.array_equal(digests.lengths, table.lengths):
            raise ValueError("row i of the digests must be the box of copy i")
        self._columns = [np.ascontiguousarray(getattr(table, name)) for name in _COLUMNS]
        self._digests, self._device = digests, device
        self._copied, self._digested = _Uploads(device), _Uploads(device)
        self._sums: _C.DeviceSums | None = None

    def lower(self, src_pointers: npt.ArrayLike, dst_pointers: npt.ArrayLike) -> bytes:
        """The kernel's tiles for these addresses; needs no device."""
        return _C.lower_copies(*self._columns, *map(_int64s, (src_pointers, dst_pointers)))

    def lower_with_digests(
        self, src_pointers: npt.ArrayLike, dst_pointers: npt.ArrayLike
    ) -> tuple[bytes, bytes, bytes]:
        """The tiles of three kernels, in the order in which they run: one copies and digests in a pass, and the others
        copy and then digest what does not align with it. Needs no device."""
        assert self._digests is not None, "the program has digests"
        return _C.lower_digested_copies(
            *self._columns,
            *map(_int64s, (src_pointers, dst_pointers)),
            first_index=self._digests.first_index,
            index_strides=self._digests.index_strides,
            digest=self._digests.digest,
        )

    def run(
        self,
        src_pointers: npt.ArrayLike,
        dst_pointers: npt.ArrayLike,
        *,
        stream: Any,
        max_ctas: int = DEFAULT_MAX_CTAS,
    ) -> None:
        """Enqueues the copies on `stream` (an integer handle, or a torch or cupy stream) and returns.

        The pointers are base addresses, one for each buffer number of the table. Addresses that are not among the last
        few cost a lowering and an upload, which waits for the program's runs before.

        Raises:
            DeviceUnavailable: no kernels in this build, or no device.
            ValueError: the table cannot be lowered, `max_ctas` is below 1.
        """
        check_device()
        (tiles,) = self._copied.of(
            _int64s(src_pointers), _int64s(dst_pointers), lower=lambda *sides: [self.lower(*sides)]
        )
        _C.run_copy_tiles(tiles, max_ctas, _handle_of(stream))

    def run_with_digests(
        self,
        src_pointers: npt.ArrayLike,
        dst_pointers: npt.ArrayLike,
        *,
        stream: Any,
        max_ctas: int = DEFAULT_MAX_CTAS,
    ) -> list[int]:
        """Copies as `run` does, waits for the stream, and returns the 128-bit digests of what was written.

        Raises: as `run`.
        """
        check_device()
        assert self._digests is not None, "the program has digests"
        sides = _int64s(src_pointers), _int64s(dst_pointers)
        together, copies, digests = self._digested.of(*sides, lower=self.lower_with_digests)
        if self._sums is None:
            self._sums = _C.DeviceSums(self._digests.num_digests, self._device)
        sums = _C.run_digested_copy_tiles(together, copies, digests, self._sums, max_ctas, _handle_of(stream))
        return _joined(sums)


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
        self._uploads = _Uploads(device)
        self._sums: _C.DeviceSums | None = None

    def lower(self, pointers: npt.ArrayLike) -> bytes:
        """The kernel's tiles for these addresses; needs no device."""
        table, bases = self._table, _int64s(pointers)
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
        (tiles,) = self._uploads.of(_int64s(pointers), lower=lambda bases: [self.lower(bases)])
        if self._sums is None:
            self._sums = _C.DeviceSums(self._table.num_digests, self._device)
        return _joined(_C.run_digest_tiles(tiles, self._sums, max_ctas, _handle_of(stream)))


def _int64s(pointers: npt.ArrayLike) -> npt.NDArray[np.int64]:
    return np.asarray(pointers, dtype=np.int64)


def _joined(sums: list[tuple[int, int]]) -> list[int]:
    return [low | high << 64 for low, high in sums]
