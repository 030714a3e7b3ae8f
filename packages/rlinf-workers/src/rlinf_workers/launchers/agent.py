"""The agent of a node: starts the worker processes there and reports to the driver how they end.

The cluster's manager (such as ray.py) starts one agent on each node. The agent connects to the driver, which listens,
and keeps this connection for control messages. For each worker it opens one more connection and passes it to the
process, so that calls go from the driver to the worker directly. The agent ends with the driver, and its workers end
with it: the kernel kills them (child.py), because the agent's main thread started them.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path

from rlinf_comm import PeerLost
from rlinf_comm.wire import Connection, Deadline, Refused, introduce, this_host
from rlinf_workers.addresses import ADDRESS_VARIABLE
from rlinf_workers.compiled_code import keep_compiled_code_private
from rlinf_workers.errors import InterpreterRefused
from rlinf_workers.explaining.processes import is_running
from rlinf_workers.launchers import agent_messages as messages
from rlinf_workers.launchers.interpreter import own_hello
from rlinf_workers.launchers.interpreter_process import InterpreterProcess, kill_with_group
from rlinf_workers.leftovers import SweptFolder

CALL_TIMEOUT_S = 120.0
"""Time limit for connecting to the driver."""
LOG_PERIOD_S = 0.25
"""Interval between reads of the logs that are sent to the driver."""
LOG_PIECE_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    """What an agent must know before it can connect to the driver."""

    node: int
    """Its number in the cluster."""
    endpoint: tuple[str, int]
    """The address at which the driver listens."""
    key: bytes
    """The shared secret of the handshake."""
    path: Sequence[str]
    """The driver's `sys.path`."""
    folder: str
    """The driver's current folder."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Variables of the driver that workers on every node have."""


@dataclass(slots=True)
class _Worker:
    number: int
    process: InterpreterProcess
    log: Path
    sent_bytes: int | None
    """Bytes of its log already sent; None: the driver can read the file itself."""


class Agent:
    """Serves one driver, in the main thread of its process.

    Args:
        gpus: names of the GPUs in this node's share, as CUDA_VISIBLE_DEVICES takes them.
    """

    def __init__(self, settings: AgentSettings, gpus: Sequence[str]) -> None:
        assert threading.current_thread() is threading.main_thread(), "workers die with the thread that starts them"
        self._settings = settings
        self._gpus = list(gpus)
        self._workers: dict[int, _Worker] = {}
        self._own_logs = SweptFolder("rlinf-logs-")
        self._be_like_the_driver()

    def run(self) -> None:
        """Returns after the driver has disconnected and everything is cleaned up."""
        keep_compiled_code_private()
        arrival = messages.AgentArrival(self._settings.node, socket.gethostname(), this_host(), self._gpus)
        self._control = self._call_driver(arrival)
        try:
            while True:
                workers = list(self._workers.values())
                sends = any(worker.sent_bytes is not None for worker in workers)
                sentinels = [worker.process.sentinel for worker in workers]
                ready = wait_for_any([self._control.socket, *sentinels], LOG_PERIOD_S if sends else None)
                for worker in workers:
                    self._send_log(worker)
                    if worker.process.sentinel in ready:
                        self._ended(worker)
                if self._control.socket in ready:
                    self._obey(messages.decode_order(self._control.receive_bytes()))
        except PeerLost:
            return  # the driver has disconnected or ended
        finally:
            for worker in self._workers.values():
                kill_with_group(worker.process)
                worker.process.join()
            self._own_logs.close()

    def _be_like_the_driver(self) -> None:
        """Uses the driver's module search path and current folder, as far as the folders exist here; after them, what
        the cluster's own mechanisms provide."""
        drivers = [folder for folder in self._settings.path if os.path.exists(folder)]
        sys.path[:] = [*drivers, *(entry for entry in sys.path if entry not in drivers)]
        if os.path.isdir(self._settings.folder):
            os.chdir(self._settings.folder)

    def _obey(self, order: messages.Order) -> None:
        if isinstance(order, messages.StartWorker):
            try:
                self._start(order)
            except (InterpreterRefused, Refused) as error:
                self._control.send_bytes(messages.encode(messages.StartRefused(order.number, str(error))))
        elif isinstance(order, messages.LookAtWorker):
            worker = self._workers.get(order.number)
            runs = worker is not None and is_running(worker.process.pid)
            self._control.send_bytes(messages.encode(messages.ProcessStatus(order.number, runs)))
        elif order.number in self._workers:
            kill_with_group(self._workers[order.number].process)

    def _start(self, order: messages.StartWorker) -> None:
        is_shared = _can_read(Path(order.log_path).with_name(order.token), order.token)
        log = Path(order.log_path) if is_shared else self._own_logs.path / f"{order.number}.log"
        own = {} if order.python else {name: os.environ[name] for name in ("VIRTUAL_ENV",) if name in os.environ}
        own |= {} if order.python else {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        connection = self._call_driver(messages.WorkerArrival(order.number)).without_tags()
        own[ADDRESS_VARIABLE] = connection.socket.getsockname()[0]  # from which it was made
        with connection:
            env_vars = self._settings.env_vars | own | order.env_vars
            process = InterpreterProcess(order.python or sys.executable, connection, log, env_vars)
        self._workers[order.number] = _Worker(order.number, process, log, None if is_shared else 0)
        self._control.send_bytes(messages.encode(messages.Started(order.number, os.getpid(), str(log))))

    def _call_driver(self, arrival: messages.AgentArrival | messages.WorkerArrival) -> Connection:
        deadline = Deadline(CALL_TIMEOUT_S)
        connection = Connection.open(self._settings.endpoint, self._settings.key, "the driver", deadline)
        introduce(connection, own_hello("launcher", messages.encode(messages.CallerRole(arrival))), deadline)
        return connection

    def _send_log(self, worker: _Worker) -> None:
        if worker.sent_bytes is None:
            return
        with worker.log.open("rb") as log:
            log.seek(worker.sent_bytes)
            while data := log.read(LOG_PIECE_BYTES):
                worker.sent_bytes += len(data)
                self._control.send_bytes(messages.encode(messages.LogBytes(worker.number, data)))

    def _ended(self, worker: _Worker) -> None:
        worker.process.join()
        self._send_log(worker)
        exit_code = worker.process.exitcode
        assert exit_code is not None, "its sentinel is readable"
        kill_with_group(worker.process)  # what its process group has left behind
        del self._workers[worker.number]
        self._control.send_bytes(messages.encode(messages.Ended(worker.number, exit_code)))


def _can_read(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False
