"""One `sglang.Engine`. SGLang ends the whole process when one of its children fails, so its own watchdog is stopped and
replaced by that of `ServerLoop`."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from rlinf_workers.engines.server_loop import ServerLoop
from rlinf_workers.engines.sglang.child import ADAPTER_VARIABLE, FOLDER_VARIABLE, MEETING_VARIABLE, run_scheduler
from rlinf_workers.errors import WorkersError
from rlinf_workers.leftovers import SweptFolder
from rlinf_workers.models.lora_settings import LoraSettings

PROCESSORS_VARIABLE, PROCESSORS = "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE", "rlinf_workers.engines.sglang.processors"
"""SGLang's env var for a package whose processors of pictures take the place of its own, and ours."""

PORT_TAKEN = "another process took the port that SGLang had chosen; start the run again"


class EngineServer(ServerLoop):
    """A running `sglang.Engine`; its own methods would wait for the loop that is already running."""

    TITLE = "SGLang"
    HINTS: ClassVar[Mapping[str, str]] = {
        "EADDRINUSE": PORT_TAKEN,
        "ddress already in use": PORT_TAKEN,
        "mem-fraction-static": "that is engine_options.mem_fraction_static",
        "Memory pool size is too small": "raise engine_options.mem_fraction_static, or max_total_tokens on CPU slots",
    }

    def __init__(
        self,
        arguments: Mapping[str, Any],
        folder: SweptFolder,
        on_lost: Callable[[WorkersError], None],
        adapter: LoraSettings | None,
    ) -> None:
        os.environ[FOLDER_VARIABLE] = str(folder.path)
        os.environ[PROCESSORS_VARIABLE] = PROCESSORS
        os.environ[ADAPTER_VARIABLE] = "" if adapter is None else msgspec.json.encode(adapter).decode()
        # Its ranks rendezvous through a file: SGLang's own store would listen on every address and accept any keys.
        os.environ[MEETING_VARIABLE] = f"file://{folder.path / 'ranks'}"  # torch reads it literally
        _ignore_sigquit()
        super().__init__(arguments, folder, on_lost)
        reported = self.engine._scheduler_init_result.scheduler_infos[0]
        self.num_tokens = int(reported["max_total_num_tokens"])
        # SGLang reserves five tokens of a sequence when it limits the prompt length, and one more when it truncates a
        # completion.
        self.num_sequence_tokens = int(reported["max_req_input_len"]) + 4

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager; run its coroutines with `run` or `spawn`."""
        return self.engine.tokenizer_manager

    def close(self) -> None:
        super().close()
        _close_sockets(self.manager.recv_from_detokenizer, self.engine.send_to_rpc)

    def _name_of(self, process: Any) -> str:
        return f"scheduler process {self._processes.index(process)} of {len(self._processes)}"

    async def _start(self, arguments: Mapping[str, Any]) -> Any:
        libraries = cuda_libraries() if arguments.get("enable_memory_saver") else []
        managers: list[Any] = []
        try:
            with _temporary_files_in(self._folder.path), _library_path(libraries):
                started = _engine_class(self._folder, managers)(**arguments)
        except Exception:
            _close_sockets(*(manager.recv_from_detokenizer for manager in managers))
            raise
        atexit.unregister(started.shutdown)  # it would end every child of this process, not only its own
        manager = started.tokenizer_manager
        manager._subprocess_watchdog.stop()
        manager._subprocess_watchdog = None
        manager.auto_create_handle_loop()
        return started


def _engine_class(folder: SweptFolder, managers: list[Any]) -> Any:
    """SGLang's engine with schedulers that end with this process, and without a detokenizer.

    Args:
        managers: gets the tokenizer manager, whose sockets have to be closed if the engine does not start.
    """
    from rlinf_workers.engines.sglang import srt

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

    return Engine


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


def _ignore_sigquit() -> None:
    """A failing scheduler sends SIGQUIT to its parent, which would end the worker without a message."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, lambda *_: None)
