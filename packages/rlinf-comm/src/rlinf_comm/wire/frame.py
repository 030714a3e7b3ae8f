"""One framed message on a socket: 4 bytes of length, and then that many bytes, up to a bound that the reader sets."""

from __future__ import annotations

import socket
import struct

from rlinf_comm.errors import DecodeError, PeerLost, PeerTimeout
from rlinf_comm.wire.deadline import Deadline

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = (1 << 32) - 1
_JOIN_BYTES = 16 << 10
"""Up to this size one copy is cheaper than a second call of the system."""


def send_frame(connected: socket.socket, body: bytes, tag: bytes, who: str, deadline: Deadline) -> None:
    """Sends one message, and its tag, to `who`, as errors name the other end. Raises PeerLost, PeerTimeout."""
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes to {who}; at most {MAX_FRAME_BYTES}")
    length = LENGTH.pack(len(body))
    if len(body) <= _JOIN_BYTES:
        send_all(connected, length + body + tag, who, deadline)
        return
    for piece in filter(None, (length, body, tag)):
        send_all(connected, piece, who, deadline)


def receive_frame(
    connected: socket.socket, num_tag_bytes: int, max_bytes: int, who: str, deadline: Deadline
) -> tuple[bytes, bytes]:
    """The next message and its tag.

    Raises:
        PeerLost: the connection has ended.
        PeerTimeout: the message is not complete in time.
        DecodeError: it is longer than `max_bytes`.
    """
    (num_bytes,) = LENGTH.unpack(receive_exactly(connected, LENGTH.size, who, deadline))
    if num_bytes > max_bytes:
        raise DecodeError(f"{who} sent a message of {num_bytes} bytes; at most {max_bytes}")
    body = receive_exactly(connected, num_bytes, who, deadline)
    return body, receive_exactly(connected, num_tag_bytes, who, deadline)


def send_all(connected: socket.socket, data: bytes, who: str, deadline: Deadline) -> None:
    """Sends all of `data`. Raises PeerLost, PeerTimeout."""
    try:
        set_timeout(connected, deadline)
        connected.sendall(data)
    except TimeoutError as error:
        raise PeerTimeout(f"{who} did not take {len(data)} bytes within {deadline.timeout_s:g} s") from error
    except OSError as error:
        raise PeerLost(f"{who} broke the connection: {error.strerror or error}") from error


def receive_exactly(connected: socket.socket, num_bytes: int, who: str, deadline: Deadline) -> bytes:
    """The next `num_bytes`. Memory is taken as they come. Raises PeerLost, PeerTimeout."""
    data = b""
    pieces: list[bytes] = []
    num_left = num_bytes
    while num_left:
        try:
            set_timeout(connected, deadline)
            data = connected.recv(min(num_left, 1 << 20))
        except TimeoutError as error:
            raise PeerTimeout(f"{who} has sent nothing for {deadline.timeout_s:g} s") from error
        except OSError as error:
            raise PeerLost(f"{who} broke the connection: {error.strerror or error}") from error
        if not data:
            raise PeerLost(f"{who} ended the connection")
        num_left -= len(data)
        pieces.append(data)
    return data if len(pieces) == 1 else b"".join(pieces)


def set_timeout(connected: socket.socket, deadline: Deadline) -> None:
    """Calls of the socket end with the deadline; they block where it never passes."""
    timeout_s = max(deadline.left_s, 0.001) if deadline.is_finite else None
    if timeout_s != connected.gettimeout():
        connected.settimeout(timeout_s)
