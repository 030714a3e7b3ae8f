"""Spans: what a worker did when. They become the run's trace, its time by stage and the planner's measurements."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlinf_comm.records import record

_UNIX_NS = time.time_ns() - time.perf_counter_ns()

COMPUTE = "stage"
LEASE = "lease"
SYNC = "sync"
CHANNEL = "channel"


@record
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
    start_ns: int
    """Unix time."""
    duration_ns: int
    num_items: int = 0

    @property
    def start_s(self) -> float:
        return self.start_ns * 1e-9

    @property
    def duration_s(self) -> float:
        return self.duration_ns * 1e-9


def now_ns() -> int:
    """Unix time by a clock that only goes forward: spans of a process that follow one another never overlap."""
    return _UNIX_NS + time.perf_counter_ns()


@record
@dataclass(kw_only=True, slots=True)
class SpanTable:
    """The spans of one stage call, column by column: a pipelined stage makes hundreds, and lists of plain values cross
    to the driver in microseconds."""

    worker: str
    devices: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    starts_ns: list[int] = field(default_factory=list)
    durations_ns: list[int] = field(default_factory=list)
    nums_items: list[int] = field(default_factory=list)

    @contextmanager
    def span(self, name: str, category: str, num_items: int = 0) -> Iterator[None]:
        start_ns = now_ns()
        try:
            yield
        finally:
            self.add(name, category, start_ns, now_ns() - start_ns, num_items)

    def add(self, name: str, category: str, start_ns: int, duration_ns: int, num_items: int = 0) -> None:
        self.names.append(name)
        self.categories.append(category)
        self.starts_ns.append(start_ns)
        self.durations_ns.append(duration_ns)
        self.nums_items.append(num_items)

    def spans(self) -> list[Span]:
        """Row by row."""
        columns = (self.names, self.categories, self.starts_ns, self.durations_ns, self.nums_items)
        return [
            Span(
                name=name,
                category=category,
                worker=self.worker,
                devices=self.devices,
                start_ns=start_ns,
                duration_ns=duration_ns,
                num_items=num_items,
            )
            for name, category, start_ns, duration_ns, num_items in zip(*columns, strict=True)
        ]


class _Wait:
    """A context manager by hand: a generator's would cost more than the short waits in it."""

    __slots__ = ("_lane", "_wait", "_waits")

    def __init__(self, waits: dict[int, tuple[str, str, float]], wait: tuple[str, str, float]) -> None:
        self._waits, self._wait = waits, wait
        self._lane = threading.get_ident()

    def __enter__(self) -> None:
        self._waits[self._lane] = self._wait

    def __exit__(self, *_: object) -> None:
        del self._waits[self._lane]


class WaitTable:
    """What the lanes of a process wait for right now; read by the heartbeat. Needs no lock: each lane sets and deletes
    its own entry, and `dict.copy` is one step of the interpreter."""

    def __init__(self) -> None:
        self._waits: dict[int, tuple[str, str, float]] = {}

    def waiting(self, waiter: str, target: str) -> _Wait:
        """The calling thread waits inside this block."""
        return _Wait(self._waits, (waiter, target, time.time()))

    def current(self) -> list[tuple[str, str, float]]:
        return list(self._waits.copy().values())
