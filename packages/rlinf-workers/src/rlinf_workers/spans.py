"""Spans: the activities of a worker over time. They become the run's trace, its time per stage and the planner's
measurements."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rlinf_comm import record
from rlinf_workers.explaining.processes import started_ticks
from rlinf_workers.launchers.base import OwnProcess, Wait, WaitKind

_CLOCK = "RLINF_CLOCK"
"""Env var with a machine's boot id and the Unix time at which its monotonic clock was zero."""


def _unix_ns() -> int:
    """Unix time at which `time.perf_counter_ns` was zero. The first process that asks fixes it for the processes that
    it starts on its machine: while the system clock is being adjusted, each would compute another value, and spans of
    stages that take turns would overlap."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return time.time_ns() - time.perf_counter_ns()
    decided_boot, _, decided = os.environ.get(_CLOCK, "").partition(" ")
    if decided_boot != boot:
        decided = str(time.time_ns() - time.perf_counter_ns())
        os.environ[_CLOCK] = f"{boot} {decided}"
    return int(decided)


_UNIX_NS = _unix_ns()

COMPUTE_SPAN = "stage"
"""The `Span.category` of the computation of a stage."""
LEASE = "lease"
SYNC_SPAN = "sync"
"""The `Span.category` of a weight sync."""
CHANNEL = "channel"


@record
@dataclass(frozen=True, slots=True)
class Span:
    """A time interval of one stage of one worker."""

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
    began_ns: tuple[int, ...] = ()
    """Unix times at which the stage began the items that it sends at the end, if it works on several at once."""
    collective_ns: int = 0
    """Time of the span in collectives over host memory: waiting for other ranks and exchanging with them."""

    @property
    def start_s(self) -> float:
        return self.start_ns * 1e-9

    @property
    def duration_s(self) -> float:
        return self.duration_ns * 1e-9

    @property
    def collective_s(self) -> float:
        return self.collective_ns * 1e-9


def now_ns() -> int:
    """Unix time from a monotonic clock: consecutive spans of a process never overlap."""
    return _UNIX_NS + time.perf_counter_ns()


Processes = Callable[[], Iterable[int]]
"""Returns process ids; can be called from any thread."""


class WaitTable:
    """The current waits of a process's lanes; read by the heartbeat. Needs no lock: each lane sets and deletes its own
    entry, and `dict.copy` is atomic in the interpreter.

    Args:
        worker: `role/rank`.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._waits: dict[int, tuple[Wait, Processes | None, Callable[[], str] | None]] = {}
        self._of_thread = threading.local()

    @contextmanager
    def in_stage(self, stage: str) -> Iterator[None]:
        """Context in which waits of the calling thread belong to that stage."""
        self._of_thread.stage = stage
        try:
            yield
        finally:
            del self._of_thread.stage

    @contextmanager
    def waiting(
        self,
        kind: WaitKind,
        of: str = "",
        *,
        number: int = 0,
        operation: str = "",
        ranks: tuple[int, ...] = (),
        processes: Processes | None = None,
        describe: Callable[[], str] | None = None,
    ) -> Iterator[Wait]:
        """Context in which the calling thread waits; a nested context replaces the outer wait. For the arguments see
        Wait.

        Args:
            processes: the worker's own processes that the context waits for. While there are none, the thread computes
                by itself, and no wait is reported.
            describe: returns what is waited for at this moment, in place of `of`; can be called from any thread.
        """
        lane = threading.get_ident()
        around = self._waits.get(lane)
        wait = Wait(
            waiter=self._worker,
            stage=getattr(self._of_thread, "stage", ""),
            kind=kind,
            of=of,
            number=number,
            operation=operation,
            ranks=ranks,
            since_s=time.time(),
        )
        self._waits[lane] = wait, processes, describe
        start_ns = now_ns()
        try:
            yield wait
        finally:
            if kind == "collective":
                self._of_thread.collective_ns = self.collective_ns + now_ns() - start_ns
            if around is None:
                del self._waits[lane]
            else:
                self._waits[lane] = around

    @property
    def collective_ns(self) -> int:
        """Nanoseconds that the calling thread has spent in collectives so far."""
        return getattr(self._of_thread, "collective_ns", 0)

    def current(self) -> list[Wait]:
        """All waits at this moment; from any thread."""
        waits = (
            _with_processes(wait if describe is None else replace(wait, of=describe()), processes)
            for wait, processes, describe in self._waits.copy().values()
        )
        return [wait for wait in waits if wait is not None]


def _with_processes(wait: Wait, processes: Processes | None) -> Wait | None:
    if processes is None:
        return wait
    try:
        own = tuple(OwnProcess(pid=pid, started_ticks=started_ticks(pid)) for pid in processes())
    except Exception:  # noqa: BLE001 - a custom engine may fail; that must not end the heartbeat thread
        return None
    return replace(wait, processes=own) if own else None
