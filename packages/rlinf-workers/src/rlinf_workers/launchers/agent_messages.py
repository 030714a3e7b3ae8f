"""What the driver and its agent on a node say to each other, and how a connection to the driver begins: small, typed,
never pickled."""

from __future__ import annotations

import msgspec

from rlinf_comm.wire import HostIdentity


class AgentArrival(msgspec.Struct, tag=True):
    """Begins the control connection of a node's agent."""

    node: int
    hostname: str
    host: HostIdentity
    gpus: list[str]
    """Names of the GPUs that the node's share has, as CUDA_VISIBLE_DEVICES takes them."""


class WorkerArrival(msgspec.Struct, tag=True):
    """Begins the connection of a worker. Its agent makes it and hands it to the process; then the worker's Hello
    comes."""

    number: int
    """Of the StartWorker that asked for it."""


class CallerRole(msgspec.Struct):
    """What a caller's Hello has besides."""

    of: AgentArrival | WorkerArrival


class StartWorker(msgspec.Struct, tag=True):
    """The driver wants a worker process."""

    number: int
    """The driver's name for it, never used twice."""
    name: str
    """`role/rank`, for people."""
    python: str | None
    """Interpreter of an environment of its own; None: the agent's."""
    env_vars: dict[str, str]
    """On top of the agent's."""
    log_path: str
    """Where the driver's machine has the log."""
    token: str
    """Name and text of a small file beside it: who can read that shares the folder."""


class KillWorker(msgspec.Struct, tag=True):
    """The driver wants a process and its process group killed, whatever is left of them."""

    number: int


class LookAtWorker(msgspec.Struct, tag=True):
    """The driver has heard nothing of a worker and wants to know whether its process may run."""

    number: int


class Started(msgspec.Struct, tag=True):
    """The process is there."""

    number: int
    agent_pid: int
    log_path: str
    """Where it writes on its own machine."""


class StartRefused(msgspec.Struct, tag=True):
    """The process could not be started."""

    number: int
    why: str


class ProcessStatus(msgspec.Struct, tag=True):
    """What the agent's machine says of a process."""

    number: int
    is_running: bool


class LogBytes(msgspec.Struct, tag=True):
    """What a worker has written since, where its node does not share the folder of logs."""

    number: int
    data: bytes


class Ended(msgspec.Struct, tag=True):
    """The process has ended; all LogBytes of it came before."""

    number: int
    exit_code: int


encode = msgspec.msgpack.Encoder().encode
decode_arrival = msgspec.msgpack.Decoder(CallerRole).decode
Order = StartWorker | KillWorker | LookAtWorker
Report = Started | StartRefused | ProcessStatus | LogBytes | Ended
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
