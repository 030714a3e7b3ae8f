"""Wakes asyncio tasks that wait for a channel.

A futex cannot be polled, so one thread for each channel and direction (items, room) waits on behalf of all tasks, and
only while there are any. It never touches an item: a task that is woken tries again by itself, so that cancelling it
loses nothing.
"""

from __future__ import annotations

import asyncio
import os
import threading

from rlinf_comm import _C

FOR_ITEM, FOR_ROOM = 0, 1

_NUM_IDLE_SLICES = 10
"""The thread ends after so many slices of 0.1 s without a task."""


class Doorbell:
    """One direction of one channel."""

    def __init__(self, native: _C.Channel, waiting: int) -> None:
        self._native = native
        self._waiting = waiting
        self._lock = threading.Lock()
        self._tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._watcher_pid: int | None = None
        """The process whose thread watches; a forked child starts its own."""

    def sequence(self) -> int:
        """Read it before an attempt, and hand it to wait() after the attempt has failed."""
        return self._native.event_sequence(self._waiting)

    async def wait(self, seen: int, timeout_s: float | None) -> None:
        """Waits until something has happened since `seen`; also returns from time to time without a cause."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._watcher_pid != os.getpid():
                self._watcher_pid = os.getpid()
                self._tasks = []
                threading.Thread(target=self._watch, name="rlinf-comm doorbell", daemon=True).start()
            self._tasks.append((loop, woken))
        if self.sequence() == seen:
            await asyncio.wait([woken], timeout=timeout_s)
        woken.cancel()

    def _watch(self) -> None:
        num_idle = 0
        while True:
            seen = self.sequence()
            with self._lock:
                self._tasks = [(loop, woken) for loop, woken in self._tasks if not woken.done()]
                num_idle = 0 if self._tasks else num_idle + 1
                if num_idle > _NUM_IDLE_SLICES:
                    self._watcher_pid = None
                    return
            self._native.wait_for_event(self._waiting, seen)
            with self._lock:
                tasks, self._tasks = self._tasks, []
            for loop, woken in tasks:
                try:
                    loop.call_soon_threadsafe(_wake, woken)
                except RuntimeError:  # the loop has been closed, and nobody waits any more
                    continue


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
