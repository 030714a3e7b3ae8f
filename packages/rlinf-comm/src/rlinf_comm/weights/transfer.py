"""What one rank copies and attests in a sync, as programs that are prepared once and run with other addresses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rlinf_comm._arrays import dtype_named
from rlinf_comm.copies import (
    COPY_DTYPES,
    CopyProgram,
    CopyTable,
    DigestProgram,
    DigestTable,
    StridedBox,
    StridedCopy,
    code_of_dtype,
)
from rlinf_comm.records import record
from rlinf_comm.weights.layout import Box, BufferSpec, TensorSpec
from rlinf_comm.weights.region import BoxRegion, dense_strides, extent_bytes, region_in

if TYPE_CHECKING:
    import torch

_UNIT_BYTES = 16
"""What the device's kernels load and store at once."""


@record
@dataclass(frozen=True, slots=True)
class Part:
    """A box of a canonical tensor that a rank hands out or takes."""

    box: Box
    spec: TensorSpec
    """Shape of the whole tensor, and the dtype that is served."""
    place: BoxRegion
    """Where the box lies in the rank's own buffers."""
    store: int
    """Number of the store buffer that it lies in, dense."""
    store_offset: int
    """Bytes from the start of that store buffer."""
    source: BoxRegion | None = None
    """Where a rank that takes the box finds it in the buffers of the rank that hands it out; None for the latter, and
    for a box that lies in the memory of another one (tied)."""


class TransferPrograms:
    """The programs of one rank for tensors with certain strides.

    Args:
        parts: In the order in which digests come back.
        tensors: The rank's buffers by name; only their strides and dtypes are looked at.
        store_bytes: Sizes of the store buffers. No copy leaves its buffer, on either side.
    """

    def __init__(self, parts: Sequence[Part], tensors: Mapping[str, torch.Tensor], store_bytes: Sequence[int]) -> None:
        self._parts = parts
        self._store_bytes = store_bytes
        self._own_bytes = [extent_bytes(tensor) for tensor in tensors.values()]
        self._number = {name: number for number, name in enumerate(tensors)}
        self._dtype = {name: COPY_DTYPES[code_of_dtype(tensor.dtype)] for name, tensor in tensors.items()}
        self._programs: dict[tuple[str, int], CopyProgram] = {}
        self._offsets: list[int] = []
        self._strides: list[tuple[int, ...]] = []
        for part in parts:
            tensor = tensors[part.place.buffer]
            region = region_in(tensor, part.place)
            self._offsets.append(region.pointer - tensor.data_ptr() if part.box.num_elements else 0)
            self._strides.append(region.strides_bytes)

    @cached_property
    def publish(self) -> CopyProgram:
        """Program that copies own buffers to the store, with the digest of what a destination will serve."""
        copies, boxes = [], []
        for digest, part in enumerate(self._parts):
            copies.append(
                StridedCopy(
                    src_buffer=self._number[part.place.buffer],
                    src_offset=self._offsets[digest],
                    src_strides=self._strides[digest],
                    src_dtype=self._dtype[part.place.buffer],
                    dst_buffer=part.store,
                    dst_offset=part.store_offset,
                    dst_strides=dense_strides(part.box.shape, part.spec.element_bytes),
                    dst_dtype=_code(part.spec),
                    shape=part.box.shape,
                )
            )
            boxes.append(self._box(digest, part))
        table = CopyTable.of(copies, src_bytes=self._own_bytes, dst_bytes=self._store_bytes)
        return CopyProgram(table, DigestTable.of(boxes))

    def published_through(self, num_bytes: int) -> list[CopyProgram]:
        """What `publish` copies, as programs that one after the other fill one store buffer of so many bytes, each from
        its start; the sums of their digests are those of `publish`. For who wants the digests of what is cast and not
        the copy.

        Raises: AssertionError if an element has more bytes than the buffer.
        """
        programs, copies, boxes, end = [], [], [], 0

        def finish() -> None:
            table = CopyTable.of(copies, src_bytes=self._own_bytes, dst_bytes=[num_bytes])
            programs.append(CopyProgram(table, DigestTable.of(boxes, num_digests=len(self._parts))))
            copies.clear()
            boxes.clear()

        for digest, part in enumerate(self._parts):
            element_bytes = part.spec.element_bytes
            for start, shape in _pieces(part.box.shape, num_bytes // element_bytes):
                piece = self._box(digest, part, start, shape)
                if end + math.prod(shape) * element_bytes > num_bytes:
                    finish()
                    end = 0
                boxes.append(piece)
                copies.append(
                    StridedCopy(
                        src_buffer=piece.buffer,
                        src_offset=piece.offset,
                        src_strides=piece.strides,
                        src_dtype=piece.dtype,
                        dst_buffer=0,
                        dst_offset=end,
                        dst_strides=dense_strides(shape, element_bytes),
                        dst_dtype=_code(part.spec),
                        shape=shape,
                    )
                )
                end += -(-math.prod(shape) * element_bytes // _UNIT_BYTES) * _UNIT_BYTES
        finish()
        return programs

    def stored_at(self) -> list[tuple[int, int]]:
        """(offset, length) in bytes of each part in its store buffer."""
        return [(part.store_offset, part.box.num_elements * part.spec.element_bytes) for part in self._parts]

    @cached_property
    def receive(self) -> CopyProgram:
        """Program that copies the store to own buffers, with the digests that `held` then has."""
        return self._to_own(range(len(self._parts)), self._store_bytes)

    def stored(self, store: int) -> CopyProgram:
        """What `receive` copies from one store buffer; the buffers are still those of the store."""

        def make() -> CopyProgram:
            numbers = [number for number, part in enumerate(self._parts) if part.store == store]
            return self._to_own(numbers, self._store_bytes)

        return self._cached(("stored", store), make)

    def by_reference(self, store: int, buffers: Mapping[str, BufferSpec]) -> CopyProgram:
        """What `receive` copies from one store buffer, from the buffers of the rank that fills it, which are
        contiguous."""

        def make() -> CopyProgram:
            numbers = [number for number, part in enumerate(self._parts) if part.store == store and part.source]
            num_bytes = [spec.num_elements * TensorSpec((), spec.dtype).element_bytes for spec in buffers.values()]
            return self._to_own(numbers, num_bytes, buffers)

        return self._cached(("by reference", store), make)

    def _cached(self, key: tuple[str, int], make: Callable[[], CopyProgram]) -> CopyProgram:
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]

    def _to_own(
        self, numbers: Iterable[int], src_bytes: Sequence[int], referenced: Mapping[str, BufferSpec] | None = None
    ) -> CopyProgram:
        """Copies the parts with these numbers to own buffers, out of the store or what is referenced."""
        src_numbers = {name: number for number, name in enumerate(referenced or {})}
        copies, boxes = [], []
        for number in numbers:
            part = self._parts[number]
            boxes.append(self._box(number, part))
            if referenced is None or part.source is None:
                src, offset, spec = part.store, part.store_offset, part.spec
                strides = dense_strides(part.box.shape, spec.element_bytes)
            else:
                src, spec = src_numbers[part.source.buffer], TensorSpec((), referenced[part.source.buffer].dtype)
                offset = part.source.offset * spec.element_bytes
                strides = tuple(stride * spec.element_bytes for stride in part.source.strides)
            copies.append(
                StridedCopy(
                    src_buffer=src,
                    src_offset=offset,
                    src_strides=strides,
                    src_dtype=_code(spec),
                    dst_buffer=self._number[part.place.buffer],
                    dst_offset=self._offsets[number],
                    dst_strides=self._strides[number],
                    dst_dtype=self._dtype[part.place.buffer],
                    shape=part.box.shape,
                )
            )
        table = CopyTable.of(copies, src_bytes=src_bytes, dst_bytes=self._own_bytes)
        return CopyProgram(table, DigestTable.of(boxes, num_digests=len(self._parts)))

    @cached_property
    def attest(self) -> DigestProgram:
        """The digests of what the own buffers hold."""
        return DigestProgram(self.held)

    @cached_property
    def held(self) -> DigestTable:
        """The boxes of the own buffers."""
        boxes = [self._box(digest, part) for digest, part in enumerate(self._parts)]
        return DigestTable.of(boxes, buffer_bytes=self._own_bytes)

    def _box(
        self, digest: int, part: Part, start: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> StridedBox:
        """A part, or the piece of it that begins at `start` within its box."""
        index_strides, strides = part.spec.index_strides, self._strides[digest]
        start = start or [0] * len(part.box.shape)
        first = [one + more for one, more in zip(part.box.start, start, strict=True)]
        return StridedBox(
            buffer=self._number[part.place.buffer],
            offset=self._offsets[digest] + sum(at * stride for at, stride in zip(start, strides, strict=True)),
            shape=part.box.shape if shape is None else shape,
            strides=strides,
            dtype=self._dtype[part.place.buffer],
            as_dtype=_code(part.spec),
            digest=digest,
            first_index=sum(at * stride for at, stride in zip(first, index_strides, strict=True)),
            index_strides=index_strides,
        )


def _pieces(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, shape) of boxes of at most `most` elements that make up a box; none where it has no elements."""
    num_elements = math.prod(shape)
    if num_elements <= most:
        if num_elements:
            yield (0,) * len(shape), shape
        return
    assert most > 0 and shape, "an element fits"
    row = num_elements // shape[0]
    if row > most:
        for first in range(shape[0]):
            yield from (((first, *start), (1, *rest)) for start, rest in _pieces(shape[1:], most))
        return
    step = most // row
    for first in range(0, shape[0], step):
        yield (first, *(0 for _ in shape[1:])), (min(step, shape[0] - first), *shape[1:])


def _code(spec: TensorSpec) -> str:
    dtype = dtype_named(spec.dtype)
    assert dtype is not None, "specs are checked when a layout is made"
    return COPY_DTYPES[code_of_dtype(dtype)]
