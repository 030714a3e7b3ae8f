"""The cost of single items: in an engine that works on several at once, and in later stages.

An engine's spans record when each finished item began. The planner describes such a stage by the time of an item of
mean cost in a full engine, and by the distribution of item costs; an item advances faster when fewer are running. This
file converts the former to the latter. Cheap items leave an engine first, so the costs of a later stage also vary with
the order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from rlinf_sched import ItemCosts
from rlinf_workers.spans import Span

MAX_WAITING = 0.95
"""Of an item's time: something of it always depends on the engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTimes:
    """What one engine did in one step."""

    most: int
    """Maximum number of items running at once."""
    seconds: tuple[float, ...]
    """For each item, in the order of leaving: the time it would have taken with `most` items running all along."""
    waiting_share: float = 0.0
    """Share of that time that the items spent outside the engine, in tools; it does not depend on how many run."""

    @property
    def mean_s(self) -> float:
        return sum(self.seconds) / len(self.seconds)


def engine_times(spans: Sequence[Span], *, waits_s: float = 0.0) -> EngineTimes | None:
    """None unless some item began before the span in which it left, that is, while others were running.

    Args:
        spans: the computing spans of one stage on one rank; between two spans nothing advances.
        waits_s: mean time that an item spent outside the engine.
    """
    if not any(began < span.start_ns for span in spans for began in span.began_ns):
        return None
    ordered = sorted(spans, key=lambda span: span.start_ns)
    computed = _Computed(ordered)
    stays = [
        (computed.until(began), computed.until(span.start_ns + span.duration_ns))
        for span in ordered
        for began in span.began_ns
    ]
    changes = sorted([(entered, 1) for entered, _ in stays] + [(left, -1) for _, left in stays])
    counts = list(accumulate(change for _, change in changes))
    most = max(counts)
    mean_stay_s = sum(left - entered for entered, left in stays) / len(stays)
    waiting = min(MAX_WAITING, waits_s / mean_stay_s) if mean_stay_s > 0 else 0.0
    advanced, progress = [0.0], {changes[0][0]: 0.0}
    for (before_s, _), (now_s, _), inside in zip(changes, changes[1:], counts, strict=False):
        item_s = waiting + (1 - waiting) * max(inside, 1) / most  # 1 with `most` items
        advanced.append(advanced[-1] + (now_s - before_s) / item_s)
        progress[now_s] = advanced[-1]
    seconds = tuple(progress[left] - progress[entered] for entered, left in stays)
    return EngineTimes(most=most, seconds=seconds, waiting_share=waiting)


def seconds_as_they_came(of_ranks: Iterable[Sequence[Span]]) -> list[float]:
    """For each item of a stage, in the order in which its ranks began them: its share of its hand-over's time."""
    spans = (span for mine in of_ranks for span in mine if span.num_items)
    ordered = sorted(spans, key=lambda span: span.start_ns)
    return [span.duration_s / span.num_items for span in ordered for _ in range(span.num_items)]


def spread_of(steps: Sequence[Sequence[float]]) -> ItemCosts:
    """The distribution of costs over several steps: for each position, the median of the measured cost over the step's
    mean.

    Args:
        steps: for each step the seconds of its items, cheap ones first. The steps with most distinct items are used;
            with none, all items cost the same.
    """
    apart = max((len(set(step)) for step in steps), default=0)
    if apart < 2:
        return ItemCosts()
    finest = [step for step in steps if len(set(step)) == apart]
    costs = np.median([np.asarray(step) / np.mean(step) for step in finest if len(step) == len(finest[-1])], axis=0)
    return ItemCosts(spread="samples", samples=tuple(np.round(costs / costs.mean(), 4).tolist()))


class _Computed:
    """Seconds of computing before a time."""

    def __init__(self, ordered: Sequence[Span]) -> None:
        self._starts = [span.start_ns for span in ordered]
        self._lengths = [span.duration_ns for span in ordered]
        self._before = [0, *accumulate(self._lengths)]

    def until(self, time_ns: int) -> float:
        index = bisect_left(self._starts, time_ns) - 1
        if index < 0:
            return 0.0
        return 1e-9 * (self._before[index] + min(time_ns - self._starts[index], self._lengths[index]))
