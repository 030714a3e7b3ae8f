"""The code of a local worker process: receive calls, run them on their lanes, send results and heartbeats."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import operator
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rlinf_comm import DecodeError, PeerLost, pack, unpack
from rlinf_comm.wire import FOREVER, Connection, accept_handshake, send_hello
from rlinf_workers.cores import pin
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers import messages
from rlinf_workers.launchers.interpreter import own_hello
from rlinf_workers.launchers.messages import Birth
from rlinf_workers.log_level import set_up_logging

BEAT_S = 1.0
_PR_SET_PDEATHSIG = 1


def main(connection: Connection) -> None:
    """Entry point of a process started by multiprocessing; leaves only through os._exit or the interpreter's normal
    end."""
    birth = _meet(connection)
    _die_with_driver(birth)
    _redirect_output(birth.log_path)
    set_up_logging("info")
    if birth.is_forked:
        np.random.seed()
    Process(connection, birth).run()


def main_of_interpreter(descriptor: int) -> None:
    """Entry point of a process started by InterpreterProcess, with the descriptor of its connection."""
    main(Connection.inherited(descriptor))


def _meet(connection: Connection) -> Birth:
    """Receives the worker to become; ends the process if it does not speak the driver's protocols."""
    own = own_hello("worker")
    try:
        accept_handshake(connection, own, FOREVER)
        send_hello(connection, own, FOREVER)
        return messages.decode_birth(connection.receive_bytes())
    except PeerLost:
        os._exit(1)  # the driver is gone
    except DecodeError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None


class Process:
    """The worker process: a thread that receives, one that sends heartbeats, and one per lane; lane 0 is the main
    thread."""

    def __init__(self, connection: Connection, birth: Birth) -> None:
        self._connection = connection
        self._birth = birth
        self._send_lock = threading.Lock()
        self._lanes: dict[int, queue.SimpleQueue[messages.Call | None]] = {0: queue.SimpleQueue()}
        self._requests: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._receiver = threading.Thread(target=self._receive, name="receive", daemon=True)
        self._is_made = threading.Event()
        """Whether the worker has been constructed."""

    def run(self) -> None:
        birth, identity = self._birth, self._birth.identity
        print(f"worker {identity.name}, process {os.getpid()}, devices {', '.join(identity.devices) or 'none'}")
        try:
            module_name, _, qualified_name = birth.worker_class.partition(":")
            worker_class = operator.attrgetter(qualified_name)(importlib.import_module(module_name))
            for name in birth.record_modules:
                importlib.import_module(name)
            self._host = WorkerHost(identity, self.request)
            self._host.make(worker_class, *unpack(birth.arguments))
        except BaseException as error:
            self._send(_raised(-1, error))
            raise SystemExit(1) from error
        if birth.pins_slots:
            _keep_to_slots(identity.devices)
        # Objects from imports and the constructor are frozen, so that the garbage collector does not traverse them
        # again for every few thousand records.
        gc.collect()
        gc.freeze()
        self._is_made.set()
        if self._receiver.ident is None:
            self._receiver.start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        self._serve_lane(0)
        self._host.worker.close()

    def request(self, service: str, value: Any, *, wants_reply: bool = True) -> Future[Any]:
        """Sends a request to a service of the driver; see RequestSender in base.py."""
        future: Future[Any] = Future()
        call_id = next(self._call_ids) if wants_reply else -1
        if wants_reply:
            self._requests[call_id] = future
            if self._receiver.ident is None:  # called in the constructor
                self._receiver.start()
        self._send(messages.Request(call_id, service, pack(value)))
        return future

    def _receive(self) -> None:
        while True:
            try:
                message = messages.decode(self._connection.receive_bytes())
            except PeerLost:
                os._exit(1)  # the driver is gone; nothing here is worth saving
            if isinstance(message, messages.Call):
                self._lane(message.lane).put(message)
            elif isinstance(message, messages.Returned):
                self._requests.pop(message.call_id).set_result(unpack(message.payload))
            else:
                self._lanes[0].put(None)

    def _lane(self, lane: int) -> queue.SimpleQueue[messages.Call | None]:
        if lane not in self._lanes:
            self._lanes[lane] = queue.SimpleQueue()
            threading.Thread(target=self._serve_lane, args=(lane,), name=f"lane {lane}", daemon=True).start()
        return self._lanes[lane]

    def _serve_lane(self, lane: int) -> None:
        self._is_made.wait()
        calls = self._lanes[lane]
        while (call := calls.get()) is not None:
            self._send(self._run(call))

    def _run(self, call: messages.Call) -> messages.Returned | messages.CallFailed:
        try:
            result = self._host.call(call.method, *unpack(call.payload))
            return messages.Returned(call.call_id, pack(result))
        except BaseException as error:  # noqa: BLE001 - re-raised by the caller in the driver
            return _raised(call.call_id, error)

    def _beat(self) -> None:
        while True:
            self._send(messages.Beat(self._host.current_waits(), self._host.current_progress()))
            time.sleep(BEAT_S)

    def _send(self, message: messages.Message) -> None:
        with self._send_lock:
            try:
                self._connection.send_bytes(messages.encode(message))
            except PeerLost:
                os._exit(1)


def _raised(call_id: int, error: BaseException) -> messages.CallFailed:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    print(text, file=sys.stderr, flush=True)
    return messages.CallFailed(call_id, type(error).__name__, str(error), text)


def _die_with_driver(birth: Birth) -> None:
    """Starts a new session (the terminal's Ctrl-C is for the driver), and asks the kernel for SIGKILL when the driver
    dies.

    A worker started by a thread other than the main one ends when its connection closes (see Process._receive).
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork server may ignore it
    if sys.platform == "linux" and birth.dies_with_thread:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if _is_orphan(birth):  # the driver died before the line above
        os._exit(1)


def _is_orphan(birth: Birth) -> bool:
    if not birth.is_forked:
        return os.getppid() != birth.driver_pid
    driver = multiprocessing.parent_process()
    return driver is None or not driver.is_alive()


def _keep_to_slots(devices: Sequence[str]) -> None:
    """Called after all imports: until then any free core helps. New threads of the main thread inherit the affinity."""
    num_threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    if cores := cores_of_slots(devices, sorted(os.sched_getaffinity(0)), num_threads):
        pin(cores)


def cores_of_slots(devices: Sequence[str], cores: Sequence[int], num_threads: int) -> set[int]:
    """The cores of the CPU slots among a worker's devices, `num_threads` each.

    Args:
        cores: the driver's allowed cores, ascending. Slots beyond the last core wrap around.
    """
    slots = [int(index) for kind, _, index in (name.partition(":") for name in devices) if kind == "cpu"]
    return {cores[(slot * num_threads + i) % len(cores)] for slot in slots for i in range(num_threads)}


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
