"""Spans: what a worker did when. They become the run's trace, its time by stage and the planner's measurements."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

COMPUTE = "stage"
LEASE = "lease"
SYNC = "sync"
CHANNEL = "channel"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One stretch of time in one stage of one worker."""

    name: str
    """For example `rollout` (compute), `wait for lease`, `receive weights`, `wait for prompts`."""
    category: str
    """`stage` (computing), `lease` (waiting for, onload, offload), `sync` (weights), `channel` (waiting for items or
    room)."""
    worker: str
    devices: tuple[str, ...]
    start_s: float
    """Unix time."""
    duration_s: float
    num_items: int = 0


@dataclass
class SpanRecorder:
    """Collects the spans of one stage call; appending is atomic, so lanes may share one."""

    worker: str
    devices: tuple[str, ...]
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def span(self, name: str, category: str, num_items: int = 0) -> Iterator[None]:
        start_s = time.time()
        clock = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, category, start_s, time.perf_counter() - clock, num_items)

    def add(self, name: str, category: str, start_s: float, duration_s: float, num_items: int = 0) -> None:
        self.spans.append(
            Span(
                name=name,
                category=category,
                worker=self.worker,
                devices=self.devices,
                start_s=start_s,
                duration_s=duration_s,
                num_items=num_items,
            )
        )


class WaitTable:
    """What the lanes of a process wait for right now; read by the heartbeat."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: dict[int, tuple[str, str, float]] = {}

    @contextmanager
    def waiting(self, waiter: str, target: str) -> Iterator[None]:
        lane = threading.get_ident()
        with self._lock:
            self._waits[lane] = (waiter, target, time.time())
        try:
            yield
        finally:
            with self._lock:
                del self._waits[lane]

    def current(self) -> list[tuple[str, str, float]]:
        with self._lock:
            return list(self._waits.values())
