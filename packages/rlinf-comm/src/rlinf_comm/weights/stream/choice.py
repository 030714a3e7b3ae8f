"""Whether a delta pays, from what was measured: a fast link is cheaper than the search for what changed.

For a buffer of n bytes, with moving averages of all rates,

    dense = n * link,    delta = n * encode + n * share * link + n * apply        (seconds; rates in seconds per byte)

where `share` is the size of the delta, relative to the buffer. This is a rule of our own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_WEIGHT = 0.25
"""Weight of the newest measurement in the moving average: a change is believed after four or five publications."""
_MIN_LINK_BYTES = 1_000_000
"""Fewer bytes do not measure the link: the cost of a message by itself (0.1 ms, say) would pass for a slow link."""
RETRY_EVERY = 16
"""Dense versions after which a delta is tried again: if deltas pay after all, that is found within so many versions,
and at most one version in so many is spent on trying."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingChoice:
    """Delta or dense, and why."""

    is_delta: bool
    reason: str
    dense_s: float | None = None
    """Predicted seconds; None before anything was measured."""
    delta_s: float | None = None


class DeltaChoice:
    """Chooses for one receiver. One thread at a time.

    Example: a link of 1 GB/s, encoding and applying at 10 GB/s each, 5 % of the bytes: 64 ms dense, 16 ms as a delta.

    Args:
        retry_every: After so many dense versions a delta is tried again.
        clock: Seconds, for `now`; tests bring their own.
    """

    def __init__(
        self, *, retry_every: int = RETRY_EVERY, clock: Callable[[], float] = time.perf_counter, weight: float = _WEIGHT
    ) -> None:
        if retry_every < 1 or not 0 < weight <= 1:
            raise ValueError(f"retry_every={retry_every}, weight={weight}; at least 1, and in (0, 1]")
        self.now = clock
        self._retry_every = retry_every
        self._weight = weight
        self._num_dense = 0
        self.encode_s_per_byte: float | None = None
        self.apply_s_per_byte: float | None = None
        self.link_s_per_byte: float | None = None
        self.share: float | None = None
        """Bytes of a delta per byte of the buffer."""

    def choose(self, num_bytes: int) -> EncodingChoice:
        """What to send for the next version of a buffer of `num_bytes`."""
        rates = (self.encode_s_per_byte, self.apply_s_per_byte, self.link_s_per_byte, self.share)
        encode, apply, link, share = (rate or 0.0 for rate in rates)
        if None in rates:
            self._num_dense = 0
            return EncodingChoice(is_delta=True, reason="not measured yet")
        dense_s = num_bytes * link
        delta_s = num_bytes * (encode + share * link + apply)
        if delta_s < dense_s:
            self._num_dense = 0
            return EncodingChoice(is_delta=True, reason="predicted to be faster", dense_s=dense_s, delta_s=delta_s)
        self._num_dense += 1
        if self._num_dense > self._retry_every:
            self._num_dense = 0
            return EncodingChoice(is_delta=True, reason="tried again", dense_s=dense_s, delta_s=delta_s)
        return EncodingChoice(is_delta=False, reason="predicted to be slower", dense_s=dense_s, delta_s=delta_s)

    def encoded(self, num_bytes: int, delta_bytes: int, seconds: float) -> None:
        """A buffer of `num_bytes` became `delta_bytes` (num_bytes when dense was as small) in `seconds`."""
        if num_bytes:
            self.encode_s_per_byte = self._mean(self.encode_s_per_byte, seconds / num_bytes)
            self.share = self._mean(self.share, delta_bytes / num_bytes)

    def applied(self, num_bytes: int, seconds: float) -> None:
        """The receiver took that long for the deltas of `num_bytes` of its buffers."""
        if num_bytes:
            self.apply_s_per_byte = self._mean(self.apply_s_per_byte, seconds / num_bytes)

    def sent(self, num_bytes: int, seconds: float) -> None:
        """Notes how long so many bytes took on the link; too few tell nothing of its rate."""
        if num_bytes >= _MIN_LINK_BYTES:
            self.link_s_per_byte = self._mean(self.link_s_per_byte, seconds / num_bytes)

    def _mean(self, before: float | None, new: float) -> float:
        new = max(new, 0.0)
        return new if before is None else before + self._weight * (new - before)
