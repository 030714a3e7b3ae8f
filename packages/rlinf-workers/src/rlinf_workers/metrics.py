"""Metrics of one run of a flow: weighted means over stages and ranks, exact and so independent of who computed what.

Terms are kept and summed with `math.fsum`, which rounds once: the same items give the same mean in any order and
under any plan.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlinf_comm.records import record


@record
@dataclass(slots=True)
class Metric:
    """The terms of a weighted mean."""

    terms: list[float] = field(default_factory=list)
    """value * weight of each recording"""
    weights: list[float] = field(default_factory=list)


class MetricTable:
    """Collects metrics in a worker; `drain` hands them over and starts again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, Metric] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        with self._lock:
            metric = self._metrics.setdefault(name, Metric())
            metric.terms.append(float(value) * weight)
            metric.weights.append(weight)

    def drain(self) -> dict[str, Metric]:
        with self._lock:
            drained, self._metrics = self._metrics, {}
        return drained


def merge(tables: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """The mean of each metric over all tables, sorted by name; metrics of weight 0 are left out."""
    merged: dict[str, Metric] = {}
    for table in tables:
        for name, metric in table.items():
            into = merged.setdefault(name, Metric())
            into.terms.extend(metric.terms)
            into.weights.extend(metric.weights)
    weights = {name: math.fsum(metric.weights) for name, metric in merged.items()}
    return {name: math.fsum(merged[name].terms) / weights[name] for name in sorted(merged) if weights[name] > 0}
