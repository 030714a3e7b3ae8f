"""The driver's side of a cluster: one agent per node starts the workers there, and they connect to the driver.

The cluster's manager (Ray, in ray.py) only has to run an Agent on each node. Everything else is here: the driver
listens, agents and workers connect with the job's secret, and from then on a remote worker is served like a local one
(served.py).
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import secrets
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rlinf_comm import DecodeError, PeerLost
from rlinf_comm.wire import (
    FILE_VARIABLE,
    SECRET_VARIABLE,
    Connection,
    Deadline,
    Listener,
    accept_handshake,
    job_secret,
    key_for,
    refusing,
    send_hello,
)
from rlinf_workers import compiled_code
from rlinf_workers.addresses import ADDRESS_VARIABLE
from rlinf_workers.errors import InterpreterRefused, WorkersError
from rlinf_workers.launchers import agent_messages as messages
from rlinf_workers.launchers.agent import AgentSettings
from rlinf_workers.launchers.base import WorkerSpec
from rlinf_workers.launchers.credentials import without_credentials
from rlinf_workers.launchers.interpreter import own_hello
from rlinf_workers.launchers.served import ServedWorker, ServingLauncher, birth_of, check_outside_main, describe_exit

_LOG = logging.getLogger(__name__)

ARRIVAL_TIMEOUT_S = 120.0
"""Time limit for a caller's first message, and for an agent to start a process: seconds even on a very busy machine."""
LOOK_TIMEOUT_S = 10.0
"""Time limit for the agent to report whether a silent process runs."""
KILL_TIMEOUT_S = 10.0
"""Time limit for the agent to report the end of a process it was told to kill."""
FORWARDED = (
    *("RLINF_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "MKL_"),
    *("SGLANG_", "VLLM_", "MUJOCO_", "PYOPENGL_", "LIBERO_", "MS_", "PYTHONHASHSEED", "PYTHONUNBUFFERED"),
)
"""Env vars of the driver that workers on every node get: settings of libraries, none that is specific to a machine."""


class RemoteProcess:
    """A process of another node, as reported by its agent."""

    def __init__(self, number: int, agent: AgentHandle, log_path: Path) -> None:
        self.number = number
        self.host = agent.arrival.hostname
        self.connected: Future[Connection] = Future()
        """The driver's end of its connection, once the process has connected."""
        self.started: Future[messages.Started] = Future()
        self.seen: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Replies of its agent about whether it runs."""
        self.sentinel, self._alive = os.pipe()
        weakref.finalize(self, os.close, self.sentinel)
        self._agent = agent
        self._log_path = log_path
        self._end: str | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def is_running(self) -> bool:
        """As reported by its agent; False if there is no reply in time."""
        while not self.seen.empty():  # late replies to earlier requests
            self.seen.get()
        self._agent.send(messages.LookAtWorker(self.number))
        try:
            return self.seen.get(timeout=LOOK_TIMEOUT_S)
        except queue.Empty:
            return False

    def join(self, timeout: float | None = None) -> None:
        """Without a timeout, waits at most as long as a killed process needs to end."""
        self._ended.wait(KILL_TIMEOUT_S if timeout is None else timeout)

    def kill(self) -> None:
        self._agent.send(messages.KillWorker(self.number))

    def describe_end(self) -> str:
        return self._end or describe_exit(None)

    def add_to_log(self, data: bytes) -> None:
        with self._log_path.open("ab") as log:
            log.write(data)

    def ends(self, how: str) -> None:
        """Records how it ended; only the first report counts."""
        with self._lock:
            if self._ended.is_set():
                return
            self._end = how
            self._ended.set()
            os.close(self._alive)


class AgentHandle:
    """The driver's end of one agent, with a thread that receives its reports."""

    def __init__(self, arrival: messages.AgentArrival, control: Connection) -> None:
        self.arrival = arrival
        self._control = control
        self._processes: dict[int, RemoteProcess] = {}
        self._lock = threading.Lock()
        self._is_gone = False
        self._hearing = threading.Thread(target=self._hear, name=f"agent of node {arrival.node}", daemon=True)
        self._hearing.start()

    @property
    def place(self) -> str:
        return f"node {self.arrival.node} ({self.arrival.hostname})"

    def start(self, process: RemoteProcess, order: messages.StartWorker) -> None:
        with self._lock:
            if self._is_gone:
                raise WorkersError(f"{self.place} was lost")
            self._processes[process.number] = process
        self.send(order)

    def send(self, order: messages.Order) -> None:
        """Ignores a broken connection; the receiving thread handles it."""
        with self._lock:
            try:
                self._control.send_bytes(messages.encode(order))
            except PeerLost:
                pass

    def hang_up(self) -> None:
        """Ends the agent and the rest of its workers."""
        with self._lock:
            self._is_gone = True
            self._control.hang_up()  # wakes the thread, too
        self._hearing.join(timeout=5.0)

    def _hear(self) -> None:
        try:
            while (report := self._next_report()) is not None:
                self._take(messages.decode_report(report))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _LOG.warning("the agent of %s sent a malformed message and is dropped: %s", self.place, error)
        finally:
            with self._lock:
                self._is_gone = True
                self._control.close()
                left, self._processes = self._processes, {}
            for process in left.values():
                process.ends(f"{self.place} was lost")
                if not process.started.done():
                    process.started.set_exception(WorkersError(f"{self.place} was lost"))

    def _next_report(self) -> bytes | None:
        """None: the agent is gone."""
        try:
            return self._control.receive_bytes()
        except PeerLost:
            return None

    def _take(self, report: messages.Report) -> None:
        process = self._processes.get(report.number)
        if process is None:
            return
        if isinstance(report, messages.Started):
            return process.started.set_result(report)
        if isinstance(report, messages.ProcessStatus):
            return process.seen.put(report.is_running)
        if isinstance(report, messages.LogBytes):
            return process.add_to_log(report.data)
        with self._lock:
            del self._processes[report.number]
        if isinstance(report, messages.Ended):
            process.ends(describe_exit(report.exit_code))
        else:
            process.ends(report.why)
            process.started.set_exception(InterpreterRefused(report.why))


class AgentLauncher(ServingLauncher):
    """A launcher whose workers are started by agents. A subclass starts the agents, with `_settings_of` and
    `_arrival_of`.

    Args:
        listen_at: the address at which the nodes reach the driver; it listens only there.
        heartbeat_timeout_s: see ServingLauncher.
        pins_slots: as in LocalLauncher.
    """

    def __init__(self, *, listen_at: str, heartbeat_timeout_s: float, pins_slots: bool) -> None:
        super().__init__(heartbeat_timeout_s=heartbeat_timeout_s)
        self._pins_slots = pins_slots
        self._numbers = itertools.count()
        self._agents: dict[int, Future[AgentHandle]] = {}
        self._starting: dict[int, RemoteProcess] = {}
        _settle_secret()
        os.environ[ADDRESS_VARIABLE] = listen_at
        self._key = key_for("launcher", secrets.token_bytes(16))
        self._listen_at = listen_at
        self._listener = Listener((listen_at, 0), self._key, self._let_in, "the launcher")
        self._listener.start()

    def start(self, spec: WorkerSpec) -> ServedWorker:
        self._check(spec)
        check_outside_main(spec, "an agent")
        agent = self._agents[spec.node].result()
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        process = RemoteProcess(next(self._numbers), agent, spec.log_path)
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(agent.arrival.gpus[index] for index in spec.gpus)}
        self._starting[process.number] = process
        try:
            with _token(spec.log_path.parent) as token:
                order = messages.StartWorker(
                    number=process.number,
                    name=spec.identity.name,
                    python=spec.python,
                    env_vars=spec.env_vars | (gpus if spec.gpus else {}),
                    log_path=str(spec.log_path),
                    token=token,
                )
                agent.start(process, order)
                started = process.started.result(ARRIVAL_TIMEOUT_S)
                connection = process.connected.result(ARRIVAL_TIMEOUT_S)
        finally:
            del self._starting[process.number]
        birth = birth_of(
            spec,
            log_path=started.log_path,
            pins_slots=self._pins_slots,
            is_forked=False,
            dies_with_thread=True,
            driver_pid=started.agent_pid,
        )
        return self._adopt(spec, process, connection, birth)

    def shutdown(self) -> None:
        super().shutdown()
        self._listener.close()
        for arrived in self._agents.values():
            if arrived.done() and not arrived.exception():
                arrived.result().hang_up()

    # -- for those who place agents --------------------------------------------------------------------------------

    def _settings_of(self, node: int) -> AgentSettings:
        """The settings with which the agent of that node is started."""
        forwarded = {n: value for n, value in without_credentials(os.environ).items() if n.startswith(FORWARDED)}
        forwarded.pop(compiled_code.VARIABLE, None)  # a folder of this machine
        self._arrival_of(node)  # from now on it may connect
        return AgentSettings(
            node=node,
            endpoint=(self._listen_at, self._listener.port),
            key=self._key,
            path=[os.path.abspath(entry) for entry in sys.path],
            folder=os.getcwd(),
            env_vars=forwarded | {SECRET_VARIABLE: job_secret().decode()},
        )

    def _arrival_of(self, node: int) -> Future[AgentHandle]:
        """The agent of that node, once it has connected."""
        return self._agents.setdefault(node, Future())

    def _let_in(self, connection: Connection) -> None:
        deadline, own = Deadline(ARRIVAL_TIMEOUT_S), own_hello("launcher")
        try:
            arrival = messages.decode_arrival(accept_handshake(connection, own, deadline).details).of
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DecodeError(f"{connection.who} sent a malformed first message: {error}") from error
        if isinstance(arrival, messages.AgentArrival):
            agent = self._agents.get(arrival.node)
            if agent is not None and not agent.done():
                send_hello(connection, own, deadline)
                return agent.set_result(AgentHandle(arrival, connection))
        elif (process := self._starting.get(arrival.number)) is not None and not process.connected.done():
            send_hello(connection, own, deadline)
            return process.connected.set_result(connection.without_tags())
        send_hello(connection, refusing(own, "it is not expected (any more), or connected twice"), deadline)
        connection.shut()


def _settle_secret() -> None:
    """Sets the job's secret here, before any code creates one that is only valid on this machine: every agent gets it,
    so that peers of the job may listen to other machines."""
    if not os.environ.get(SECRET_VARIABLE) and not os.environ.get(FILE_VARIABLE):
        os.environ[SECRET_VARIABLE] = secrets.token_hex(32)


@contextmanager
def _token(folder: Path) -> Iterator[str]:
    """Creates a file in a folder with a random name and content: whoever can read it shares the folder."""
    token = f".rlinf-{secrets.token_hex(16)}"
    (folder / token).write_text(token)
    try:
        yield token
    finally:
        (folder / token).unlink()
