"""The messages between a client and a channel server: the client sends requests, the server replies, and neither sends
out of turn.

The exception is a put that needs no reply, because the server has granted capacity for it beforehand. So nothing is in
transit to a client that is not waiting for it, and killing a client loses none of its puts: the system still delivers
what a dead process has written, unless it had left received data unread.

A message is sent as the header of a value of the peers' stream (wire/values.py): its length, the message, and the
headers of the values that it carries, whose buffers are those of the stream.
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
"""The server's name in a handshake."""


class Enter(msgspec.Struct):
    """The server's description of its channel, in the reply to a handshake."""

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
    """Asks for capacity for an item of this many bytes."""

    num_bytes: int


class Flush(msgspec.Struct, tag=True, array_like=True):
    """Replied to when the earlier puts are in the channel or, without `waits`, those for which there is capacity."""

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
    """The request is done. The caller may put this much more without waiting for a reply."""

    num_items: int
    num_bytes: int


class Label(msgspec.Struct, array_like=True):
    """A taken item, except its value."""

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
    """A reply in numbers: for Stats by name, for DropLost the lost processes."""

    stats: dict[str, int | float | bool]
    pids: list[int]


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The request failed: an error of rlinf_comm.errors, or ValueError."""

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
    """Encodes the message with the values that it carries."""
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
