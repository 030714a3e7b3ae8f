"""Metrics of one run of a flow: weighted means, standard deviations or totals over stages and ranks; exact, so
independent of the distribution of work.

Terms are kept and summed with `math.fsum`, which rounds once: the same items give the same mean in any order and
under any plan.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlinf_comm import record

Statistic = Literal["mean", "spread", "total"]
"""spread: the standard deviation."""


@record
@dataclass(slots=True)
class WeightedMetric:
    """The terms of a statistic; all but those of a mean have weight 1."""

    terms: list[float] = field(default_factory=list)
    """value * weight of each recording"""
    weights: list[float] = field(default_factory=list)
    statistic: Statistic = "mean"


class MetricTable:
    """Collects metrics in a worker; `drain` returns and resets them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, WeightedMetric] = {}

    def add(self, name: str, value: float, weight: float = 1.0, *, statistic: Statistic = "mean") -> None:
        with self._lock:
            metric = self._metrics.get(name)
            if metric is None:
                metric = self._metrics[name] = WeightedMetric(statistic=statistic)
            metric.terms.append(float(value) * weight)
            metric.weights.append(weight)

    def absorb(self, drained: Mapping[str, WeightedMetric]) -> None:
        """Adds what another table has collected."""
        with self._lock:
            for name, other in drained.items():
                metric = self._metrics.setdefault(name, WeightedMetric(statistic=other.statistic))
                metric.terms.extend(other.terms)
                metric.weights.extend(other.weights)

    def drain(self) -> dict[str, WeightedMetric]:
        with self._lock:
            drained, self._metrics = self._metrics, {}
        return drained


def merge(tables: Iterable[Mapping[str, WeightedMetric]]) -> dict[str, float]:
    """The statistic of each metric over all tables, sorted by name; means of weight 0 and deviations of less than two
    terms are left out."""
    merged: dict[str, WeightedMetric] = {}
    for table in tables:
        for name, metric in table.items():
            into = merged.setdefault(name, WeightedMetric(statistic=metric.statistic))
            into.terms.extend(metric.terms)
            into.weights.extend(metric.weights)
    values = {name: _STATISTICS[metric.statistic](metric) for name, metric in merged.items()}
    return {name: value for name, value in sorted(values.items()) if value is not None}


def _mean(metric: WeightedMetric) -> float | None:
    weight = math.fsum(metric.weights)
    return _sum(metric.terms) / weight if weight > 0 else None


def _spread(metric: WeightedMetric) -> float | None:
    """Unbiased (n - 1)."""
    count = len(metric.terms)
    if count < 2:
        return None
    mean = _sum(metric.terms) / count
    return math.sqrt(_sum([(term - mean) * (term - mean) for term in metric.terms]) / (count - 1))


def _sum(terms: Sequence[float]) -> float:
    """Exact; NaN if infinities cancel or the sum exceeds float64's range."""
    try:
        return math.fsum(terms)
    except (ValueError, OverflowError):
        return math.nan


def _total(metric: WeightedMetric) -> float:
    return _sum(metric.terms)


_STATISTICS = {"mean": _mean, "spread": _spread, "total": _total}
