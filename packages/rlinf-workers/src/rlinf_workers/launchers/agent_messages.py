"""Messages between the driver and its agent on a node, and the first message of a connection to the driver: small,
typed, never pickled."""

from __future__ import annotations

import msgspec

from rlinf_comm.wire import HostIdentity


class AgentArrival(msgspec.Struct, tag=True):
    """First message of the control connection of a node's agent."""

    node: int
    hostname: str
    host: HostIdentity
    gpus: list[str]
    """Names of the GPUs that the node's share has, as CUDA_VISIBLE_DEVICES takes them."""


class WorkerArrival(msgspec.Struct, tag=True):
    """First message of a worker's connection. The agent opens it and passes it to the process, whose handshake
    follows."""

    number: int
    """Number of the StartWorker message that requested it."""


class CallerRole(msgspec.Struct):
    """What a caller's Hello has besides."""

    of: AgentArrival | WorkerArrival


class StartWorker(msgspec.Struct, tag=True):
    """Request to start a worker process."""

    number: int
    """The driver's id of the process, never reused."""
    name: str
    """`role/rank`, for messages."""
    python: str | None
    """Interpreter of the worker's venv; None: the agent's."""
    env_vars: dict[str, str]
    """Added to the agent's env vars."""
    log_path: str
    """Path of the log on the driver's machine."""
    token: str
    """Name and content of a small file beside it: an agent that can read it shares the folder."""


class KillWorker(msgspec.Struct, tag=True):
    """Request to kill a process and its process group, whatever is left of them."""

    number: int


class LookAtWorker(msgspec.Struct, tag=True):
    """The driver has received nothing from a worker and asks whether its process may run."""

    number: int


class Started(msgspec.Struct, tag=True):
    """The process has been started."""

    number: int
    agent_pid: int
    log_path: str
    """Path of the log on the process's own machine."""


class StartRefused(msgspec.Struct, tag=True):
    """The process could not be started."""

    number: int
    why: str


class ProcessStatus(msgspec.Struct, tag=True):
    """The agent's reply about a process."""

    number: int
    is_running: bool


class LogBytes(msgspec.Struct, tag=True):
    """New bytes of a worker's log, if its node does not share the folder of logs."""

    number: int
    data: bytes


class Ended(msgspec.Struct, tag=True):
    """The process has ended; all of its LogBytes were sent before."""

    number: int
    exit_code: int


encode = msgspec.msgpack.Encoder().encode
decode_arrival = msgspec.msgpack.Decoder(CallerRole).decode
Order = StartWorker | KillWorker | LookAtWorker
Report = Started | StartRefused | ProcessStatus | LogBytes | Ended
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
