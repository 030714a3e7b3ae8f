"""Memory in which the buffers of a received value come to rest: filled piece by piece, then decoded in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rlinf_comm import kept_pages

_ALIGNMENT = 64
_LARGE_BYTES = 4 << 20
"""Buffers of at least so many bytes get pages of their own."""


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
        shared[start : start + length] if length < _LARGE_BYTES else kept_pages.take(length)
        for start, length in zip(starts, lengths, strict=True)
    ]


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
