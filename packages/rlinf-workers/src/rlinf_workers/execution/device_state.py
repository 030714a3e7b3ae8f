"""Tracks which workers have state on which devices, and offloads it before another worker's state arrives.

State stays on its devices after its turn. It is offloaded when a worker of another turn gets the lease of one of these
devices, in the same run or in a later run of any flow. By then the devices are idle, so only the arriving worker waits
for the offload, and the offload waits for nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from rlinf_workers.spans import Span

Ready = Callable[[str], None]
"""Called when the devices are free, with "" or the reason why they will not be."""


class DeviceState:
    """The workers whose state is on devices and may have to be offloaded; one table for an executor and all its runs.

    Args:
        send_away: tells a worker to move its state to host memory; the future returns the span of the offload.
    """

    def __init__(self, send_away: Callable[[str], Future[Span]]) -> None:
        self._send_away = send_away
        self._devices: dict[str, frozenset[int]] = {}
        self._leaving: dict[str, Future[Span]] = {}
        self._spans: list[Span] = []
        self._lock = threading.RLock()  # reentrant: a call to a lost worker fails at once, in the calling thread

    def make_room(
        self, worker: str, devices: Collection[int], *, beside: Collection[str], stays: bool, ready: Ready
    ) -> None:
        """Offloads other workers from the devices that a worker needs.

        Args:
            beside: worker groups that may keep their state there at the same time.
            stays: the worker's own state is never offloaded.
        """
        with self._lock:
            in_the_way = [
                other
                for other, on in self._devices.items()
                if other != worker and group_of(other) not in beside and not on.isdisjoint(devices)
            ]
            leaving = [(other, self._leave(other)) for other in in_the_way]
            self._devices.pop(worker, None)
            if not stays:
                self._devices[worker] = frozenset(devices)
        _when_gone(leaving, lambda why: ready(f"there is no room for {worker}: {why}" if why else ""))

    def forget(self, worker: str) -> None:
        """Drops a worker whose process is gone, and with it all its state."""
        with self._lock:
            self._devices.pop(worker, None)

    def leaving(self) -> list[str]:
        """Workers whose offload has begun and not ended."""
        with self._lock:
            return sorted(self._leaving)

    def take_spans(self) -> list[Span]:
        """The offloads since the last call."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans

    def _leave(self, worker: str) -> Future[Span]:
        """Starts the offload, once for any number of workers that wait for it."""
        if worker not in self._leaving:
            self._leaving[worker] = left = self._send_away(worker)
            left.add_done_callback(lambda left: self._has_left(worker, left))
            return left
        return self._leaving[worker]

    def _has_left(self, worker: str, left: Future[Span]) -> None:
        with self._lock:
            del self._leaving[worker]
            if left.exception() is None:
                self._devices.pop(worker, None)
                self._spans.append(left.result())


def group_of(worker: str) -> str:
    """`actor/1` -> `actor`"""
    return worker.partition("/")[0]


def _when_gone(leaving: Sequence[tuple[str, Future[Span]]], ready: Ready, why: str = "") -> None:
    """Calls `ready` when all offloads have ended or one failed, in the thread that learns of the last one."""
    if not leaving:
        ready(why)
        return
    (worker, left), *others = leaving

    def go_on(left: Future[Span]) -> None:
        error = left.exception()
        message = f"{worker} did not take its state off the devices: {type(error).__name__}: {error}" if error else ""
        _when_gone(others, ready, why or message)

    left.add_done_callback(go_on)
