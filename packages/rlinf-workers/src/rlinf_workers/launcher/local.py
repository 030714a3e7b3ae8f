"""The local launcher: processes on this machine, each watched by a thread. No server, nothing to install.

A worker of the driver's own environment is spawned or forked by multiprocessing; one of another environment is started
by that environment's interpreter. From their first message on they are alike.

A worker is a process in a session of its own, so that a Ctrl-C at the terminal reaches the driver alone, and killing
its process group takes its children too. The kernel kills it when the driver dies (see child.py).
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from typing import Any

from rlinf_algos.registry import path_of
from rlinf_comm import codec
from rlinf_comm.records import modules_of
from rlinf_workers.errors import FlowDefinitionError, RemoteError, SettingsRefused, WorkerLost, WorkersError
from rlinf_workers.launcher import child, messages
from rlinf_workers.launcher.base import ServiceHandler, Wait, WorkerSpec
from rlinf_workers.launcher.hello import Hello, disagreement
from rlinf_workers.launcher.interpreter_process import InterpreterProcess

LOG_TAIL_LINES = 20
STOP_GRACE_S = 3.0
START_TIMEOUT_S = 600.0
"""For the imports and the constructor (which may load a model); beats begin after them."""


class LocalWorkerHandle:
    """The driver's end of one process."""

    def __init__(self, spec: WorkerSpec, process: Any, connection: Connection) -> None:
        self.name = spec.identity.name
        self.log_path = spec.log_path
        self.process = process
        self.connection = connection
        self.waits: list[Wait] = []
        self.is_greeted = False
        self.is_ready = False
        self.end: BaseException | None = None
        self.watcher: threading.Thread
        self._send_lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._pending_lock = threading.Lock()
        self._call_ids = itertools.count()

    def call(self, method: str, /, *args: Any, lane: int = 0) -> Future[Any]:
        future: Future[Any] = Future()
        call_id = next(self._call_ids)
        with self._pending_lock:
            if self.end is not None:
                future.set_exception(self.end)
                return future
            self._pending[call_id] = future
        self.send(messages.encode(messages.Call(call_id, lane, method, codec.pack(args))))
        return future

    def send(self, message: bytes) -> None:
        """Sends; a broken pipe is left to the watcher, which sees the process end and fails what is pending."""
        with self._send_lock:
            try:
                self.connection.send_bytes(message)
            except OSError:
                pass

    def finish_call(self, message: messages.Returned | messages.Raised) -> None:
        with self._pending_lock:
            future = self._pending.pop(message.call_id, None)
        if future is None:
            return  # the launcher was shut down meanwhile and has failed it
        if isinstance(message, messages.Returned):
            future.set_result(codec.unpack(message.payload))
        else:
            future.set_exception(RemoteError(self.name, message.error_type, message.message, message.traceback))

    def fail(self, error: BaseException) -> None:
        """Every present and future call fails with `error`."""
        with self._pending_lock:
            self.end = error
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(error)

    def log_tail(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])


class LocalLauncher:
    """Starts workers as processes of this machine.

    Args:
        heartbeat_timeout_s: a worker that sends nothing for that long after its start counts as lost. Workers beat
            once a second from a thread of their own, so only a frozen process (stopped, swapped out, stuck in native
            code that keeps the interpreter) goes silent.
        pins_slots: a worker on CPU slots keeps to their cores (slot i to core i), as one on GPUs keeps to its GPUs.
            Off, the slots only count: the system moves the processes of one slot to a core that another leaves idle.
        forks: workers are forked from multiprocessing's fork server, which has their imports behind it and must not
            have touched a GPU. Whoever starts the server gives it the workers' environment. Workers of another Python
            environment are not.
    """

    def __init__(self, *, heartbeat_timeout_s: float = 60.0, pins_slots: bool = False, forks: bool = False) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._pins_slots = pins_slots
        self._forks = forks
        self._context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        self._handles: list[LocalWorkerHandle] = []
        self._services: dict[str, ServiceHandler] = {}
        self.lost: Future[None] = Future()
        self._closing = False
        # A driver that ends without shutdown() (an exception, Ctrl-C) would wait for its children forever.
        atexit.register(self.shutdown)

    def serve(self, service: str, handler: ServiceHandler) -> None:
        self._services[service] = handler

    def waits(self) -> list[Wait]:
        return [wait for handle in self._handles for wait in handle.waits]

    def start(self, spec: WorkerSpec) -> LocalWorkerHandle:
        if self._closing:
            raise WorkersError("this launcher was shut down; make a new one")
        _check_importable(spec)
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        is_forked = self._forks and spec.python is None
        birth = messages.Birth(
            identity=spec.identity,
            worker_class=path_of(spec.worker_class),
            arguments=codec.pack(spec.arguments),
            record_modules=modules_of(spec.arguments),
            log_path=str(spec.log_path),
            pins_slots=self._pins_slots,
            is_forked=is_forked,
            dies_with_thread=is_forked or threading.current_thread() is threading.main_thread(),
            driver_pid=os.getpid(),
        )
        ours, theirs = self._context.Pipe(duplex=True)
        process: Any
        if spec.python is not None:
            process = InterpreterProcess(spec.python, theirs, spec.log_path, spec.environment)
        else:
            process = self._context.Process(target=child.main, args=(theirs,), daemon=False)
            with _environment(spec.environment):
                process.start()
        theirs.close()
        handle = LocalWorkerHandle(spec, process, ours)
        handle.send(Hello().encode())
        handle.send(messages.encode(birth))
        handle.watcher = threading.Thread(target=self._watch, args=(handle,), name=f"watch {handle.name}", daemon=True)
        handle.watcher.start()
        self._handles.append(handle)
        return handle

    def shutdown(self) -> None:
        atexit.unregister(self.shutdown)
        self._closing = True
        running = [handle for handle in self._handles if handle.process.is_alive()]
        for handle in running:
            handle.send(messages.encode(messages.Stop()))
        deadline = time.monotonic() + STOP_GRACE_S
        for handle in running:
            handle.process.join(max(0.0, deadline - time.monotonic()))
        for handle in self._handles:
            _kill(handle)  # also the children of a worker that is already gone
            handle.process.join()
            handle.fail(WorkersError(f"worker {handle.name} was shut down"))
            if threading.current_thread() is not handle.watcher:
                handle.watcher.join(timeout=5.0)

    # -- the threads that watch ------------------------------------------------------------------------------------

    def _watch(self, handle: LocalWorkerHandle) -> None:
        """Serves a worker until it ends."""
        try:
            while handle.end is None:
                limit_s = max(self._heartbeat_timeout_s, 0.0 if handle.is_ready else START_TIMEOUT_S)
                ready = wait_for_any([handle.connection, handle.process.sentinel], limit_s)
                self._read(handle)  # a process that failed says why before it ends
                if handle.process.sentinel in ready:
                    self._process_ended(handle)
                elif not ready:
                    _kill(handle)
                    doing = "silent" if handle.is_ready else "still starting"
                    self._declare_lost(handle, f"{doing} after {limit_s:.0f} s; killed")
        except Exception as error:
            self._declare_lost(handle, f"its watcher failed: {type(error).__name__}: {error}")
            raise

    def _read(self, handle: LocalWorkerHandle) -> None:
        """Takes what has come."""
        try:
            while handle.end is None and handle.connection.poll():
                received = handle.connection.recv_bytes()
                if handle.is_greeted:
                    self._dispatch(handle, messages.decode(received))
                else:
                    self._greet(handle, received)
        except (EOFError, OSError):
            self._process_ended(handle)

    def _greet(self, handle: LocalWorkerHandle, message: bytes) -> None:
        """Takes the worker's first message."""
        why = disagreement(Hello(), Hello.decode(message))
        if why is not None:
            self._declare_lost(handle, f"could not start: {why}")
        handle.is_greeted = True

    def _dispatch(self, handle: LocalWorkerHandle, message: messages.Message) -> None:
        if isinstance(message, messages.Beat):
            handle.waits, handle.is_ready = message.waits, True
        elif isinstance(message, messages.Request):
            self._serve_request(handle, message)
        elif isinstance(message, messages.Raised) and message.call_id < 0:
            refusal = message.message if message.error_type == SettingsRefused.__name__ else None
            self._declare_lost(handle, f"could not start: {message.error_type}: {message.message}", refusal)
        elif isinstance(message, (messages.Returned, messages.Raised)):
            handle.finish_call(message)

    def _serve_request(self, handle: LocalWorkerHandle, request: messages.Request) -> None:
        handler = self._services.get(request.service)
        if handler is None:
            known = sorted(self._services)
            return self._declare_lost(handle, f"asked for an unknown service {request.service!r}; there are {known}")

        def reply(value: Any) -> None:
            if request.call_id >= 0:
                handle.send(messages.encode(messages.Returned(request.call_id, codec.pack(value))))

        handler(handle.name, codec.unpack(request.payload), reply)

    def _process_ended(self, handle: LocalWorkerHandle) -> None:
        handle.process.join(timeout=1.0)
        self._declare_lost(handle, _describe_exit(handle.process.exitcode))

    def _declare_lost(self, handle: LocalWorkerHandle, cause: str, refusal: str | None = None) -> None:
        if handle.end is not None:
            return
        if self._closing:
            handle.fail(WorkersError(f"worker {handle.name} was shut down"))
            return
        error = WorkerLost(handle.name, socket.gethostname(), cause, str(handle.log_path), handle.log_tail(), refusal)
        handle.fail(error)
        try:
            self.lost.set_exception(error)
        except InvalidStateError:
            return  # another worker was lost before


def _check_importable(spec: WorkerSpec) -> None:
    name = spec.worker_class.__qualname__
    if "<locals>" in name:
        raise FlowDefinitionError(
            f"worker class {name} is defined inside a function; a spawned process cannot import it; define it at the "
            "top of a module"
        )
    if spec.python is not None and spec.worker_class.__module__ == "__main__":
        raise FlowDefinitionError(
            f"worker class {name} is defined in the program that was started, which the worker's own environment "
            f"({spec.python}) does not import; define it in a module"
        )


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for the processes started inside the block."""
    before = {name: os.environ[name] for name in values.keys() & os.environ.keys()}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed its connection without exiting"
    if exit_code < 0:
        known = {int(number): number.name for number in signal.Signals}
        return f"killed by {known.get(-exit_code, f'signal {-exit_code}')}"
    return f"exited with code {exit_code}"


def _kill(handle: LocalWorkerHandle) -> None:
    """Kills a worker and its process group, which it leads once it has begun; does nothing when nothing is left."""
    handle.process.kill()
    try:
        os.killpg(handle.process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
