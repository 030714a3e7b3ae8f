"""Balances items of different sizes over bins."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(sizes: Sequence[int], num_bins: int) -> list[int]:
    """The bin of each item, so that bins are about equal: the largest first, each into the emptiest bin. The fullest is
    at most 4/3 of the best possible (Graham, 1969)."""
    filled, bins = [0] * num_bins, [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        bins[item] = min(range(num_bins), key=lambda number: filled[number])
        filled[bins[item]] += sizes[item]
    return bins
