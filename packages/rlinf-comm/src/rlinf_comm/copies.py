"""Many strided copies, casts and digests of memory as one native call, prepared once and run with other addresses.

The tables name buffers by number and say where in them each N-d box lies; a program is made from a table once and then
given the buffers' addresses at every run. What the native side makes of it: csrc/include/rlinf/comm/copy_program.h. The
caller keeps the buffers alive and in place during a run, which releases the GIL.

    table = CopyTable.of([StridedCopy(src_buffer=0, dst_buffer=0, shape=(64, 8), src_strides=(256, 4),
                                      dst_strides=(16, 2), src_dtype="float32", dst_dtype="bfloat16")])
    program = CopyProgram(table)
    program.run(addresses_of([parameter]), addresses_of([served]), num_threads=2)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlinf_comm import _C
from rlinf_comm.records import record

if TYPE_CHECKING:
    import torch

COPY_DTYPES = ("float32", "bfloat16", "float16", "bytes1", "bytes2", "bytes4", "bytes8", "bytes16")
"""A dtype's code in a table is its place here. Casts exist among the first three; the others are moved as they are."""
CODE_OF = {name: code for code, name in enumerate(COPY_DTYPES)}

CODE_BYTES = np.array([4, 2, 2, 1, 2, 4, 8, 16], np.int64)
"""Bytes of an element, by code."""

Int64s = npt.NDArray[np.int64]


def code_of_dtype(dtype: torch.dtype) -> int:
    """The code for a torch dtype: the three that can be cast by name, any other by its size."""
    name = str(dtype).removeprefix("torch.")
    return CODE_OF[name] if name in CODE_OF else CODE_OF[f"bytes{dtype.itemsize}"]


def addresses_of(tensors: Iterable[torch.Tensor]) -> Int64s:
    """What `run` takes: the address of each tensor's first element. Empty tensors may have the address 0."""
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class StridedCopy:
    """One row of a CopyTable. Offsets and strides in bytes."""

    src_buffer: int
    dst_buffer: int
    shape: Sequence[int]
    src_strides: Sequence[int]
    dst_strides: Sequence[int]
    src_dtype: str
    """One of COPY_DTYPES."""
    dst_dtype: str
    src_offset: int = 0
    dst_offset: int = 0


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class StridedBox:
    """One row of a DigestTable: the box of a tensor that lies at `offset` in a buffer."""

    buffer: int
    shape: Sequence[int]
    strides: Sequence[int]
    """Bytes from one index to the next, for each dimension of the box."""
    dtype: str
    """The stored dtype, one of COPY_DTYPES."""
    digest: int
    """Number of the digest that this box is summed into; all boxes of one tensor have the same."""
    first_index: int
    """Flat index, in the whole tensor, of the box's first element."""
    index_strides: Sequence[int]
    """Strides of the whole tensor, in elements: from one index to the next, for each dimension."""
    offset: int = 0
    """Bytes from the start of the buffer to the box's first element."""
    as_dtype: str | None = None
    """The values are cast to this dtype before they are digested; None: they are digested as they are stored."""


def _array(table: object, name: str, dtype: type, shape: tuple[int, ...]) -> None:
    """Converts a field to what the native side takes; refuses values that do not fit."""
    values = np.asarray(getattr(table, name))
    if values.dtype.kind not in "iu" and values.size:
        raise ValueError(f"{type(table).__name__}.{name}: has the dtype {values.dtype}; integers are needed")
    if values.shape != shape:
        raise ValueError(f"{type(table).__name__}.{name}: has the shape {values.shape}; {shape} is needed")
    array = np.ascontiguousarray(values, dtype=dtype).reshape(shape)
    if not np.array_equal(array, values):
        raise ValueError(f"{type(table).__name__}.{name}: a value is outside the range of {np.dtype(dtype).name}")
    if array is values or array.base is not None:
        array = array.copy()
    array.flags.writeable = False
    object.__setattr__(table, name, array)


def _shape_of_lengths(table: object, lengths: Any) -> tuple[int, int]:
    shape = np.shape(lengths)
    if len(shape) != 2:
        raise ValueError(f"{type(table).__name__}.lengths: has the shape {shape}; [copies, dimensions] is needed")
    return shape


@record
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CopyTable:
    """n copies of boxes of up to D dimensions; shorter ones are padded at the front with length 1 and stride 0.

    Example: a [2, 3] float32 box out of rows of 16 bytes, packed densely as bfloat16:
        lengths = [[2, 3]], src_strides = [[16, 4]], dst_strides = [[6, 2]], src_dtype = [0], dst_dtype = [1]
    The copies have no order: none may read or overwrite what another writes.
    """

    src_buffer: npt.NDArray[np.int32]
    """[n] which source buffer."""
    dst_buffer: npt.NDArray[np.int32]
    src_offset: Int64s
    """[n] bytes."""
    dst_offset: Int64s
    lengths: Int64s
    """[n, D] elements, outermost dimension first."""
    src_strides: Int64s
    """[n, D] bytes."""
    dst_strides: Int64s
    src_dtype: npt.NDArray[np.uint8]
    """[n] codes: indices into COPY_DTYPES."""
    dst_dtype: npt.NDArray[np.uint8]
    src_bytes: Int64s | None = None
    """[number of source buffers] their sizes. When given, no copy may leave its buffer."""
    dst_bytes: Int64s | None = None

    def __post_init__(self) -> None:
        n, num_dims = _shape_of_lengths(self, self.lengths)
        for name in ("src_buffer", "dst_buffer"):
            _array(self, name, np.int32, (n,))
        for name in ("src_offset", "dst_offset"):
            _array(self, name, np.int64, (n,))
        for name in ("lengths", "src_strides", "dst_strides"):
            _array(self, name, np.int64, (n, num_dims))
        for name in ("src_dtype", "dst_dtype"):
            _array(self, name, np.uint8, (n,))
        for name in ("src_bytes", "dst_bytes"):
            if getattr(self, name) is not None:
                _array(self, name, np.int64, (np.size(getattr(self, name)),))

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(
        cls,
        copies: Sequence[StridedCopy],
        *,
        src_bytes: Sequence[int] | None = None,
        dst_bytes: Sequence[int] | None = None,
    ) -> CopyTable:
        """The table with one row for each of `copies`."""
        num_dims = max((len(copy.shape) for copy in copies), default=0)
        return cls(
            src_buffer=np.array([copy.src_buffer for copy in copies], dtype=np.int32),
            dst_buffer=np.array([copy.dst_buffer for copy in copies], dtype=np.int32),
            src_offset=np.array([copy.src_offset for copy in copies], dtype=np.int64),
            dst_offset=np.array([copy.dst_offset for copy in copies], dtype=np.int64),
            lengths=_padded([copy.shape for copy in copies], num_dims, 1),
            src_strides=_padded([copy.src_strides for copy in copies], num_dims, 0),
            dst_strides=_padded([copy.dst_strides for copy in copies], num_dims, 0),
            src_dtype=np.array([CODE_OF[copy.src_dtype] for copy in copies], dtype=np.uint8),
            dst_dtype=np.array([CODE_OF[copy.dst_dtype] for copy in copies], dtype=np.uint8),
            src_bytes=None if src_bytes is None else np.array(src_bytes, dtype=np.int64),
            dst_bytes=None if dst_bytes is None else np.array(dst_bytes, dtype=np.int64),
        )


@record
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DigestTable:
    """n boxes and the sums that their digests belong to; dimensions padded as in a CopyTable.

    Beside a CopyTable it may also describe the digest of what the copies move: see `CopyProgram`.
    """

    buffer: npt.NDArray[np.int32]
    """[n]"""
    offset: Int64s
    """[n] bytes."""
    lengths: Int64s
    """[n, D] elements."""
    strides: Int64s
    """[n, D] bytes."""
    dtype: npt.NDArray[np.uint8]
    """[n] as stored: indices into COPY_DTYPES."""
    as_dtype: npt.NDArray[np.uint8]
    """[n] whose digest is wanted."""
    digest: npt.NDArray[np.int32]
    """[n] 0 to num_digests - 1; -1: this box does not count."""
    first_index: Int64s
    """[n] flat index, in its tensor, of the box's first element."""
    index_strides: Int64s
    """[n, D] elements of the tensor."""
    num_digests: int
    buffer_bytes: Int64s | None = None
    """[number of buffers] their sizes. When given, no box may leave its buffer."""

    def __post_init__(self) -> None:
        n, num_dims = _shape_of_lengths(self, self.lengths)
        for name in ("buffer", "digest"):
            _array(self, name, np.int32, (n,))
        for name in ("offset", "first_index"):
            _array(self, name, np.int64, (n,))
        for name in ("lengths", "strides", "index_strides"):
            _array(self, name, np.int64, (n, num_dims))
        for name in ("dtype", "as_dtype"):
            _array(self, name, np.uint8, (n,))
        if self.buffer_bytes is not None:
            _array(self, "buffer_bytes", np.int64, (np.size(self.buffer_bytes),))

    @classmethod
    def of(
        cls, boxes: Sequence[StridedBox], *, num_digests: int | None = None, buffer_bytes: Sequence[int] | None = None
    ) -> DigestTable:
        """The table with one row for each of `boxes`; by default as many digests as they name."""
        num_dims = max((len(box.shape) for box in boxes), default=0)
        highest = max((box.digest for box in boxes), default=-1)
        return cls(
            buffer=np.array([box.buffer for box in boxes], dtype=np.int32),
            offset=np.array([box.offset for box in boxes], dtype=np.int64),
            lengths=_padded([box.shape for box in boxes], num_dims, 1),
            strides=_padded([box.strides for box in boxes], num_dims, 0),
            dtype=np.array([CODE_OF[box.dtype] for box in boxes], dtype=np.uint8),
            as_dtype=np.array([CODE_OF[box.as_dtype or box.dtype] for box in boxes], dtype=np.uint8),
            digest=np.array([box.digest for box in boxes], dtype=np.int32),
            first_index=np.array([box.first_index for box in boxes], dtype=np.int64),
            index_strides=_padded([box.index_strides for box in boxes], num_dims, 0),
            num_digests=highest + 1 if num_digests is None else num_digests,
            buffer_bytes=None if buffer_bytes is None else np.array(buffer_bytes, dtype=np.int64),
        )


def _padded(rows: Sequence[Sequence[int]], num_dims: int, filler: int) -> Int64s:
    array = np.full((len(rows), num_dims), filler, dtype=np.int64)
    for index, row in enumerate(rows):
        if len(row):
            array[index, num_dims - len(row) :] = row
    return array


class CopyProgram:
    """The copies of a table, lowered once. Immutable, and safe to run from several threads at once.

    With `digests`, `run_with_digests` also computes the digest of what is copied, as the destination's dtype, while it
    passes through the cache. Row i of that table says to which digest copy i belongs and where in its tensor it lies;
    it must have the copies' lengths, and its buffers, offsets, strides and dtypes are not looked at.

    Raises:
        ValueError: a dtype pair without a cast, a copy that leaves its buffer, overlapping writes (a destination stride
            of 0), or sizes that overflow; names the copy and the buffer.
    """

    def __init__(self, table: CopyTable, digests: DigestTable | None = None) -> None:
        columns: dict[str, Any] = _columns(table, [field.name for field in fields(table) if field.name != "lengths"])
        if digests is not None:
            if not np.array_equal(digests.lengths, table.lengths):
                raise ValueError(
                    f"the digests are of boxes with lengths {digests.lengths.shape}, not those of the "
                    f"{len(table)} copies; row i of both must be the same box"
                )
            columns |= _columns(digests, ("first_index", "index_strides"))
            columns |= {"digest_slot": digests.digest, "num_digests": digests.num_digests}
        self._table, self._digests = table, digests
        self._native = _C.CopyProgram(table.lengths, columns)

    @property
    def table(self) -> CopyTable:
        return self._table

    @property
    def digests(self) -> DigestTable | None:
        return self._digests

    @property
    def num_bytes(self) -> int:
        """Bytes that a run writes."""
        return self._native.num_dst_bytes

    @property
    def num_tasks(self) -> int:
        """Tasks that a run is cut into; threads beyond that number have nothing to do."""
        return self._native.num_tasks

    def run(self, src_pointers: Int64s, dst_pointers: Int64s, num_threads: int = 1) -> None:
        """Does all copies; returns when the bytes are there.

        Args:
            src_pointers: [number of source buffers] addresses, int64.
            dst_pointers: [number of destination buffers] likewise. The memory of both must not overlap.
            num_threads: 1 to 256, the calling thread included.

        Raises:
            ValueError: not one pointer for each buffer, a null pointer, too many threads.
        """
        self._native.run(_pointers(src_pointers), _pointers(dst_pointers), num_threads, False, None)

    def run_with_digests(self, src_pointers: Int64s, dst_pointers: Int64s, num_threads: int = 1) -> list[int]:
        """Runs as `run` does and returns the 128-bit digests of what was read and written, as the destination's dtype.

        They attest what was sent. What arrived is attested by a DigestProgram over the destination.
        """
        pairs = self._native.run(_pointers(src_pointers), _pointers(dst_pointers), num_threads, True, None)
        return _digests(pairs)


class DigestProgram:
    """The digests of a table's boxes, lowered once. Immutable, and safe to run from several threads at once.

    Raises:
        ValueError: a dtype pair without a cast, a box that leaves its buffer; names the box ("copy i") and the buffer.
    """

    def __init__(self, table: DigestTable) -> None:
        columns: dict[str, Any] = _columns(table, ("first_index", "index_strides"))
        columns |= {
            "src_buffer": table.buffer,
            "src_offset": table.offset,
            "src_strides": table.strides,
            "src_dtype": table.dtype,
            "dst_dtype": table.as_dtype,
            "digest_slot": table.digest,
            "num_digests": table.num_digests,
        }
        if table.buffer_bytes is not None:
            columns["src_bytes"] = table.buffer_bytes
        self._native = _C.CopyProgram(table.lengths, columns)

    def run(self, pointers: Int64s, num_threads: int = 1) -> list[int]:
        """The table's digests, each the 128-bit sum over its boxes.

        Args:
            pointers: [number of buffers] addresses, int64.
            num_threads: 1 to 256, the calling thread included.

        Raises:
            ValueError: not one pointer for each buffer, a null pointer, too many threads.
        """
        return _digests(self._native.run(_pointers(pointers), _NO_POINTERS, num_threads, True, None))


_NO_POINTERS = np.empty(0, dtype=np.int64)


def _columns(table: object, names: Iterable[str]) -> dict[str, Any]:
    columns = {name: getattr(table, name) for name in names}
    return {name: array for name, array in columns.items() if array is not None}


def _pointers(pointers: Int64s) -> Int64s:
    array = np.asarray(pointers)
    if array.dtype != np.int64 or array.ndim != 1:
        raise ValueError(f"pointers are int64[number of buffers], not {array.dtype}{list(array.shape)}")
    return np.ascontiguousarray(array)


def _digests(pairs: npt.NDArray[np.uint64] | None) -> list[int]:
    assert pairs is not None, "digests were asked for"
    return [low | high << 64 for low, high in pairs.tolist()]
