"""Spans: what a worker did when. They become the run's trace, its time by stage and the planner's measurements."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from rlinf_comm.records import record
from rlinf_workers.launcher.base import Wait

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
    start_ns: int
    """Unix time."""
    duration_ns: int
    num_items: int
    worker: str
    devices: tuple[str, ...]

    @property
    def start_s(self) -> float:
        return self.start_ns * 1e-9

    @property
    def duration_s(self) -> float:
        return self.duration_ns * 1e-9


def now_ns() -> int:
    """Unix time by a clock that only goes forward: spans of a process that follow one another never overlap."""
    return _UNIX_NS + time.perf_counter_ns()


class _Waiting:
    """A context manager by hand: a generator's would cost more than the short waits in it."""

    __slots__ = ("_lane", "_wait", "_waits")

    def __init__(self, waits: dict[int, Wait], wait: Wait) -> None:
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
        self._waits: dict[int, Wait] = {}

    def waiting(self, waiter: str, target: str) -> _Waiting:
        """The calling thread waits inside this block."""
        return _Waiting(self._waits, Wait(waiter=waiter, target=target, since_s=time.time()))

    def current(self) -> list[Wait]:
        return list(self._waits.copy().values())
