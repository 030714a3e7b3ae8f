"""Memory in which the buffers of a received value come to rest: filled piece by piece, then decoded in place."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np

_ALIGNMENT = 64
_LARGE_BYTES = 4 << 20
"""From here on a buffer gets pages of its own: huge ones where the system has them, which are four times as fast to
touch first, and which go back to the system when the tensor goes."""


def allocate(lengths: Sequence[int]) -> list[memoryview]:
    """One writable buffer of each length, aligned to 64 bytes; the small ones share memory."""
    starts, num_shared_bytes = [], 0
    for length in lengths:
        starts.append(num_shared_bytes)
        if length < _LARGE_BYTES:
            num_shared_bytes += length + -length % _ALIGNMENT
    raw = np.empty(num_shared_bytes + _ALIGNMENT, dtype=np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    shared = raw.data[offset:]
    return [
        shared[start : start + length] if length < _LARGE_BYTES else _own_pages(length)
        for start, length in zip(starts, lengths, strict=True)
    ]


def _own_pages(num_bytes: int) -> memoryview:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        pass  # a system without huge pages; small ones are right as well
    return memoryview(pages)


def chunks(buffers: Sequence[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """The bytes of all buffers, cut into lists of views of `chunk_bytes` together; the last may be shorter.

    Gives at least one list, so that a value without buffers has an end too.
    """
    chunk: list[memoryview] = []
    room = chunk_bytes
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            if not room:
                yield chunk
                chunk, room = [], chunk_bytes
            piece = buffer[start : start + room]
            chunk.append(piece)
            start += len(piece)
            room -= len(piece)
    yield chunk
