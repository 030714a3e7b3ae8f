"""vLLM's `AsyncLLM` in its own thread, with its event loop and supervised processes.

vLLM marks an engine whose process died as dead, without telling how it ended. A worker has to report which process
ended, how, and the last error it logged. All vLLM code runs in the loop's thread; the kernel kills its processes when
that thread ends, and so with the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any, TypeVar

from rlinf_workers.engines.server_processes import kill_family, last_error
from rlinf_workers.engines.vllm.child import FOLDER_VARIABLE, run_engine_core
from rlinf_workers.errors import ProcessLost, SettingsRefused, WorkersError
from rlinf_workers.leftovers import SweptFolder

T = TypeVar("T")
END_S = 5.0
"""Time for vLLM's processes to end by themselves; then they are killed."""


class VLLMServer:
    """A running engine.

    Args:
        arguments: all engine arguments.
        folder: for files exchanged between the worker and the engine's processes; `close` removes it.
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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        others = set(multiprocessing.active_children())
        try:
            self.engine = self.run(_start(arguments))
        except Exception as error:
            reason = last_error(folder.path) or f"{type(error).__name__}: {error}"
            self._end(others)
            raise SettingsRefused(f"vLLM did not start: {with_hint(reason)}") from error
        self._others = others
        self._processes = [one for one in multiprocessing.active_children() if one not in others]
        config = self.engine.vllm_config
        # One block is never used: entries of sequences without a block point at it.
        self.num_tokens = (config.cache_config.num_gpu_blocks - 1) * config.cache_config.block_size
        self.num_sequence_tokens = int(config.model_config.max_model_len)
        self._closing, self._closed = multiprocessing.Pipe()
        threading.Thread(target=self._watch, name="watch vllm", daemon=True).start()

    engine: Any
    """The `AsyncLLM`; run its coroutines with `run` or `spawn`."""

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

    def _end(self, others: set[Any]) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None:
            self.run(_shut_down(engine))
        for process in multiprocessing.active_children():
            if process not in others:
                kill_family(process.pid)
                process.join()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._folder.close()

    def _watch(self) -> None:
        """The core process also ends when one of its workers does, after it has logged which one."""
        by_sentinel = {process.sentinel: process for process in self._processes}
        ended = wait([self._closing, *by_sentinel])
        if self._closing in ended:
            return
        process: Any = by_sentinel[ended[0]]  # type: ignore[index]
        deadline_s = time.monotonic() + END_S
        while process.exitcode is None and time.monotonic() < deadline_s:
            time.sleep(0.01)  # vLLM waits for it in another thread, which may learn first how it ended
        code = process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        reason = last_error(self._folder.path)
        self._on_lost(
            ProcessLost(
                f"vLLM's core process (pid {process.pid}) ended with {how}"
                + (f": {reason}" if reason else "; the machine may have run out of memory")
            )
        )


HINTS = {
    "No available memory for the cache blocks": "raise engine_options.gpu_memory_utilization",
    "Available memory on node": "lower engine_options.kv_cache_memory_bytes",
    "max_model_len": "raise engine_options.gpu_memory_utilization, or kv_cache_memory_bytes on CPU slots",
}
"""Substring of a vLLM error -> what to do."""


def with_hint(reason: str) -> str:
    """A vLLM error with advice, if there is any."""
    hint = next((hint for text, hint in HINTS.items() if text in reason), None)
    return reason if hint is None else f"{reason}\n{hint}"


async def _start(arguments: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    with _own_core_process():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        await engine.collective_rpc("rlinf_prepare")
    except Exception:
        await _shut_down(engine)
        raise
    return engine


async def _shut_down(engine: Any) -> None:
    engine.shutdown(timeout=END_S)
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@contextlib.contextmanager
def _own_core_process() -> Iterator[None]:
    """vLLM starts its core process at `child.run_engine_core`; it has no argument for the function to start."""
    from vllm.v1.engine.core import EngineCoreProc  # pyright: ignore[reportMissingImports]

    before = EngineCoreProc.__dict__["run_engine_core"]
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = before
