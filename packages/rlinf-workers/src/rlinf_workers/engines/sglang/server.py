"""One `sglang.Engine` in a thread of its own, with its event loop and its processes, which are watched.

SGLang ends the whole process when one of its children fails. A worker has more to say: which process ended, how, and
the last error that it logged; so SGLang's own watch is stopped, and one of ours takes its place. Everything of SGLang
runs in the loop's thread; the kernel kills its processes when that thread ends, and so with the worker.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from rlinf_workers.engines.sglang.child import FOLDER_VARIABLE, MEETING_VARIABLE, last_error, run_scheduler
from rlinf_workers.errors import ProcessLost, SettingsRefused, WorkersError
from rlinf_workers.leftovers import SweptFolder

T = TypeVar("T")


class EngineServer:
    """A running engine.

    Args:
        arguments: server arguments, all of them.
        folder: what the worker and the engine's processes leave for each other, and SGLang's sockets; `close` closes
            it.
        on_lost: called from a thread of its own, once, with the error that says which process ended and how.
    Attributes:
        num_tokens: what the KV cache holds.
        num_sequence_tokens: the longest sequence, prompt and completion together, that it takes.
    Raises: SettingsRefused when the engine does not start, with the reason that it logged.
    """

    def __init__(
        self, arguments: Mapping[str, Any], folder: SweptFolder, on_lost: Callable[[WorkersError], None]
    ) -> None:
        self._folder, self._on_lost = folder, on_lost
        os.environ[FOLDER_VARIABLE] = str(folder.path)
        # Its ranks meet through a file: SGLang's own store would listen at every address and take keys from anybody.
        os.environ[MEETING_VARIABLE] = f"file://{folder.path / 'ranks'}"  # torch reads it literally
        _ignore_sigquit()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)
        self._thread.start()
        others = set(multiprocessing.active_children())
        self._processes: list[Any] = []
        try:
            self._engine = self.run(_start(arguments, folder))
        except Exception as error:
            reason = last_error(folder.path) or f"{type(error).__name__}: {error}"
            self._end(others)
            raise SettingsRefused(f"SGLang did not start: {with_hint(reason)}") from error
        self._others = others
        self._processes = [one for one in multiprocessing.active_children() if one not in others]
        reported = self._engine._scheduler_init_result.scheduler_infos[0]
        self.num_tokens = int(reported["max_total_num_tokens"])
        # SGLang keeps five tokens of a sequence for itself when it says how long a prompt may be, and one more when it
        # cuts a completion.
        self.num_sequence_tokens = int(reported["max_req_input_len"]) + 4
        self._closing, self._closed = multiprocessing.Pipe()
        threading.Thread(target=self._watch, name="watch sglang", daemon=True).start()

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager; its coroutines belong into `run` or `spawn`."""
        return self._engine.tokenizer_manager

    @property
    def engine(self) -> Any:
        """The `sglang.Engine`; its own methods would wait for a loop that runs already."""
        return self._engine

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the engine's loop and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a coroutine in the engine's loop."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Ends the engine's processes and waits for them."""
        self._closed.send(None)
        self._end(self._others)
        _close_sockets(self.manager.recv_from_detokenizer, self._engine.send_to_rpc)

    def _end(self, others: set[Any]) -> None:
        for process in multiprocessing.active_children():
            if process not in others:
                _kill(process.pid)
                process.join()
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._folder.close()

    def _watch(self) -> None:
        by_sentinel = {process.sentinel: (rank, process) for rank, process in enumerate(self._processes)}
        ended = wait([self._closing, *by_sentinel])
        if self._closing in ended:
            return
        rank, process = by_sentinel[ended[0]]  # type: ignore[index]
        process.join()
        how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
        reason = last_error(self._folder.path, process.pid)
        self._on_lost(
            ProcessLost(
                f"SGLang's scheduler process {rank} of {len(self._processes)} (pid {process.pid}) ended with {how}"
                + (f": {reason}" if reason else "; the machine may have run out of memory")
            )
        )


HINTS = {
    "EADDRINUSE": "another process took the port that SGLang had chosen; start the run again",
    "ddress already in use": "another process took the port that SGLang had chosen; start the run again",
    "mem-fraction-static": "that is engine_options.mem_fraction_static",
    "Memory pool size is too small": "raise engine_options.mem_fraction_static, or max_total_tokens on CPU slots",
}
"""What an error of SGLang contains, and what to do here."""


def with_hint(reason: str) -> str:
    """An error of SGLang with what to do, where that is known."""
    hint = next((hint for text, hint in HINTS.items() if text in reason), None)
    return reason if hint is None else f"{reason}\n{hint}"


async def _start(arguments: Mapping[str, Any], folder: SweptFolder) -> Any:
    from rlinf_workers.engines.sglang import srt

    managers: list[Any] = []

    def init_tokenizer_manager(*arguments: Any) -> tuple[Any, ...]:
        new_managers = srt.Engine.init_tokenizer_manager_func(*arguments)
        managers.append(new_managers[0])
        return new_managers

    class Engine(srt.Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)
        init_tokenizer_manager_func = staticmethod(init_tokenizer_manager)

        @classmethod
        def _launch_scheduler_processes(cls, server_args: Any, port_args: Any, *arguments: Any, **keywords: Any) -> Any:
            folder.also(srt.shm_path_for(port_args.instance_id))  # its statistics, which a kill leaves
            return super()._launch_scheduler_processes(server_args, port_args, *arguments, **keywords)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list[Any], list[str]]:
            return [], []  # token ids come straight from the scheduler

    try:
        with _temporary_files_in(folder.path):
            started = Engine(**arguments)
    except Exception:
        _close_sockets(*(manager.recv_from_detokenizer for manager in managers))
        raise
    atexit.unregister(started.shutdown)  # which would end every child of this process, not only its own
    manager = started.tokenizer_manager
    manager._subprocess_watchdog.stop()
    manager._subprocess_watchdog = None
    manager.auto_create_handle_loop()
    return started


def _close_sockets(*sockets: Any) -> None:
    """With all others of their contexts. ZeroMQ would wait for somebody to take what was sent to processes that are
    gone: where a context is forgotten, and at the end of this process."""
    for socket in sockets:
        socket.context.destroy(linger=0)


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """SGLang names its sockets as temporary files, and leaves them."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _ignore_sigquit() -> None:
    """A scheduler that fails sends its parent SIGQUIT before it ends, which would end the worker without a word."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, lambda *_: None)


def _kill(pid: int | None) -> None:
    """Ends a process and all below it."""
    import psutil  # which SGLang requires

    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
