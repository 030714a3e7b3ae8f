"""A value that a process only forwards: encoded by its sender, and decoded by its final receiver.

It is put into a channel as the record Carried. At the receiver, the codec replaces the record by the value itself: its
tensors are views of the memory of the record's buffers, and the forwarding process has neither read it nor known its
classes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf_comm import _lifting, codec
from rlinf_comm.errors import DecodeError
from rlinf_comm.records import record


@record(name="rlinf_comm:Carried")
@dataclass(frozen=True)
class Carried:
    """The two parts of codec.Encoded, as received."""

    header: bytes
    buffers: tuple[np.ndarray, ...]
    """uint8, one per tensor."""

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers)


def carried(header: bytes, buffers: Sequence[memoryview]) -> Carried:
    arrays = (np.frombuffer(buffer, np.uint8) if buffer.nbytes else np.empty(0, np.uint8) for buffer in buffers)
    return Carried(header, tuple(arrays))


class _Unpacking(threading.local):
    stays_carried = False
    is_inside = False


_here = _Unpacking()


@contextmanager
def staying_carried() -> Iterator[None]:
    """Context in which this thread decodes values to Carried, because it forwards them."""
    _here.stays_carried = True
    try:
        yield
    finally:
        _here.stays_carried = False


def _arrive(fields: list[Any]) -> Any:
    if _here.stays_carried:
        return Carried(*fields)
    if _here.is_inside:
        raise DecodeError("a carried value inside of another; values are carried once")
    _here.is_inside = True
    try:
        return codec.decode(*fields)
    finally:
        _here.is_inside = False


_lifting.ARRIVALS[Carried] = _arrive
