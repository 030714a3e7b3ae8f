"""A value that a process only passes on: encoded by the one before it, and decoded by the one that takes it.

It goes into a channel as the record Carried. Where it arrives, the codec puts the value itself in the record's place:
its tensors are views of the memory that the record's buffers lie in, and whoever passed it on has neither read it nor
known its classes.
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
    """The two parts of codec.Encoded, as they arrived."""

    header: bytes
    buffers: tuple[np.ndarray, ...]
    """uint8, one for each tensor."""

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
    """Values that this thread decodes inside the block stay Carried: it passes them on."""
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
