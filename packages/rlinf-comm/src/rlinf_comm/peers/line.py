"""The socket on which two peers meet: authenticated, framed, and watched for the other's end.

Before anything is decoded, each side proves that it knows the token of the peer that was called: the caller, that it
was given the address; the called one, that it is that peer and not a later process on its port. Then messages:
4 bytes of length and MessagePack of fixed types. After the meeting a link keeps the line: its end is the peer's end,
and one byte before it says that the peer left on purpose.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import threading
import weakref
from typing import TypeVar

import msgspec

from rlinf_comm.errors import DecodeError, PeerLeft, PeerLost, PeerTimeout
from rlinf_comm.peers.address import PeerAddress
from rlinf_comm.peers.deadline import Deadline

MAGIC = b"rlpeer"
VERSION = 1
"""Of the whole protocol between peers; raised by every change of it."""

FAREWELL = b"F"
_GREETING = struct.Struct("<6sH16s")  # magic, version, nonce
_PROOF_BYTES = 32
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 1 << 20
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""A host that vanishes without a word is noticed after 11 s; a process that ends, at once."""

_Message = TypeVar("_Message")

_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def watched(opened: socket.socket) -> socket.socket:
    """Closes the socket in forked children: while one held it open, nobody would notice the end of this process."""
    _open_sockets.add(opened)
    return opened


def _close_in_child() -> None:
    for opened in list(_open_sockets):
        opened.close()


os.register_at_fork(after_in_child=_close_in_child)


class Stranger(Exception):
    """The other side of a new connection is no peer that knows the token."""


class Line:
    """One connected socket. While two peers meet it carries messages; afterwards, only the end."""

    def __init__(self, connected: socket.socket, who: str = "a caller") -> None:
        """`who` is at the other end, for messages."""
        self.socket = watched(connected)
        self._who = who
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, number in _KEEPALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), number)

    @classmethod
    def call(cls, address: PeerAddress, deadline: Deadline) -> Line:
        """A line to the peer at `address`, proven to be that peer.

        Raises:
            PeerLost: nobody, or another process, answers there.
            PeerTimeout: the host or the process does not answer in time.
            DecodeError: the peer speaks another version.
        """
        host, port = address.endpoint
        who = f"{address.name!r} ({address.place}, {host}:{port})"
        try:
            line = cls(socket.create_connection((host, port), timeout=max(deadline.left_s, 0.001)), who)
        except TimeoutError as error:
            raise PeerTimeout(f"{who} did not answer a connection within {deadline.timeout_s:g} s") from error
        except OSError as error:
            raise PeerLost(
                f"{who} cannot be reached: {error.strerror or error}; it has ended, or its host is"
            ) from error
        try:
            line._greet(address.token, deadline, called=False)
        except Stranger as error:
            line.close()
            raise PeerLost(f"{who} is gone: {error}") from error
        except BaseException:
            line.close()
            raise
        return line

    def accept(self, token: bytes, deadline: Deadline) -> None:
        """The called side's part of call(). Raises Stranger, PeerTimeout or DecodeError."""
        self._greet(token, deadline, called=True)

    def _greet(self, token: bytes, deadline: Deadline, *, called: bool) -> None:
        nonce = os.urandom(16)
        try:
            self._send(_GREETING.pack(MAGIC, VERSION, nonce), deadline)
            magic, version, other = _GREETING.unpack(self._receive(_GREETING.size, deadline))
            if magic != MAGIC:
                raise Stranger(f"something else answers there, which starts with {magic!r}")
            if version != VERSION:
                raise DecodeError(
                    f"{self._who} speaks version {version} of the peer protocol, this process "
                    f"version {VERSION}; install the same rlinf-comm on both sides"
                )
            caller_first = nonce + other if not called else other + nonce
            proof, wanted = (_proof(token, caller_first, called=side) for side in (called, not called))
            if called:  # prove nothing to those who have proven nothing
                _check(self._receive(_PROOF_BYTES, deadline), wanted)
                self._send(proof, deadline)
            else:
                self._send(proof, deadline)
                _check(self._receive(_PROOF_BYTES, deadline), wanted)
        except PeerLost as error:
            raise Stranger(f"the connection ended before the other side had proven who it is ({error})") from error

    # --- messages while two peers meet ---

    def tell(self, message: msgspec.Struct, deadline: Deadline) -> None:
        body = msgspec.msgpack.encode(message)
        self._send(_LENGTH.pack(len(body)) + body, deadline)

    def hear(self, kind: type[_Message], deadline: Deadline) -> _Message:
        """Raises PeerLost when the line ends, PeerTimeout, or DecodeError for another kind of message."""
        (num_bytes,) = _LENGTH.unpack(self._receive(_LENGTH.size, deadline))
        if num_bytes > _MAX_MESSAGE_BYTES:
            raise DecodeError(f"a message of {num_bytes} bytes between peers that meet; at most {_MAX_MESSAGE_BYTES}")
        body = self._receive(num_bytes, deadline)
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise DecodeError(f"no message of peers that meet: {error}") from error

    def _send(self, data: bytes, deadline: Deadline) -> None:
        self.socket.settimeout(max(deadline.left_s, 0.001))
        try:
            self.socket.sendall(data)
        except TimeoutError as error:
            raise PeerTimeout(f"{self._who} did not take {len(data)} bytes within {deadline.timeout_s:g} s") from error
        except OSError as error:
            raise PeerLost(f"{self._who} broke the connection: {error.strerror or error}") from error

    def _receive(self, num_bytes: int, deadline: Deadline) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            self.socket.settimeout(max(deadline.left_s, 0.001))
            try:
                received = self.socket.recv(num_bytes - len(data))
            except TimeoutError as error:
                raise PeerTimeout(
                    f"{self._who} accepted a connection and then said nothing for {deadline.timeout_s:g} s"
                ) from error
            except OSError as error:
                raise PeerLost(f"{self._who} broke the connection: {error.strerror or error}") from error
            if not received:
                raise PeerLost(f"{self._who} ended the connection while it was being met")
            data += received
        return bytes(data)

    def close(self) -> None:
        self.socket.close()


def _proof(token: bytes, nonces: bytes, *, called: bool) -> bytes:
    return hmac.digest(token, nonces + (b"called" if called else b"caller"), "sha256")


def _check(proof: bytes, wanted: bytes) -> None:
    if not hmac.compare_digest(proof, wanted):
        raise Stranger("the other side does not know the peer's token")


class Lifeline:
    """The line of a link, once values go another way: tells when the other side ends."""

    def __init__(self, line: Line, theirs: PeerAddress) -> None:
        self._socket = line.socket
        self._socket.setblocking(False)
        self._theirs = theirs
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN | select.POLLRDHUP)
        self._is_open = True
        self._end: tuple[type[PeerLost], str] | None = None

    def check(self, *, look_at_process: bool = False) -> None:
        """Raises PeerLeft or PeerLost when the other side has ended. Cheap; with `look_at_process` 20 us."""
        with self._lock:
            if self._end is None and self._is_open and self._poll.poll(0):
                self._end = self._read_end()
            if self._end is None and look_at_process and self._theirs.is_known_dead():
                self._end = lost(self._theirs, "its process has ended")
            if self._end is None:
                return
            kind, text = self._end
        raise kind(text)

    def _read_end(self) -> tuple[type[PeerLost], str] | None:
        try:
            said = self._socket.recv(1)
        except BlockingIOError:
            return None
        except OSError as error:
            return lost(self._theirs, f"the connection broke ({error.strerror})")
        if said == FAREWELL:
            return left(self._theirs)
        return lost(self._theirs, "its connection ended without a farewell")

    def has_ended(self) -> bool:
        try:
            self.check(look_at_process=True)
        except PeerLost:
            return True
        return False

    def close(self, *, farewell: bool) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            if farewell:
                try:
                    self._socket.send(FAREWELL)
                except OSError:
                    pass  # it has gone first
            self._socket.close()
            self._end = self._end or (PeerLeft, f"the link to {self._theirs.name!r} was closed by this process")


def lost(theirs: PeerAddress, how: str) -> tuple[type[PeerLost], str]:
    return PeerLost, f"{theirs.name!r} is lost: {how}; it was {theirs.place}"


def left(theirs: PeerAddress) -> tuple[type[PeerLost], str]:
    return PeerLeft, f"{theirs.name!r} has left: it closed its connections; it was {theirs.place}"
