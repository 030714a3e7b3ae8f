"""What any launcher offers: start a worker, call it, serve its requests, notice its death.

Whoever runs a flow speaks these protocols alone, so processes on this machine and actors of a cluster are alike to it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who a worker is.

    Example: the second rank of the second of two replicas of two ranks each, on a GPU of its own:
        Identity(role="actor", rank=3, num_ranks=4, num_ranks_per_replica=2, devices=("cuda:3",), rendezvous="/tmp/a")
    """

    role: str
    """Name of the worker group, for example `actor`."""
    rank: int
    num_ranks: int
    num_ranks_per_replica: int = 1
    """Consecutive ranks that hold one copy of the model together."""
    devices: tuple[str, ...] = ()
    """Names such as `cpu:0` or `cuda:1`, numbered over the cluster; empty for a host-only worker."""
    rendezvous: str = ""
    """How the ranks of the group find each other for collectives; unused with one rank. A path: through this file. An
    address: the first listens there, and the service `meeting` tells the others the port. Empty: it listens at the
    address of its node."""

    @property
    def name(self) -> str:
        return f"{self.role}/{self.rank}"

    @property
    def is_on_gpu(self) -> bool:
        """Whether its devices are GPUs."""
        return any(name.startswith("cuda") for name in self.devices)

    @property
    def replica(self) -> int:
        return self.rank // self.num_ranks_per_replica

    @property
    def num_replicas(self) -> int:
        return self.num_ranks // self.num_ranks_per_replica

    @property
    def rank_in_replica(self) -> int:
        return self.rank % self.num_ranks_per_replica


def role_and_rank(name: str) -> tuple[str, int]:
    """What `Identity.name` says: `actor/1` -> ("actor", 1)."""
    role, _, rank = name.rpartition("/")
    return role, int(rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """One process to start."""

    identity: Identity
    worker_class: type
    """A subclass of Worker that the child process can import by module and name."""
    arguments: tuple[Any, ...] = ()
    """Arguments of its constructor; anything that can cross a channel."""
    log_path: Path
    """stdout and stderr of the process go here."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Env vars on top of the driver's, of which those with credentials are left out (launchers/credentials.py)."""
    python: str | None = None
    """Path of the interpreter of the environment that the process runs in; None: the driver's own. `worker_class` and
    what it imports must be there, and the user's own modules are found as in the driver (launchers/interpreter.py)."""
    node: int = 0
    """Machine of its devices, as the cluster counts them; the driver's, 0, for a worker without any."""
    gpus: tuple[int, ...] = ()
    """Its GPUs among those that the run has on that node, from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine of a cluster, as what manages the cluster counts it."""

    id: str
    hostname: str
    address: str
    num_cpus: int
    num_gpus: int = 0
    gpus: tuple[tuple[str, int], ...] = ()
    """Name and bytes of those that torch finds there."""
    memory_bytes: int
    """Of the host."""

    def __str__(self) -> str:
        gpus = f", {plural(self.num_gpus, 'GPU')}" if self.num_gpus else ""
        return f"{self.hostname} ({self.address}): {plural(self.num_cpus, 'CPU')}{gpus}"


def plural(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


WaitKind = Literal[
    "items",
    "room",
    "lease",
    "weights",
    "room for weights",
    "check of weights",
    "collective",
    "backend collective",
    "first rank",
    "other ranks",
    "server",
    "other stage",
    "service",
    "engine",
    "simulator",
    "checker",
]
"""What ends a wait: items in a channel; room in one; a lease; a published version; that servers take an older version;
the check of what came; the other ranks of a collective, also of one that its backend makes by itself; the first rank of
the waiter's replica, or the others; the process that a channel lives in; another stage of the same worker, which
computes; the driver's answer; processes that the worker has started, which generate, simulate or
check rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnProcess:
    """A process on a worker's machine that it has started."""

    pid: int
    started_ticks: int
    """When it began, as ProcessRecord in explaining/snapshot.py has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Something a stage of a worker is waiting for at this moment. Whose move it is follows from the flow and its plan
    (explaining/graph.py).

    Example: the second rank of a trainer, in the 17th collective of all its ranks:
        Wait(waiter="actor/1", stage="actor", kind="collective", of="all ranks", number=17, operation="all-reduce",
             ranks=(0, 1), since_s=1.7e9)
    """

    waiter: str
    """`role/rank`."""
    stage: str = ""
    """Empty outside of a stage."""
    kind: WaitKind
    of: str = ""
    """Name of the channel, the weight edge, the group of ranks or the service."""
    number: int = 0
    """Turn of a lease, version of weights, how many collectives this group has made with this one."""
    operation: str = ""
    """Of a collective: `all-reduce` for example."""
    ranks: tuple[int, ...] = ()
    """Of a collective: the ranks of the worker group that make it together."""
    processes: tuple[OwnProcess, ...] = ()
    """Of an engine, simulators or checkers: those that have not answered. Of weights and their check: an engine's that
    serves from processes of its own."""
    since_s: float
    """Unix time."""

    @property
    def target(self) -> str:
        """What is waited for, in words."""
        return {
            "items": f"channel {self.of}",
            "room": f"room in channel {self.of}",
            "lease": f"lease of turn {self.number}",
            "weights": f"weights {self.of} version {self.number}",
            "room for weights": f"room for weights {self.of}",
            "check of weights": "the check of the weights",
            "collective": f"{self.operation} {self.number} of {self.of}",
            "backend collective": f"the other ranks inside torch.distributed ({self.operation})",
            "first rank": "the first rank of its replica",
            "other ranks": "the other ranks of its replica",
            "server": f"the process that has channel {self.of}",
            "other stage": "another stage of its worker",
            "service": f"the driver's answer ({self.of})",
            "engine": "its engine",
            "simulator": "its simulators",
            "checker": "its checkers",
        }[self.kind]


class RequestSender(Protocol):
    """Asks a service of the driver, `lease` for example; the future holds its reply.

    Without `wants_reply` it is a message that nobody answers, and the future stays as it is.
    """

    def __call__(self, service: str, value: Any, *, wants_reply: bool = True) -> Future[Any]: ...


ServiceHandler = Callable[[str, Any, Callable[[Any], None]], None]
"""Called with the worker's name, its request and a function that sends the reply (at any later time, from any
thread)."""


class WorkerHandle(Protocol):
    """The driver's end of one worker."""

    def call(self, method: str, /, *args: Any, lane: int = 0) -> Future[Any]:
        """Calls `method` of the worker object.

        Calls of one lane run in order. Lane 0 is the process's main thread; any other lane is a thread of its own, so
        that two stages of one worker can run at once.

        Raises (through the future): RemoteError when the method raised, WorkerLost when the process is gone.
        """
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the process is gone, and every call fails."""
        ...


class Launcher(Protocol):
    """Starts workers, watches them and ends them.

    A run makes its launcher with the keyword arguments of LocalLauncher and those of `cluster.launcher_options`. One
    for other machines than the driver's says what there is by a class method `nodes(**options)`, which gives each Node,
    the driver's first; it is made with the keyword argument `cluster` too, the devices that the run takes of them. In
    the process of a worker a launcher makes a WorkerHost, calls `host.make(spec.worker_class, *spec.arguments)`, then
    `host.call(method, *arguments)` for each call; it sends `host.current_waits()` about once a second and calls
    `host.worker.close()` at a good end.
    """

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Starts a process and returns at once; a failed construction shows in the first call's future and in
        `lost`."""
        ...

    def serve(self, service: str, handler: ServiceHandler) -> None:
        """Answers requests of that name, which workers send by their RequestSender. Replaces an earlier handler."""

    @property
    def lost(self) -> Future[None]:
        """Fails with WorkerLost as soon as any worker dies, goes silent or cannot start; never succeeds."""
        ...

    def forget_lost(self) -> None:
        """Whoever asks knows of the workers that were lost: what is left of them goes, and `lost` is a new future."""
        ...

    def end(self, handle: WorkerHandle) -> None:
        """Kills a worker that `start` gave, and its children. It is lost then, and nobody is told."""
        ...

    def waits(self) -> list[Wait]:
        """What the workers last said they were waiting for."""
        ...

    def shutdown(self) -> None:
        """Ends every process and its children; safe to call twice. After it returns nothing is left behind."""
