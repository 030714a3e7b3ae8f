"""Large memory that is used again: pages that are there already take in twice as much a second as fresh ones, which the
system has to clear first."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque

import numpy as np

_MAX_KEPT_BYTES = 256 << 20
"""The most bytes of pages that this process keeps after those who took them are gone; enough for the few largest
tensors of a trainer."""

_lock = threading.Lock()
_returned: deque[mmap.mmap] = deque()  # appended to by finalizers, which may run anywhere: without a lock
_kept: list[mmap.mmap] = []


def take(num_bytes: int) -> memoryview:
    """Writable memory with any content, in huge pages where the system has them. It comes back when nothing refers to
    it any more."""
    pages = _find(num_bytes)
    if pages is None:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            pass  # a system without huge pages; small ones are right as well
    array = np.frombuffer(pages, dtype=np.uint8, count=num_bytes)
    weakref.finalize(array, _returned.append, pages).atexit = False
    return array.data  # keeps the array; whoever uses it keeps this


def _find(num_bytes: int) -> mmap.mmap | None:
    """Finds kept pages that fit without much waste."""
    with _lock:
        while _returned:
            _kept.append(_returned.popleft())
        fitting = [pages for pages in _kept if num_bytes <= len(pages) <= num_bytes + num_bytes // 4]
        best_fit = min(fitting, key=len, default=None)
        if best_fit is not None:
            _kept.remove(best_fit)
        while sum(map(len, _kept)) > _MAX_KEPT_BYTES:
            _kept.pop(0)  # the longest unused
        return best_fit
