"""Calls in threads: several at once for a broadcast, and cancellable ones for asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlinf_comm.errors import CommError

_MAX_WAITING_CALLS = 256
"""The most calls of asend and areceive that run at once, each in its thread; further ones wait for a thread."""
_MAX_BROADCAST_THREADS = 8


class Once:
    """The result of a call that several threads may want, made by the first."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._results: list[Any] = []

    def get(self) -> Any:
        with self._lock:
            if not self._results:
                self._results.append(self._call())
            return self._results[0]


class Background:
    """The threads of one peer, started when they are first needed."""

    def __init__(self) -> None:
        self._waiting = ThreadPoolExecutor(_MAX_WAITING_CALLS, "rlinf-comm async")
        self._sending = ThreadPoolExecutor(_MAX_BROADCAST_THREADS, "rlinf-comm broadcast")

    def for_each(self, call: Callable[[str], None], names: Iterable[str]) -> dict[str, Exception]:
        """Calls with each name, at the same time; gives the errors."""
        futures = {name: self._sending.submit(call, name) for name in names}
        failures: dict[str, Exception] = {}
        for name, future in futures.items():
            error = future.exception()
            if isinstance(error, (CommError, ValueError)):
                failures[name] = error
            elif error is not None:
                raise error
        return failures

    def start(self, call: Callable[[], None]) -> None:
        """Runs a call, which must raise nothing, in a thread."""
        self._waiting.submit(call)

    async def call(
        self, function: Callable[[Callable[[], bool]], Any], give_back: Callable[[Any], None] | None = None
    ) -> Any:
        """Runs function(is_cancelled) in a thread. When the task is cancelled, `give_back` gets what came too late."""
        lock = threading.Lock()
        cancelled = threading.Event()
        results: list[Any] = []

        def run() -> None:
            result = function(cancelled.is_set)
            with lock:
                results.append(result)
                if cancelled.is_set() and give_back is not None:
                    give_back(result)

        try:
            await asyncio.wrap_future(self._waiting.submit(run))
        except asyncio.CancelledError:
            with lock:
                cancelled.set()
                if results and give_back is not None:
                    give_back(results[0])
            raise
        return results[0]

    def close(self) -> None:
        self._waiting.shutdown(wait=False, cancel_futures=True)
        self._sending.shutdown(wait=False, cancel_futures=True)
