"""Control messages between the driver and a worker process: small, typed, never pickled.

The `payload` fields hold values packed by rlinf_comm.codec; tensors of any size belong into channels, not here.
"""

from __future__ import annotations

import msgspec

from rlinf_workers.launcher.base import Wait


class Call(msgspec.Struct, tag=True):
    """Driver to worker: run a method."""

    call_id: int
    lane: int
    method: str
    payload: bytes


class Reply(msgspec.Struct, tag=True):
    """Driver to worker: the answer to a Request."""

    request_id: int
    payload: bytes


class Stop(msgspec.Struct, tag=True):
    """Driver to worker: finish; the process closes its worker and exits with code 0."""


class Ready(msgspec.Struct, tag=True):
    """Worker to driver: the worker object exists."""


class Returned(msgspec.Struct, tag=True):
    """Worker to driver: a call's result."""

    call_id: int
    payload: bytes


class Raised(msgspec.Struct, tag=True):
    """Worker to driver: a call's exception. `call_id` -1: the constructor's."""

    call_id: int
    error_type: str
    message: str
    traceback: str


class Request(msgspec.Struct, tag=True):
    """Worker to driver: something the worker asks a service of the driver for. `request_id` -1: no reply is wanted."""

    request_id: int
    service: str
    payload: bytes


class Beat(msgspec.Struct, tag=True):
    """Worker to driver, about once a second: I am alive, and this is what I wait for."""

    waits: list[Wait]


ToWorker = Call | Reply | Stop
ToDriver = Ready | Returned | Raised | Request | Beat

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_driver = msgspec.msgpack.Decoder(ToDriver)


def encode(message: ToWorker | ToDriver) -> bytes:
    return _encoder.encode(message)


def decode_to_worker(blob: bytes) -> ToWorker:
    return _to_worker.decode(blob)


def decode_to_driver(blob: bytes) -> ToDriver:
    return _to_driver.decode(blob)
