"""Control messages between the driver and a worker process: small, typed, never pickled.

Each side sends its handshake first (rlinf_comm.wire.handshake); then the driver sends the worker's Birth, and the
others follow. The `payload` fields hold values packed by rlinf_comm.codec; large tensors belong in channels, not here.
"""

from __future__ import annotations

import msgspec

from rlinf_workers.launchers.base import Identity, StageProgress, Wait


class Birth(msgspec.Struct, kw_only=True):
    """Everything a process needs to become a worker."""

    identity: Identity
    worker_class: str
    """`module:qualified name`"""
    arguments: bytes
    """packed by rlinf_comm.codec"""
    record_modules: list[str]
    """Modules to import, so that the classes of the arguments are registered here."""
    log_path: str
    pins_slots: bool
    """Pin the worker to the cores of its CPU slots."""
    is_forked: bool
    """Forked by a fork server, not started by the driver itself."""
    dies_with_thread: bool
    """Started by a main thread: the kernel's parent-death signal follows the thread that forked."""
    driver_pid: int


class Call(msgspec.Struct, tag=True):
    """A call of a worker's method by the driver."""

    call_id: int
    lane: int
    method: str
    payload: bytes


class Request(msgspec.Struct, tag=True):
    """A worker's request to a service of the driver. `call_id` -1: no reply is wanted."""

    call_id: int
    service: str
    payload: bytes


class Returned(msgspec.Struct, tag=True):
    """The result of a Call, or the reply to a Request."""

    call_id: int
    payload: bytes


class CallFailed(msgspec.Struct, tag=True):
    """The exception of a Call. `call_id` -1: of the constructor."""

    call_id: int
    error_type: str
    message: str
    traceback: str


class Beat(msgspec.Struct, tag=True):
    """A worker's heartbeat with its current waits and the progress of its stages, about once a second; the first is
    sent when its object exists."""

    waits: list[Wait]
    progress: list[StageProgress] = []  # msgspec copies it for each message


class Stop(msgspec.Struct, tag=True):
    """Tells a worker to finish; the process closes its worker and exits with code 0."""


Message = Call | Request | Returned | CallFailed | Beat | Stop

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
decode_birth = msgspec.msgpack.Decoder(Birth).decode
