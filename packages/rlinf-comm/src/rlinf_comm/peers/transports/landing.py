"""Memory in which the buffers of a received value come to rest: filled piece by piece, then decoded in place."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

_ALIGNMENT = 64
_LARGE_BYTES = 4 << 20
"""Buffers of at least so many bytes get pages of their own, huge ones where the system has them."""

_MAX_KEPT_BYTES = 256 << 20
"""The most bytes of pages that this process keeps for reuse after their tensors are gone; enough for the few largest
tensors of a trainer."""


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
        shared[start : start + length] if length < _LARGE_BYTES else _pages.take(length)
        for start, length in zip(starts, lengths, strict=True)
    ]


class _Pages:
    """Memory of large buffers whose tensors are gone, for the next ones: pages that are there already take in twice as
    much a second as fresh ones, which the system has to clear first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[mmap.mmap] = deque()  # appended to by finalizers, which may run anywhere: without a lock
        self._kept: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> memoryview:
        pages = self._find(num_bytes)
        if pages is None:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except (AttributeError, OSError):
                pass  # a system without huge pages; small ones are right as well
        array = np.frombuffer(pages, dtype=np.uint8, count=num_bytes)
        weakref.finalize(array, self._returned.append, pages).atexit = False
        return array.data  # keeps the array; whoever decodes it keeps this

    def _find(self, num_bytes: int) -> mmap.mmap | None:
        """Finds kept pages that fit without much waste."""
        with self._lock:
            while self._returned:
                self._kept.append(self._returned.popleft())
            fitting = [pages for pages in self._kept if num_bytes <= len(pages) <= num_bytes + num_bytes // 4]
            found = min(fitting, key=len, default=None)
            if found is not None:
                self._kept.remove(found)
            while sum(map(len, self._kept)) > _MAX_KEPT_BYTES:
                self._kept.pop(0)  # the longest unused
            return found


_pages = _Pages()


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
