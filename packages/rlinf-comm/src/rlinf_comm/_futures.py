"""Futures of a channel's puts and takes, for code without an event loop of its own.

They are the channel's coroutines, run by one event loop in one thread of the process. A future counts as running from
the start, so that it cannot be cancelled: a cancelled take might already hold items.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

_Start = Callable[[], Coroutine[Any, Any, Any]]

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""The event loop of each process, by its id: a forked child starts its own."""


def _loop() -> asyncio.AbstractEventLoop:
    with _lock:
        if os.getpid() not in _loops:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="rlinf-comm futures", daemon=True).start()
        return _loops[os.getpid()]


class Futures:
    """The futures of one Channel object."""

    def __init__(self) -> None:
        self._last_puts: dict[tuple[int, int | str], Future[None]] = {}
        """The last put of each key, by process id and key."""

    def take(self, take: _Start) -> Future[Any]:
        return _submit(take())

    def put(self, key: int | str, put: _Start) -> Future[None]:
        """Starts when the put before it with the same key is done, however that ended."""
        place = (os.getpid(), key)
        future = _submit(_after(self._last_puts.get(place), put))
        self._last_puts[place] = future
        future.add_done_callback(lambda done: self._forget(place, done))
        return future

    def _forget(self, place: tuple[int, int | str], done: Future[None]) -> None:
        if self._last_puts.get(place) is done:
            self._last_puts.pop(place, None)


def _submit(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def hand_over(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        else:
            future.set_exception(error)

    asyncio.run_coroutine_threadsafe(coroutine, _loop()).add_done_callback(hand_over)
    return future


async def _after(before: Future[None] | None, put: _Start) -> None:
    if before is not None:
        waited_for = asyncio.wrap_future(before)
        await asyncio.wait([waited_for])
        waited_for.exception()  # is told to whoever has the future
    await put()
