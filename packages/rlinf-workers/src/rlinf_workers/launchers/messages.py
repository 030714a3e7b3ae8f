"""Control messages between the driver and a worker process: small, typed, never pickled.

Each side sends its Hello first (rlinf_comm.wire.handshake); then the driver sends the worker's Birth, and the others
follow. The `payload` fields hold values packed by rlinf_comm.codec; large tensors belong into channels, not here.
"""

from __future__ import annotations

import msgspec

from rlinf_workers.launchers.base import Identity, Wait


class Birth(msgspec.Struct, kw_only=True):
    """Everything a process needs to become a worker."""

    identity: Identity
    worker_class: str
    """`module:qualified name`"""
    arguments: bytes
    """packed by rlinf_comm.codec"""
    record_modules: list[str]
    """What to import so that the classes of the arguments are registered here."""
    log_path: str
    pins_slots: bool
    """The worker keeps to the cores of its CPU slots."""
    is_forked: bool
    """From a fork server, and not started by the driver itself."""
    dies_with_thread: bool
    """Started by a main thread: the kernel's signal at a parent's death follows the thread that forked."""
    driver_pid: int


class Call(msgspec.Struct, tag=True):
    """The driver calls a method of a worker."""

    call_id: int
    lane: int
    method: str
    payload: bytes


class Request(msgspec.Struct, tag=True):
    """A worker asks a service of the driver for something. `call_id` -1: no reply is wanted."""

    call_id: int
    service: str
    payload: bytes


class Returned(msgspec.Struct, tag=True):
    """The result of a Call, or the reply to a Request."""

    call_id: int
    payload: bytes


class CallFailed(msgspec.Struct, tag=True):
    """The exception of a Call. `call_id` -1: the constructor's."""

    call_id: int
    error_type: str
    message: str
    traceback: str


class Beat(msgspec.Struct, tag=True):
    """A worker says about once a second that it is alive, and what it waits for; first when its object exists."""

    waits: list[Wait]


class Stop(msgspec.Struct, tag=True):
    """The driver tells a worker to finish; the process closes its worker and exits with code 0."""


Message = Call | Request | Returned | CallFailed | Beat | Stop

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
decode_birth = msgspec.msgpack.Decoder(Birth).decode
