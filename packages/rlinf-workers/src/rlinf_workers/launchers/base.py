"""The launcher protocol: start a worker, call it, serve its requests, detect its death.

The executor uses only these protocols, so local processes and processes of a cluster look the same to it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The identity of a worker.

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
    """Rendezvous of the group's ranks for collectives; unused with one rank. A path: through this file. An address: the
    first rank listens there, and the service `meeting` sends the port to the others. Empty: it listens at the address
    of its node."""

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
    """The inverse of `Identity.name`: `actor/1` -> ("actor", 1)."""
    role, _, rank = name.rpartition("/")
    return role, int(rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """One process to start."""

    identity: Identity
    worker_class: type
    """A subclass of Worker that the child process can import by module and name."""
    arguments: tuple[Any, ...] = ()
    """Arguments of its constructor; any values that can be sent through a channel."""
    log_path: Path
    """Receives stdout and stderr of the process."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Added to the driver's env vars, which exclude those with credentials (launchers/credentials.py)."""
    python: str | None = None
    """Interpreter of the venv that the process runs in; None: the driver's. `worker_class` and its imports must be
    installed there; the user's own modules are found as in the driver (launchers/interpreter.py)."""
    node: int = 0
    """Node of its devices, as the cluster counts them; 0, the driver's, for a worker without devices."""
    gpus: tuple[int, ...] = ()
    """Indices of its GPUs among those that the run has on that node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine of a cluster, as counted by the cluster's manager."""

    id: str
    hostname: str
    address: str
    num_cpus: int
    num_gpus: int = 0
    gpus: tuple[tuple[str, int], ...] = ()
    """Name and bytes of the GPUs that torch finds there."""
    memory_bytes: int
    """Host memory."""

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
    "agents",
]
"""What the wait is for: items in a channel; capacity in a channel; a lease; a published version; servers that must
receive an older version; the check of received weights; the other ranks of a collective, also inside a backend; the
first rank of the replica, or its other ranks; the process that holds a channel; another stage of the same worker that
computes; the driver's reply; processes that the worker has started, which generate, simulate, check rewards or run
episodes of agents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnProcess:
    """A process that a worker has started on its machine."""

    pid: int
    started_ticks: int
    """Its start time, as in ProcessRecord in explaining/snapshot.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """A current wait of a worker's stage. The root cause follows from the flow and its plan (explaining/graph.py).

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
    """Name of the channel, the weight edge, the group of ranks or the service; of agents, the episode that has been
    waiting for longest, and for what."""
    number: int = 0
    """Turn of a lease, version of weights, or number of collectives of this group so far, including this one."""
    operation: str = ""
    """For a collective, such as `all-reduce`."""
    ranks: tuple[int, ...] = ()
    """For a collective: the participating ranks of the worker group."""
    processes: tuple[OwnProcess, ...] = ()
    """For an engine, simulators, checkers or agents: those that have not answered. For weights and their check: the
    processes of an engine that serves from its own processes."""
    since_s: float
    """Unix time."""

    @property
    def target(self) -> str:
        """The awaited thing, in words."""
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
            "agents": f"its agents: {self.of}" if self.of else "its agents",
        }[self.kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProgress:
    """How far a stage is in the current run of its flow, on one rank or, added up, on all of them.

    Example: 37 of 64 prompts are answered:
        StageProgress(stage="rollout", step=3, phase="train", num_done=37, num_items=64, is_computing=True)
    """

    stage: str
    step: int
    phase: str
    """`train` or `evaluate`."""
    num_done: int
    """Items that it has put into its first output channel; for a stage without output, what `Worker.report_progress`
    counts."""
    num_items: int = 0
    """Items of the whole run; 0: unknown."""
    unit: str = ""
    """What `num_done` counts, if not items of the flow."""
    is_computing: bool


class RequestSender(Protocol):
    """Sends a request to a service of the driver, such as `lease`; the future holds the reply.

    Without `wants_reply` there is no reply, and the future is never completed.
    """

    def __call__(self, service: str, value: Any, *, wants_reply: bool = True) -> Future[Any]: ...


ServiceHandler = Callable[[str, Any, Callable[[Any], None]], None]
"""Called with the worker's name, its request and a function that sends the reply (at any later time, from any
thread)."""


class WorkerHandle(Protocol):
    """The driver's end of one worker."""

    def call(self, method: str, /, *args: Any, lane: int = 0) -> Future[Any]:
        """Calls `method` of the worker object.

        Calls of one lane run in order. Lane 0 is the process's main thread; any other lane has its own thread, so that
        two stages of one worker can run concurrently.

        Raises (through the future): RemoteError if the method raised, WorkerLost if the process is gone.
        """
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the process is gone, so that every call fails."""
        ...


class Launcher(Protocol):
    """Starts, watches and ends workers.

    A run creates its launcher with the keyword arguments of LocalLauncher and those of `cluster.launcher_options`. A
    launcher for other machines has a class method `nodes(**options)`, which returns each Node, the driver's first; it
    also gets the keyword argument `cluster`, the devices of the run on those nodes. In the process of a worker, a
    launcher creates a WorkerHost, calls `host.make(spec.worker_class, *spec.arguments)`, then `host.call(method,
    *arguments)` for each call; it sends `host.current_waits()` about once a second and calls `host.worker.close()` on a
    normal end. A launcher may also have a method `progress()`, which returns the `host.current_progress()` that its
    workers sent last; without it, terminals show steps without their progress.
    """

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Starts a process and returns at once; a failed construction is reported by the first call's future and by
        `lost`."""
        ...

    def serve(self, service: str, handler: ServiceHandler) -> None:
        """Handles requests to that service, which workers send by their RequestSender. Replaces an earlier handler."""

    @property
    def lost(self) -> Future[None]:
        """Fails with WorkerLost as soon as any worker dies, stops sending heartbeats or cannot start; never
        succeeds."""
        ...

    def forget_lost(self) -> None:
        """Acknowledges lost workers: cleans up what is left of them, and replaces `lost` by a new future."""
        ...

    def end(self, handle: WorkerHandle) -> None:
        """Kills a worker returned by `start`, with its children. Its loss is not reported."""
        ...

    def waits(self) -> list[Wait]:
        """The waits that the workers reported last."""
        ...

    def shutdown(self) -> None:
        """Ends every process and its children; may be called twice. Leaves nothing behind."""
