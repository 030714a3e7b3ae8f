"""How a launcher serves a connected worker, on whatever machine: calls, requests, waits, its loss.

A launcher of the package inherits from ServingLauncher. Its `start` creates the process and passes it to `_adopt` with
the driver's end of its connection; everything after that is here.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import signal
import threading
import time
from concurrent.futures import Future, InvalidStateError
from multiprocessing.connection import wait as wait_for_any
from typing import Any, Protocol

from rlinf_algos import path_of
from rlinf_comm import DecodeError, PeerLost, modules_of, pack, unpack
from rlinf_comm.wire import FOREVER, Connection, disagreement, encode_hello, receive_hello
from rlinf_workers.errors import FlowDefinitionError, RemoteError, SettingsRefused, WorkerLost, WorkersError
from rlinf_workers.launchers import messages
from rlinf_workers.launchers.base import ServiceHandler, StageProgress, Wait, WorkerHandle, WorkerSpec
from rlinf_workers.launchers.interpreter import own_hello

_LOG = logging.getLogger(__name__)

LOG_TAIL_LINES = 20
STOP_GRACE_S = 3.0
WATCHER_END_S = 5.0
START_TIMEOUT_S = 600.0
"""Time limit for the imports and the constructor (which may load a model); heartbeats begin after them."""


class ServedProcess(Protocol):
    """The process of a worker, on whichever machine."""

    @property
    def host(self) -> str:
        """Name of its machine, for messages."""
        ...

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once the process has ended."""
        ...

    def is_alive(self) -> bool: ...

    def is_running(self) -> bool:
        """Whether its machine reports that it may run: not ended and not stopped. False if there is no report."""
        ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None:
        """Kills it and its process group; does nothing if nothing is left."""
        ...

    def describe_end(self) -> str:
        """How it ended, such as `exited with code 7`."""
        ...


class ServedWorker:
    """The driver's end of one worker."""

    def __init__(self, spec: WorkerSpec, process: ServedProcess, connection: Connection) -> None:
        self.name = spec.identity.name
        self.log_path = spec.log_path
        self.process = process
        self.connection = connection
        self.waits: list[Wait] = []
        self.progress: list[StageProgress] = []
        self.is_greeted = False
        self.is_ready = False
        self.was_silent = False
        """Whether it once missed its heartbeat while its process ran."""
        self.end: BaseException | None = None
        self.is_unwanted = False
        """It is killed on purpose."""
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
        self.send(messages.encode(messages.Call(call_id, lane, method, pack(args))))
        return future

    @property
    def is_lost(self) -> bool:
        return self.end is not None

    def send(self, message: bytes) -> None:
        """Sends; ignores a broken pipe, because the watcher sees the process end and fails pending calls."""
        with self._send_lock:
            try:
                self.connection.send_bytes(message)
            except PeerLost:
                pass

    def finish_call(self, message: messages.Returned | messages.CallFailed) -> None:
        with self._pending_lock:
            future = self._pending.pop(message.call_id, None)
        if future is None:
            return  # the launcher was shut down meanwhile and has failed it
        if isinstance(message, messages.CallFailed):
            future.set_exception(RemoteError(self.name, message.error_type, message.message, message.traceback))
            return
        try:
            result = unpack(message.payload)
        except DecodeError as error:
            text = f"worker {self.name} returned what cannot be decoded here: {error}"
            future.set_exception(WorkersError(f"{text}; do both run the same version of rlinf and of your own code?"))
        else:
            future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Fails every pending and future call with `error`."""
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


class ServingLauncher:
    """The common part of launchers: all except creating a process.

    Args:
        heartbeat_timeout_s: a worker that sends nothing for this long after its start counts as lost, unless its
            machine reports that the process may run. Heartbeats are sent once a second from a separate thread, which a
            long call of native code or a regular expression can block: such a worker computes, and the deadline of its
            step limits it. A stopped process, and one whose machine does not answer, is lost.
    """

    def __init__(self, *, heartbeat_timeout_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._workers: list[ServedWorker] = []
        self._services: dict[str, ServiceHandler] = {}
        self.lost: Future[None] = Future()
        self._closing = False
        # A driver that ends without shutdown() (an exception, Ctrl-C) would wait for its children forever.
        atexit.register(self.shutdown)

    def serve(self, service: str, handler: ServiceHandler) -> None:
        self._services[service] = handler

    def waits(self) -> list[Wait]:
        return [wait for worker in list(self._workers) for wait in worker.waits]

    def progress(self) -> list[StageProgress]:
        """The progress of running stages that the workers reported last."""
        return [one for worker in list(self._workers) for one in worker.progress]

    def forget_lost(self) -> None:
        self.lost = Future()
        for worker in [worker for worker in list(self._workers) if worker.is_lost]:
            self._bury(worker)

    def end(self, handle: WorkerHandle) -> None:
        assert isinstance(handle, ServedWorker), "the handle comes from this launcher's start()"
        handle.is_unwanted = True
        handle.process.kill()
        self._bury(handle)

    def _bury(self, worker: ServedWorker) -> None:
        worker.process.kill()  # also the children of a worker that is already gone
        worker.process.join()
        worker.watcher.join(timeout=WATCHER_END_S)
        if worker in self._workers:
            self._workers.remove(worker)

    def shutdown(self) -> None:
        self._closing = True
        running = [worker for worker in self._workers if worker.process.is_alive()]
        try:
            for worker in running:
                worker.send(messages.encode(messages.Stop()))
            deadline = time.monotonic() + STOP_GRACE_S
            for worker in running:
                worker.process.join(max(0.0, deadline - time.monotonic()))
        finally:  # a second Ctrl-C ends the waiting only
            for worker in self._workers:
                worker.process.kill()  # also the children of a worker that is already gone
            for worker in self._workers:
                worker.process.join()
                worker.fail(WorkersError(f"worker {worker.name} was shut down"))
                if threading.current_thread() is not worker.watcher:
                    worker.watcher.join(timeout=WATCHER_END_S)
        atexit.unregister(self.shutdown)

    # -- for those who make the process ----------------------------------------------------------------------------

    def _check(self, spec: WorkerSpec) -> None:
        """Raises: the errors of `start` that occur before anything is created."""
        if self._closing:
            raise WorkersError("this launcher was shut down; make a new one")
        if "<locals>" in (name := spec.worker_class.__qualname__):
            raise FlowDefinitionError(
                f"worker class {name} is defined inside a function; a spawned process cannot import it; define it at "
                "the top of a module"
            )

    def _adopt(
        self, spec: WorkerSpec, process: ServedProcess, connection: Connection, birth: messages.Birth
    ) -> ServedWorker:
        """Sends a new process its worker, and watches it from now on."""
        worker = ServedWorker(spec, process, connection)
        worker.send(encode_hello(own_hello("worker")))
        worker.send(messages.encode(birth))
        worker.watcher = threading.Thread(target=self._watch, args=(worker,), name=f"watch {worker.name}", daemon=True)
        worker.watcher.start()
        self._workers.append(worker)
        return worker

    # -- the threads that watch ------------------------------------------------------------------------------------

    def _watch(self, worker: ServedWorker) -> None:
        """Serves a worker until it ends."""
        try:
            while worker.end is None:
                limit_s = max(self._heartbeat_timeout_s, 0.0 if worker.is_ready else START_TIMEOUT_S)
                ready = wait_for_any([worker.connection.socket, worker.process.sentinel], limit_s)
                self._read(worker)  # a failing process sends its reason before it ends
                if worker.process.sentinel in ready:
                    self._process_ended(worker)
                elif not ready and worker.is_ready and worker.process.is_running():
                    self._report_silence(worker, limit_s)
                elif not ready:
                    worker.process.kill()
                    doing = "silent" if worker.is_ready else "still starting"
                    self._declare_lost(worker, f"{doing} after {limit_s:.0f} s; killed")
        except Exception as error:
            self._declare_lost(worker, f"its watcher failed: {type(error).__name__}: {error}")
            raise

    def _report_silence(self, worker: ServedWorker, silent_s: float) -> None:
        """Logs once that a worker computes without sending heartbeats."""
        if not worker.was_silent:
            worker.was_silent = True
            _LOG.warning(
                "worker %s has sent no heartbeat for %.0f s, but its process runs: one call holds the interpreter. "
                "The deadline of the step decides; `rlinf explain` shows the call",
                worker.name,
                silent_s,
            )

    def _read(self, worker: ServedWorker) -> None:
        """Handles the received messages."""
        try:
            while worker.end is None and worker.connection.poll():
                if worker.is_greeted:
                    self._dispatch(worker, messages.decode(worker.connection.receive_bytes()))
                else:
                    self._greet(worker)
        except PeerLost:
            self._process_ended(worker)

    def _greet(self, worker: ServedWorker) -> None:
        """Handles the worker's first message."""
        why = disagreement(own_hello("worker"), receive_hello(worker.connection, FOREVER))
        if why is not None:
            self._declare_lost(worker, f"could not start: {why}", raised_at_start=True)
        worker.is_greeted = True

    def _dispatch(self, worker: ServedWorker, message: messages.Message) -> None:
        if isinstance(message, messages.Beat):
            worker.waits, worker.progress, worker.is_ready = message.waits, message.progress, True
        elif isinstance(message, messages.Request):
            self._serve_request(worker, message)
        elif isinstance(message, messages.CallFailed) and message.call_id < 0:
            refusal = message.message if message.error_type == SettingsRefused.__name__ else None
            cause = f"could not start: {message.error_type}: {message.message}"
            self._declare_lost(worker, cause, refusal, raised_at_start=True)
        elif isinstance(message, (messages.Returned, messages.CallFailed)):
            worker.finish_call(message)

    def _serve_request(self, worker: ServedWorker, request: messages.Request) -> None:
        handler = self._services.get(request.service)
        if handler is None:
            names = sorted(self._services)
            return self._declare_lost(worker, f"asked for an unknown service {request.service!r}; there are {names}")

        def reply(value: Any) -> None:
            if request.call_id >= 0:
                worker.send(messages.encode(messages.Returned(request.call_id, pack(value))))

        handler(worker.name, unpack(request.payload), reply)

    def _process_ended(self, worker: ServedWorker) -> None:
        worker.process.join(timeout=1.0)
        self._declare_lost(worker, worker.process.describe_end())

    def _declare_lost(
        self, worker: ServedWorker, cause: str, refusal: str | None = None, *, raised_at_start: bool = False
    ) -> None:
        if worker.end is not None:
            return
        if self._closing or worker.is_unwanted:
            worker.fail(WorkersError(f"worker {worker.name} was shut down"))
            return
        host, log_path = worker.process.host, str(worker.log_path)
        tail = worker.log_tail()
        error = WorkerLost(worker.name, host, cause, log_path, tail, refusal, raised_at_start=raised_at_start)
        worker.fail(error)
        try:
            self.lost.set_exception(error)
        except InvalidStateError:
            return  # another worker was lost before


def birth_of(spec: WorkerSpec, **how: Any) -> messages.Birth:
    """The Birth message of a worker; `how` are the fields that only its launcher knows."""
    return messages.Birth(
        identity=spec.identity,
        worker_class=path_of(spec.worker_class),
        arguments=pack(spec.arguments),
        record_modules=modules_of(spec.arguments),
        **how,
    )


def check_outside_main(spec: WorkerSpec, where: str) -> None:
    """Raises: FlowDefinitionError for a class that is defined in the driver's main program."""
    if spec.worker_class.__module__ == "__main__":
        raise FlowDefinitionError(
            f"worker class {spec.worker_class.__qualname__} is defined in the program that was started, which {where} "
            "does not import; define it in a module (in a notebook, `%%writefile my_module.py` on top of its cell does)"
        )


def describe_exit(exit_code: int | None) -> str:
    """Describes an exit code; None: there is none yet."""
    if exit_code is None:
        return "closed its connection without exiting"
    if exit_code < 0:
        signal_names = {int(number): number.name for number in signal.Signals}
        return f"killed by {signal_names.get(-exit_code, f'signal {-exit_code}')}"
    return f"exited with code {exit_code}"
