"""The messages between a client and a channel's server: the client asks, the server answers, and neither speaks out of
turn.

A put that does not ask for an answer is the exception: the server has granted it room beforehand. So nothing is ever on
its way to a client that is not waiting for it, and a client that is killed takes nothing back: the system still
delivers what a dead process has written, unless it had left something unread.

A message travels as the header of a value of the peers' stream (wire/values.py): its length, itself, and
behind it the headers of the values that it carries, whose buffers are the stream's.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from rlinf_comm.channel import Key
from rlinf_comm.codec import Encoded
from rlinf_comm.errors import DecodeError

_LENGTH = struct.Struct("<I")


SERVICE = "channel"
"""What a server is called in a Hello."""


class Enter(msgspec.Struct):
    """What the answer to a caller's hello says of the channel."""

    capacity_items: int
    capacity_bytes: int
    num_keys: int


class Put(msgspec.Struct, tag=True, array_like=True):
    """One item, whose value follows."""

    key: Key
    weight: float
    policy_version: int
    timeout_s: float | None
    answers: bool
    """Whether the caller waits for a Granted."""


class Room(msgspec.Struct, tag=True, array_like=True):
    """Is there room for an item of so many bytes?"""

    num_bytes: int


class Flush(msgspec.Struct, tag=True, array_like=True):
    """Answered when the puts before it are in the channel, or, without `waits`, when those are for which there is
    room."""

    waits: bool


class Take(msgspec.Struct, tag=True, array_like=True):
    max_items: int
    min_items: int
    min_weight: float
    max_weight: float | None
    keys: list[Key] | None
    timeout_s: float | None


class Close(msgspec.Struct, tag=True, array_like=True):
    pass


class Reopen(msgspec.Struct, tag=True, array_like=True):
    num_producers: int


class Abort(msgspec.Struct, tag=True, array_like=True):
    reason: str


class Stats(msgspec.Struct, tag=True, array_like=True):
    pass


class DropLost(msgspec.Struct, tag=True, array_like=True):
    pass


Message = Put | Room | Flush | Take | Close | Reopen | Abort | Stats | DropLost


class Granted(msgspec.Struct, tag=True, array_like=True):
    """What was asked for is done. The caller may put so much more without waiting for an answer."""

    num_items: int
    num_bytes: int


class Label(msgspec.Struct, array_like=True):
    """What a taken item is, beside its value."""

    key: Key
    weight: float
    policy_version: int
    sequence: int
    header_bytes: int
    num_buffers: int


class Taken(msgspec.Struct, tag=True, array_like=True):
    """Items, whose values follow."""

    labels: list[Label]


class Numbers(msgspec.Struct, tag=True, array_like=True):
    """An answer in numbers: of Stats by name, of DropLost the lost processes."""

    stats: dict[str, int | float | bool]
    pids: list[int]


class Failed(msgspec.Struct, tag=True, array_like=True):
    """Nothing was done: an error of rlinf_comm.errors, or ValueError."""

    error: str
    text: str
    pids: list[int]


Answer = Granted | Taken | Numbers | Failed

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_Kind = TypeVar("_Kind")

NOTHING = Encoded(b"", ())


def compose(message: Message | Answer, *values: Encoded) -> Encoded:
    """The message with the values that it carries."""
    encoded = _encoder.encode(message)
    buffers = values[0].buffers if len(values) == 1 else tuple(buffer for value in values for buffer in value.buffers)
    return Encoded(b"".join((_LENGTH.pack(len(encoded)), encoded, *(value.header for value in values))), buffers)


def request_of(header: bytes) -> tuple[Message, bytes]:
    """The message, and the headers of its values. Raises DecodeError."""
    return _parse(header, _requests)


def answer_of(header: bytes) -> tuple[Answer, bytes]:
    """As request_of()."""
    return _parse(header, _answers)


def _parse(header: bytes, decoder: msgspec.msgpack.Decoder[_Kind]) -> tuple[_Kind, bytes]:
    try:
        (num_bytes,) = _LENGTH.unpack_from(header)
        end = _LENGTH.size + num_bytes
        return decoder.decode(memoryview(header)[_LENGTH.size : end]), header[end:]
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DecodeError(f"no message of a channel's server: {error}") from error
