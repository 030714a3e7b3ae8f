"""A thread for code that blocks, which holds up neither the event loop nor the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any


class DaemonThread:
    """Runs functions one after the other, always in the same thread. One that hangs holds up only those after it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The function's result. Raises: whatever it raises; StopIteration and SystemExit as RuntimeError."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._work.put((outcome, lambda: function(*arguments, **named)))
        return await outcome

    def close(self) -> None:
        """Ends the thread after what it has to do. Does not wait."""
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            outcome, function = work
            value, error = None, None
            try:
                value = function()
            except Exception as raised:  # noqa: BLE001 - raised again by the caller
                error = raised if not isinstance(raised, StopIteration) else _wrapped(raised)
            except BaseException as raised:  # noqa: BLE001 - it must not end the event loop
                error = _wrapped(raised)
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                outcome.get_loop().call_soon_threadsafe(_settle, outcome, value, error)


def _wrapped(raised: BaseException) -> RuntimeError:
    error = RuntimeError(f"it raised {type(raised).__name__}")
    error.__cause__ = raised
    return error


def _settle(outcome: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if outcome.done():  # cancelled
        return
    if error is None:
        outcome.set_result(value)
    else:
        outcome.set_exception(error)
