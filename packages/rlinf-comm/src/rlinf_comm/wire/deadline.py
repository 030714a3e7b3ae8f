"""Deadlines: when a wait ends."""

from __future__ import annotations

import math
import threading
import time

DEFAULT_TIMEOUT_S = 60.0
"""A loaded machine needs less for anything here, and a person can wait that long for the message."""

SLICE_S = 0.1
"""A wait looks this often whether the peer is still there."""


class Deadline:
    """The end of one call, handed down to all that it waits for."""

    def __init__(self, timeout_s: float) -> None:
        if not timeout_s >= 0.0:
            raise ValueError(f"timeout_s={timeout_s}; seconds, not negative (math.inf waits for as long as it takes)")
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    @property
    def is_finite(self) -> bool:
        """Whether it ever passes."""
        return self._end_s < math.inf

    @property
    def left_s(self) -> float:
        return max(self._end_s - time.monotonic(), 0.0)

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self._end_s

    @property
    def slice_s(self) -> float:
        return min(self.left_s, SLICE_S)

    def capped(self, longest_s: float) -> Deadline:
        """The earlier one of this and `longest_s` from now."""
        return Deadline(min(self.left_s, longest_s))

    def holding(self, lock: threading.Lock) -> _Holding:
        """`with deadline.holding(lock) as held:`; held is False when the lock was not to be had in time."""
        return _Holding(lock, self)


class _Holding:
    """A class and not a generator: a third of the time, in the path of every small value."""

    __slots__ = ("_deadline", "_held", "_lock")

    def __init__(self, lock: threading.Lock, deadline: Deadline) -> None:
        self._lock = lock
        self._deadline = deadline

    def __enter__(self) -> bool:
        self._held = self._lock.acquire(blocking=False) or self._lock.acquire(
            timeout=min(self._deadline.left_s, threading.TIMEOUT_MAX)
        )
        return self._held

    def __exit__(self, *_: object) -> None:
        if self._held:
            self._lock.release()


FOREVER = Deadline(math.inf)
"""Waits for as long as it takes."""
