"""A server in its own thread of the worker, with its event loop and supervised processes.

Servers end the whole process, or only mark themselves as dead, when one of their processes fails. A worker has to
report which process ended, how, and the last error that it logged. All of a server's code runs in the loop's thread;
the kernel kills its processes when that thread ends, and so with the worker.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from multiprocessing.connection import wait
from typing import Any, ClassVar, TypeVar

from rlinf_workers.engines.server_processes import kill_family, last_error
from rlinf_workers.errors import ProcessLost, SettingsRefused, WorkersError
from rlinf_workers.leftovers import SweptFolder

T = TypeVar("T")
EXIT_CODE_S = 5.0
"""Time to wait for the exit code of a process that has ended, which another thread may learn first."""


class ServerLoop:
    """A running server. A subclass starts it in `_start`, and sets the two capacities.

    Args:
        arguments: all arguments of the server.
        folder: for files exchanged between the worker and the server's processes; `close` removes it.
        on_lost: called once, in its own thread, with the error that names the ended process and how it ended.
    Raises: SettingsRefused if the server does not start, with the reason that it logged.
    """

    TITLE: ClassVar[str]
    """The server's name in messages."""
    HINTS: ClassVar[Mapping[str, str]]
    """Substring of one of its errors -> what to do."""
    STARTS_OTHERS: ClassVar[bool] = False
    """Whether its processes start further ones, whose errors are the reason why they end."""

    engine: Any
    """The server's own object; run its coroutines with `run` or `spawn`."""
    num_tokens: int
    """Capacity of its KV cache."""
    num_sequence_tokens: int
    """The longest accepted sequence, prompt and completion together."""

    def __init__(
        self, arguments: Mapping[str, Any], folder: SweptFolder, on_lost: Callable[[WorkersError], None]
    ) -> None:
        self._folder, self._on_lost = folder, on_lost
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self.TITLE, daemon=True)
        self._thread.start()
        self._others = set(multiprocessing.active_children())
        """Processes of the worker that are not the server's."""
        try:
            self.engine = self.run(self._start(arguments))
        except Exception as error:
            reason = last_error(folder.path) or f"{type(error).__name__}: {error}"
            self._end(self._own_processes())
            raise SettingsRefused(f"{self.TITLE} did not start: {with_hint(reason, self.HINTS)}") from error
        self._processes: list[Any] = self._own_processes()
        self._closing, self._closed = multiprocessing.Pipe()
        threading.Thread(target=self._watch, name=f"watch {self.TITLE}", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the server's loop and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a coroutine in the server's loop."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stops the server's processes and waits for them."""
        self._closed.send(None)
        self.run(self._stop())
        self._end(self._processes)  # a server that started later in this process has others

    async def _start(self, arguments: Mapping[str, Any]) -> Any:
        """Starts the server; returns its `engine`."""
        raise NotImplementedError

    async def _stop(self) -> None:
        """Lets a running server end by itself; what is left of its processes is killed."""

    def _name_of(self, process: Any) -> str:
        """A process in messages: "core process"."""
        raise NotImplementedError

    def _own_processes(self) -> list[Any]:
        return [process for process in multiprocessing.active_children() if process not in self._others]

    def _end(self, processes: list[Any]) -> None:
        for process in processes:
            kill_family(process.pid)
            process.join()
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._folder.close()

    def _watch(self) -> None:
        by_sentinel = {process.sentinel: process for process in self._processes}
        ended = wait([self._closing, *by_sentinel])
        if self._closing in ended:
            return
        process = by_sentinel[ended[0]]  # type: ignore[index]
        deadline_s = time.monotonic() + EXIT_CODE_S
        while process.exitcode is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        code = process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        reason = last_error(self._folder.path, None if self.STARTS_OTHERS else process.pid)
        self._on_lost(
            ProcessLost(
                f"{self.TITLE}'s {self._name_of(process)} (pid {process.pid}) ended with {how}"
                + (f": {reason}" if reason else "; the machine may have run out of memory")
            )
        )


def with_hint(reason: str, hints: Mapping[str, str]) -> str:
    """A server's error with advice, if there is any."""
    hint = next((hint for text, hint in hints.items() if text in reason), None)
    return reason if hint is None else f"{reason}\n{hint}"


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
