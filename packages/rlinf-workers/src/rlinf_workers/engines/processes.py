"""Weight sync straight into the processes of an engine: the worker's side (the other is inside.py)."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import rlinf_comm
from rlinf_comm import PeerLost, PeerTimeout, WeightMismatchError, pack, unpack
from rlinf_comm.weights import Layout
from rlinf_comm.wire import Connection, Deadline, Hello, accept_handshake, send_hello
from rlinf_workers.engines.inside import (
    SERVICE,
    Attested,
    Command,
    CommandReply,
    HeldWeights,
    Registration,
    answer_s,
)
from rlinf_workers.engines.serving_layout import serving_layout
from rlinf_workers.errors import WeightSyncRefused, WorkersError
from rlinf_workers.leftovers import SweptFolder
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.weight_sync.base import Check, WeightPort


@dataclass(frozen=True, slots=True)
class _Process:
    connection: Connection
    pid: int
    name: str
    """For messages."""


class EngineProcesses:
    """The processes of one engine.

    Args:
        num_processes: tensor-parallel size of the engine.
        enter: makes each process of the engine call `inside.enter(ticket, ...)` while no request is in flight, drops
            what was computed with the old weights (KV and prefix caches), and returns when all have done so. Raises if
            one cannot.
        num_bytes: of the model's weights, as far as they are known before the processes have described theirs.
    """

    def __init__(self, num_processes: int, enter: Callable[[str], object], num_bytes: int = 0) -> None:
        self._num_processes, self._enter = num_processes, enter
        self._folder = SweptFolder("rlinf-engine-")
        self._address = str(self._folder.path / "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen(num_processes)
        self._numbers = itertools.count(1)
        self._calling = threading.Lock()
        self._answer_s = answer_s(num_bytes)
        self._processes = self._connect()
        self._adapter_scale: float | None = None

    def layout(self, model: ModelSettings) -> Layout:
        """The placement of the canonical tensors in the engine's own parameters; one rank per process.

        Raises: LayoutError naming parameters that do not fit the model.
        """
        held: list[HeldWeights] = self.call("describe")
        self._adapter_scale = None if model.adapter is None else model.adapter.scale
        self._answer_s = answer_s(max(one.num_bytes for one in held))
        return serving_layout(model, held)

    def open_receiver(self, ports: Sequence[WeightPort]) -> EngineReceiver:
        """Opens the receiving ends of an edge, one per process."""
        if len(ports) != self._num_processes:
            raise WorkersError(f"{len(ports)} ends of {ports[0].edge} for an engine of {self._num_processes} processes")
        self.call("open", each=ports)
        return EngineReceiver(self, ports[0].end, self._adapter_scale)

    def process_ids(self) -> list[int]:
        """Process ids, by rank; can be called from any thread."""
        return [process.pid for process in self._processes]

    def reserved_bytes(self) -> int:
        """The most GPU memory that torch has reserved in one of the processes, each of which has a GPU of its own."""
        return max(self.call("reserved_bytes"))

    def call(self, method: str, *arguments: Any, each: Sequence[Any] | None = None, waits: bool = False) -> list[Any]:
        """The replies of all processes, by rank.

        Args:
            each: the last argument, a different one for each process.
            waits: the command runs only while the engine is idle.

        Raises: an exception about weights, if a process raised one; WorkersError for others and for a dead process.
        """
        with self._calling:
            number = next(self._numbers)
            for rank, process in enumerate(self._processes):
                own = () if each is None else (each[rank],)
                command = Command(number=number, method=method, arguments=(*arguments, *own), waits=waits)
                self._send(process, command)
            if waits:
                self._enter(f"{number} {self._address}")
            answers = [self._answer(process, number, f"{method} {arguments}") for process in self._processes]
        _raise_first(self._processes, answers)
        return [answer.value for answer in answers]

    def close(self) -> None:
        for process in self._processes:
            process.connection.close()
        self._listener.close()
        self._folder.close()

    def _connect(self) -> tuple[_Process, ...]:
        self._enter(f"0 {self._address}")
        processes: dict[int, _Process] = {}
        deadline, own = Deadline(self._answer_s), Hello(service=SERVICE)
        while len(processes) < self._num_processes:
            try:
                connection = Connection.accept_local(self._listener, "a process of the engine", deadline)
                registration: Registration = unpack(accept_handshake(connection, own, deadline).details)
            except PeerTimeout as error:
                raise WorkersError(
                    f"only {len(processes)} of the engine's {self._num_processes} processes have called the weight "
                    "loader, although the engine reported success"
                ) from error
            send_hello(connection, own, deadline)
            who = f"engine process {registration.rank} (pid {registration.pid})"
            processes[registration.rank] = _Process(connection, registration.pid, who)
        return tuple(processes[rank] for rank in range(self._num_processes))

    def _send(self, process: _Process, command: Command) -> None:
        try:
            process.connection.send_bytes(pack(command))
        except PeerLost as error:
            raise WorkersError(f"{process.name} has died") from error

    def _answer(self, process: _Process, number: int, what: str) -> CommandReply:
        while True:
            if not process.connection.poll(self._answer_s):
                raise WorkersError(f"{process.name} has not answered within {self._answer_s:.0f} s: {what}")
            try:
                answer: CommandReply = unpack(process.connection.receive_bytes())
            except PeerLost as error:
                raise WorkersError(f"{process.name} has died") from error
            if answer.number == number:  # earlier replies belong to abandoned commands
                return answer


class EngineReceiver:
    """A WeightReceiver for weights in the processes of an engine.

    Args:
        end: the `WeightPort.end` that they have opened.
        adapter_scale: the factor by which they must multiply what adapted layers add.
    """

    def __init__(self, processes: EngineProcesses, end: str, adapter_scale: float | None) -> None:
        self._processes, self._end, self._adapter_scale = processes, end, adapter_scale

    def receive(self, tensors: Mapping[str, Tensor], policy_version: int, timeout_s: float = 60.0) -> Check:
        """Fills the engine's parameters. `tensors` are the worker's and must be empty."""
        assert not tensors, f"{self._end}: an engine with its own processes has no weights in the worker"
        self._processes.call("fill", self._end, policy_version, timeout_s, waits=True)

        def check() -> None:
            answers: list[Attested] = self._processes.call("check", self._end, policy_version, self._adapter_scale)
            versions = [answer.policy_version for answer in answers]
            if versions != [policy_version] * len(versions):
                raise WeightMismatchError(
                    f"{self._end}: the engine's processes serve versions {versions}, not {policy_version}",
                    expected_version=policy_version,
                )

        return check


def _raise_first(processes: Sequence[_Process], answers: Sequence[CommandReply]) -> None:
    """Raises the errors of all processes in one message."""
    failed = [(process, answer) for process, answer in zip(processes, answers, strict=True) if answer.error_type]
    if not failed:
        return
    first = failed[0][1]
    text = "; ".join(f"{process.name}: {answer.text}" for process, answer in failed)
    if first.error_type == WeightSyncRefused.__name__:
        raise WeightSyncRefused(text)
    error_class = getattr(rlinf_comm, first.error_type, None)
    if error_class is not None and issubclass(error_class, WeightMismatchError):
        raise error_class(text, tensors=tuple(sorted({name for _, answer in failed for name in answer.tensors})))
    if error_class is not None and issubclass(error_class, ValueError):  # LayoutError
        raise error_class(text)
    raise WorkersError(f"{first.error_type} in {text}")
