"""Weight sync straight into the processes of an engine: the code that runs in each of these processes.

    worker          EngineProcesses (processes.py)     sends commands: describe, open, fill, check, ...
    engine process  Inside                             replies, over a Unix socket of the worker

The engine only has to call `enter(ticket, model, ...)` in each of its processes, between two batches. Weights are
filled there, while the engine is idle; read-only commands run in a thread at once. Each reply has the number of its
command.

The weights come through the run's weight sync, whatever its kind: the process opens the receiving end itself and fills
the engine's own parameters, so no tensor is gathered, copied whole or pickled.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlinf_comm import LayoutError, PeerLost, WeightMismatchError, pack, record, unpack
from rlinf_comm.weights import BufferSpec, specs_of, tensor_digests
from rlinf_comm.wire import FOREVER, Connection, Deadline, Hello, receive_hello, send_hello
from rlinf_workers.engines.adapted_layers import layers_with_other_scale
from rlinf_workers.models.placement import HostPlaces
from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.weight_sync.base import Check, WeightPort, WeightReceiver

SERVICE = "engine"
"""The worker's name in its handshake."""
BASE_S = 60.0
"""Time limit for what arrives at once on an idle machine: when `enter` returns, all processes have run the command, and
a command is sent before the engine calls `enter`. The death of a process is noticed at once."""
READ_BYTES_PER_S = 100e6
"""A check reads all served weights; a busy core has been seen to read them ten times as fast."""


def answer_s(num_bytes: int) -> float:
    """Seconds after which a process with as many bytes of weights does not answer any more."""
    return BASE_S + num_bytes / READ_BYTES_PER_S


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """What a process sends with its handshake."""

    rank: int
    """Tensor-parallel rank of the engine's process."""
    pid: int


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of the worker to one process."""

    number: int
    """Counts a worker's commands from 1; the reply has the same number."""
    method: str
    """A method of `Inside`: describe, open, fill, check, save_weights, restore_weights, remember,
    check_remembered, reserved_bytes."""
    arguments: tuple[Any, ...]
    waits: bool
    """Whether it runs only while the engine is in `enter`."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class CommandReply:
    """The reply to a command."""

    number: int
    value: Any = None
    error_type: str = ""
    """Name of the exception's class; empty on success."""
    text: str = ""
    tensors: tuple[str, ...] = ()
    """Canonical names of the tensors that an error names."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class HeldWeights:
    """The parameters of the model in one process."""

    buffers: dict[str, BufferSpec]
    """Parameters by name."""
    sizes: dict[str, int]
    """How the engine shards the model: `tp` and, with experts, `ep` and `expert_tp`, with a vision tower `tower_tp`,
    `tower_width` and `positions_tp`, of rlinf_comm.weights.layouts.merged."""

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_elements * getattr(torch, spec.dtype).itemsize for spec in self.buffers.values())


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Attested:
    """The verified weights of a process."""

    policy_version: int
    num_tensors: int
    """Number of compared parameters."""


class Model(Protocol):
    """The methods of a torch module that this file uses."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]: ...

    def named_modules(self) -> Iterator[tuple[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class RenamedModel:
    """A module with its parameters under the names of rlinf_comm.weights.layouts.merged."""

    module: nn.Module
    rename: Callable[[str], str]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            yield self.rename(name), parameter

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_modules()


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """This process's end of an edge."""

    receiver: WeightReceiver
    parameters: frozenset[str]
    """Those that it fills."""
    is_frozen: bool
    """Whether it fills them only once."""
    padded: tuple[str, ...]
    """Those of them with numbers that belong to no tensor of the model."""


@dataclass
class _Filled:
    """Weights that were filled and not checked yet."""

    policy_version: int
    addresses: dict[str, int]
    """Parameter -> its address."""
    check: Check | None
    """None: the weight sync has already checked them."""


@dataclass
class Inside:
    """The worker's counterpart in one process of an engine."""

    connection: Connection
    model: Model
    sizes: dict[str, int]
    command_s: float = BASE_S
    """Time within which a command arrives for which the engine has called `enter`."""
    _waiting: queue.SimpleQueue[Command] = field(default_factory=queue.SimpleQueue)
    _sending: threading.Lock = field(default_factory=threading.Lock)
    _entered: int = 0
    """The number of the last command that ran in `enter`."""
    _ends: dict[str, _End] = field(default_factory=dict)
    """By `WeightPort.end`."""
    _filled: dict[str, _Filled] = field(default_factory=dict)
    _frozen: dict[str, int] = field(default_factory=dict)
    """Frozen parameter that was checked -> its address."""
    _host: HostPlaces = field(default_factory=HostPlaces)
    _remembered: dict[str, int] = field(default_factory=dict)
    """Parameter -> its digest when `remember` was called."""

    @classmethod
    def connect(cls, address: str, model: Model, *, rank: int, sizes: Mapping[str, int]) -> Inside:
        """Registers with the worker, then listens to it."""
        num_bytes = sum(parameter.nbytes for _, parameter in model.named_parameters())
        deadline = Deadline(answer_s(num_bytes))
        connection = Connection.open_local(address, "the engine's worker", deadline)
        registration = pack(Registration(rank=rank, pid=os.getpid()))
        send_hello(connection, Hello(service=SERVICE, details=registration), deadline)
        inside = cls(connection, model, dict(sizes), answer_s(num_bytes))
        threading.Thread(target=inside._listen, name="rlinf-weights", daemon=True).start()
        return inside

    def enter(self, number: int) -> None:
        """Runs the waiting command with that number. The model is not in use meanwhile."""
        if number <= self._entered:  # such as a draft model, which the engine passes after the model itself
            return
        self._entered = number
        while True:
            command = self._waiting.get(timeout=self.command_s)
            if command.number == number:
                break  # the worker abandoned an earlier command
        self._do(command)

    def _listen(self) -> None:
        try:
            receive_hello(self.connection, FOREVER)  # the worker sends it once all processes have connected
            while True:
                command = unpack(self.connection.receive_bytes())
                if command.waits:
                    self._waiting.put(command)
                else:
                    self._do(command)
        except PeerLost:  # the worker has ended, and the engine ends with it
            return

    def _do(self, command: Command) -> None:
        try:
            answer = CommandReply(number=command.number, value=getattr(self, command.method)(*command.arguments))
        except Exception as error:  # noqa: BLE001 - re-raised by the worker
            traceback.print_exc()
            tensors = error.tensors if isinstance(error, WeightMismatchError) else ()
            answer = CommandReply(
                number=command.number, error_type=type(error).__name__, text=str(error), tensors=tensors
            )
        self._send(answer)

    def _send(self, message: Any) -> None:
        with self._sending:
            self.connection.send_bytes(pack(message))

    # -- commands --------------------------------------------------------------------------------------------------

    def describe(self) -> HeldWeights:
        """The parameters as the engine created them."""
        specs = specs_of(self._parameters())
        return HeldWeights(
            buffers={name: BufferSpec(spec.shape, spec.dtype) for name, spec in specs.items()}, sizes=self.sizes
        )

    def open(self, port: WeightPort) -> None:
        """Opens this process's end of an edge. Raises: LayoutError for parameters that the plan does not fill, or not
        with the edge's other end."""
        buffers, held = port.reshard.dst_buffers[port.rank], self.describe()
        if port.tensors != "all":
            held = replace(held, buffers={name: spec for name, spec in held.buffers.items() if name in buffers})
        check_held(held, buffers)
        is_frozen = port.tensors == "frozen"
        if is_frozen:
            self._frozen = {}
        receiver = WEIGHT_SYNCS.get(port.weight_sync).open_receiver(port)
        padded = port.reshard.padded_buffers(port.rank)
        self._ends[port.end] = _End(
            receiver=receiver, parameters=frozenset(buffers), is_frozen=is_frozen, padded=padded
        )

    def fill(self, end: str, policy_version: int, timeout_s: float) -> None:
        """Receives a version into the engine's own parameters. What pads these becomes zero, so that it counts for
        nothing, whatever the engine has loaded or its memory has held meanwhile."""
        self._filled.pop(end, None)
        tensors, names = self._parameters(), self._ends[end].parameters
        with torch.inference_mode():  # some engines create them in it
            for name in self._ends[end].padded:
                tensors[name].zero_()
        if any(tensors[name].is_cuda for name in self._ends[end].padded):
            torch.cuda.synchronize()
        own = {name: tensor for name, tensor in tensors.items() if name in names}
        check = self._ends[end].receiver.receive(own, policy_version, timeout_s)
        self._filled[end] = _Filled(policy_version, _addresses(tensors), check)

    def check(self, end: str, policy_version: int, adapter_scale: float | None) -> Attested:
        """Checks that the model's parameters hold that version as it was published.

        Args:
            adapter_scale: the factor of an adapter's updates; None: the model has no adapter.

        Raises: WeightMismatchError naming the tensors.
        """
        filled = self._filled.pop(end, None)
        version = None if filled is None else filled.policy_version
        if filled is None or version != policy_version:
            raise WeightMismatchError(
                f"{end}: version {policy_version} is expected, and this process was "
                + ("not filled" if version is None else f"filled with version {version}"),
                expected_version=policy_version,
                found_version=version,
            )
        served = self._parameters()
        where, expected = _addresses(served), filled.addresses | self._frozen
        if where != expected:
            names = tuple(sorted({name for name, _ in where.items() ^ expected.items()}))
            raise WeightMismatchError(
                f"{end}: the model does not serve the weights of version {policy_version}: {', '.join(names)} "
                "have other addresses. The engine rearranges weights for its kernels, or something has replaced them",
                tensors=names,
                expected_version=policy_version,
            )
        if adapter_scale is not None and (layers := layers_with_other_scale(self.model, adapter_scale)):
            raise WeightMismatchError(
                f"{end}: the trainer multiplies the adapter's updates by {adapter_scale}, and the engine those of "
                f"{', '.join(layers)} by another number, or adds none",
                tensors=layers,
                expected_version=policy_version,
            )
        if filled.check is not None:
            filled.check()
        if self._ends[end].is_frozen:
            self._frozen = {name: where[name] for name in self._ends[end].parameters}
        return Attested(policy_version=policy_version, num_tensors=len(self._ends[end].parameters))

    def save_weights(self) -> None:
        """Copies the parameters to host memory, before the engine releases theirs."""
        for name, tensor in self._parameters().items():
            self._host.take(name, tensor)

    def restore_weights(self) -> None:
        """Fills the parameters with what `save_weights` copied, and drops the copies."""
        with torch.inference_mode():  # some engines create them in it
            for name, tensor in self._parameters().items():
                tensor.copy_(self._host.take(name, tensor, copies=False))
        self._host = HostPlaces()

    def remember(self) -> None:
        """Keeps digests of the parameters, before their memory is released."""
        self._remembered = tensor_digests(self._parameters())

    def check_remembered(self) -> None:
        """Checks that the parameters are those of `remember`. Raises: WeightMismatchError naming those that are not."""
        served = tensor_digests(self._parameters())
        differing = {name for name, _ in served.items() ^ self._remembered.items()}
        if names := tuple(name for name in served if name in differing):
            raise WeightMismatchError(
                f"the engine released its memory, and does not serve the weights that it had: {', '.join(names[:8])}"
                f"{f' and {len(names) - 8} more' if len(names) > 8 else ''} differ",
                tensors=names,
            )

    def reserved_bytes(self) -> int:
        """GPU memory that torch has had of the driver at most in this process, beside CUDA's own."""
        return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0

    def _parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


_INSIDE: dict[str, Inside] = {}
"""Address of a worker -> its counterpart in this process."""


def enter(ticket: str, model: Model, *, rank: int, sizes: Mapping[str, int], kind: type[Inside] = Inside) -> None:
    """Called by an engine in each of its processes, on behalf of `EngineProcesses`, while the model is not in use.

    Args:
        ticket: created by `EngineProcesses`.
        rank: tensor-parallel rank of this process.
        sizes: how the engine shards the model, see `HeldWeights`.
    """
    number, _, address = ticket.partition(" ")
    if address not in _INSIDE:
        _INSIDE[address] = kind.connect(address, model, rank=rank, sizes=sizes)
    if int(number):
        _INSIDE[address].enter(int(number))


def check_held(held: HeldWeights, expected: Mapping[str, BufferSpec]) -> None:
    """Checks that a process has exactly these parameters. Raises: LayoutError naming those that differ."""
    faults = []
    for name in sorted({*held.buffers, *expected}):
        has, needs = held.buffers.get(name), expected.get(name)
        if has is None and needs is not None:
            faults.append(f"{name} {list(needs.shape)} is missing")
        elif needs is None and has is not None:
            faults.append(f"{name} {list(has.shape)} is unexpected")
        elif has != needs and has is not None and needs is not None:
            faults.append(f"{name} is {has.dtype} {list(has.shape)} and not {needs.dtype} {list(needs.shape)}")
    if faults:
        more = f"; and {len(faults) - 4} more" if len(faults) > 4 else ""
        raise LayoutError(f"the engine's parameters do not match the model: {'; '.join(faults[:4])}{more}")


def _addresses(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
