"""One `sglang.Engine` in its own thread, with its event loop and supervised processes.

SGLang ends the whole process when one of its children fails. A worker has to report which process ended, how, and the
last error it logged; so SGLang's own watchdog is stopped and replaced by ours. All SGLang code runs in the loop's
thread; the kernel kills its processes when that thread ends, and so with the worker.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from rlinf_workers.engines.server_processes import kill_family, last_error
from rlinf_workers.engines.sglang.child import FOLDER_VARIABLE, MEETING_VARIABLE, run_scheduler
from rlinf_workers.errors import ProcessLost, SettingsRefused, WorkersError
from rlinf_workers.leftovers import SweptFolder

T = TypeVar("T")


class EngineServer:
    """A running engine.

    Args:
        arguments: all server arguments.
        folder: for files exchanged between the worker and the engine's processes, and SGLang's sockets; `close` removes
            it.
        on_lost: called once, in its own thread, with the error that names the ended process and how it ended.
    Attributes:
        num_tokens: capacity of the KV cache.
        num_sequence_tokens: the longest accepted sequence, prompt and completion together.
    Raises: SettingsRefused if the engine does not start, with the reason that it logged.
    """

    def __init__(
        self, arguments: Mapping[str, Any], folder: SweptFolder, on_lost: Callable[[WorkersError], None]
    ) -> None:
        self._folder, self._on_lost = folder, on_lost
        os.environ[FOLDER_VARIABLE] = str(folder.path)
        # Its ranks rendezvous through a file: SGLang's own store would listen on every address and accept any keys.
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
        # SGLang reserves five tokens of a sequence when it limits the prompt length, and one more when it truncates a
        # completion.
        self.num_sequence_tokens = int(reported["max_req_input_len"]) + 4
        self._closing, self._closed = multiprocessing.Pipe()
        threading.Thread(target=self._watch, name="watch sglang", daemon=True).start()

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager; run its coroutines with `run` or `spawn`."""
        return self._engine.tokenizer_manager

    @property
    def engine(self) -> Any:
        """The `sglang.Engine`; its own methods would wait for the loop that is already running."""
        return self._engine

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the engine's loop and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a coroutine in the engine's loop."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stops the engine's processes and waits for them."""
        self._closed.send(None)
        self._end(self._others)
        _close_sockets(self.manager.recv_from_detokenizer, self._engine.send_to_rpc)

    def _end(self, others: set[Any]) -> None:
        for process in multiprocessing.active_children():
            if process not in others:
                kill_family(process.pid)
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
"""Substring of an SGLang error -> what to do."""


def with_hint(reason: str) -> str:
    """An SGLang error with advice, if there is any."""
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
            folder.also(srt.shm_path_for(port_args.instance_id))  # its statistics, which survive a kill
            return super()._launch_scheduler_processes(server_args, port_args, *arguments, **keywords)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list[Any], list[str]]:
            return [], []  # token ids come straight from the scheduler

    libraries = cuda_libraries() if arguments.get("enable_memory_saver") else []
    try:
        with _temporary_files_in(folder.path), _library_path(libraries):
            started = Engine(**arguments)
    except Exception:
        _close_sockets(*(manager.recv_from_detokenizer for manager in managers))
        raise
    atexit.unregister(started.shutdown)  # it would end every child of this process, not only its own
    manager = started.tokenizer_manager
    manager._subprocess_watchdog.stop()
    manager._subprocess_watchdog = None
    manager.auto_create_handle_loop()
    return started


def _close_sockets(*sockets: Any) -> None:
    """Closes them with all other sockets of their contexts. Otherwise ZeroMQ waits for dead processes to read their
    messages: when a context is garbage-collected, and at the end of this process."""
    for socket in sockets:
        socket.context.destroy(linger=0)


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """SGLang creates its sockets as temporary files and leaves them behind."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def cuda_libraries(site: Iterable[str] | None = None) -> list[str]:
    """Folders of libcudart that pip installed beside torch.

    SGLang preloads its memory saver into its processes. That library needs libcudart when the process starts, before
    torch has loaded it, and without a CUDA toolkit on the loader's path the process would not start.

    Args:
        site: folders of the package `nvidia`; None: those of this interpreter.
    """
    if site is None:
        spec = importlib.util.find_spec("nvidia")
        site = spec.submodule_search_locations or () if spec is not None else ()
    folders = {path.parent for place in site for path in Path(place).glob("*/lib/libcudart.so.*")}
    return [str(folder) for folder in sorted(folders, reverse=True)]


@contextlib.contextmanager
def _library_path(folders: Sequence[str]) -> Iterator[None]:
    """Appends folders to LD_LIBRARY_PATH for processes that start meanwhile."""
    name = "LD_LIBRARY_PATH"
    before = os.environ.get(name)
    paths = [*(path for path in (before or "").split(":") if path), *folders]
    if folders:
        os.environ[name] = ":".join(paths)
    try:
        yield
    finally:
        if folders and before is None:
            del os.environ[name]
        elif folders:
            os.environ[name] = before or ""


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _ignore_sigquit() -> None:
    """A failing scheduler sends SIGQUIT to its parent, which would end the worker without a message."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, lambda *_: None)
