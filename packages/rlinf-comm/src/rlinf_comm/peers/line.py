"""The socket on which two processes of a job meet: authenticated, framed, sealed, and watched for the other's end.

Before anything is decoded, each side proves that it knows a key that only this job can make, and which is another one
for each peer (handshake.py): so the called one is that peer, and not a later process on its port. Then messages:
4 bytes of length, MessagePack of fixed types, and the tag that seals them. After the meeting a link keeps the line: its
end is the peer's end, and one byte before it says that the peer left on purpose.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
import time
import weakref
from typing import TypeVar

import msgspec

from rlinf_comm.errors import DecodeError, PeerLeft, PeerLost, PeerTimeout
from rlinf_comm.peers.address import PeerAddress
from rlinf_comm.peers.deadline import Deadline
from rlinf_comm.peers.handshake import (
    GREETING,
    PROOF_BYTES,
    PROOF_TIMEOUT_S,
    Seals,
    Stranger,
    TurnedAway,
    check_greeting,
    check_proof,
    new_greeting,
    proof,
)
from rlinf_comm.peers.secret import key_for, where_it_comes_from

FAREWELL = b"F"
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 1 << 20
_MAX_TURNED_AWAY = 3
"""Who has another key is turned away every time; who came while a flood of strangers did, hardly ever."""
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


class Line:
    """One connected socket between two who have proven who they are. While they meet it carries messages; afterwards,
    only the end.
    """

    def __init__(self, prepared: socket.socket, who: str, seals: Seals) -> None:
        """`who` is at the other end, for messages."""
        self.socket = prepared
        self._who = who
        self._seals = seals

    @classmethod
    def call(cls, endpoint: tuple[str, int], key: bytes, who: str, deadline: Deadline) -> Line:
        """A line to `who` at `endpoint`, who has proven to know the key.

        Raises:
            Stranger: another process answers there.
            PeerLost: nobody does.
            PeerTimeout: the host or the process does not answer in time.
            DecodeError: a peer of another version.
        """
        num_turned_away = 0
        while True:
            start_s = time.monotonic()
            connected = _connect(endpoint, who, deadline)
            try:
                return cls(connected, who, _prove(connected, key, who, deadline))
            except Stranger as error:
                connected.close()
                # This process may have been too slow to prove who it is, say on a busy machine, or in a crowd.
                is_slow = time.monotonic() - start_s >= PROOF_TIMEOUT_S / 2
                num_turned_away += isinstance(error, TurnedAway)
                is_crowd = isinstance(error, TurnedAway) and num_turned_away < _MAX_TURNED_AWAY
                if not (is_slow or is_crowd) or deadline.has_passed:
                    raise
            except BaseException:
                connected.close()
                raise

    @classmethod
    def to_peer(cls, address: PeerAddress, deadline: Deadline) -> Line:
        """A line to the peer at `address`. Raises as call(); PeerLost also for another process in its place."""
        host, port = address.endpoint
        who = f"{address.name!r} ({address.place}, {host}:{port})"
        try:
            return cls.call(address.endpoint, peer_key(address.incarnation), who, deadline)
        except Stranger as error:
            raise PeerLost(f"{who} is gone, or of another job: {error}; {where_it_comes_from()}") from error

    # --- messages while two peers meet ---

    def tell(self, message: msgspec.Struct, deadline: Deadline) -> None:
        body = msgspec.msgpack.encode(message)
        _send(self.socket, _LENGTH.pack(len(body)) + body + self._seals.next_of_mine(body), self._who, deadline)

    def hear(self, kind: type[_Message], deadline: Deadline) -> _Message:
        """Raises PeerLost when the line ends, PeerTimeout, or DecodeError for another kind of message."""
        (num_bytes,) = _LENGTH.unpack(self._receive(_LENGTH.size, deadline))
        if num_bytes > _MAX_MESSAGE_BYTES:
            raise DecodeError(f"a message of {num_bytes} bytes between peers that meet; at most {_MAX_MESSAGE_BYTES}")
        body = self._receive(num_bytes, deadline)
        if not self._seals.is_next(body, self._receive(Seals.NUM_BYTES, deadline)):
            raise DecodeError(f"a message of {self._who} was changed on its way, or is out of turn: its seal is broken")
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DecodeError(f"no message of peers that meet: {error}") from error

    def _receive(self, num_bytes: int, deadline: Deadline) -> bytes:
        return _receive(self.socket, num_bytes, self._who, deadline)

    def close(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_RDWR)  # ends the wait of a thread that hears
        except OSError:
            pass  # it had ended by itself
        self.socket.close()


def peer_key(incarnation: bytes) -> bytes:
    """What the two prove who meet at the peer of that incarnation."""
    return key_for("peer", incarnation)


def prepare(connected: socket.socket) -> socket.socket:
    """A socket that blocks, delays nothing, and notices the end of the other's host."""
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, number in _KEEPALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), number)
    return connected


def _connect(endpoint: tuple[str, int], who: str, deadline: Deadline) -> socket.socket:
    try:
        return prepare(watched(socket.create_connection(endpoint, timeout=_socket_timeout_s(deadline))))
    except TimeoutError as error:
        raise PeerTimeout(f"{who} did not answer a connection within {deadline.timeout_s:g} s") from error
    except OSError as error:
        raise PeerLost(f"{who} cannot be reached: {error.strerror or error}; it has ended, or its host is") from error


def _prove(connected: socket.socket, key: bytes, who: str, deadline: Deadline) -> Seals:
    """The caller's part of the handshake."""
    mine = new_greeting()
    try:
        _send(connected, mine, who, deadline)
        theirs = _receive(connected, GREETING.size, who, deadline)
        check_greeting(theirs, who)
        greetings = mine + theirs
        _send(connected, proof(key, greetings, b"caller"), who, deadline)
        check_proof(_receive(connected, PROOF_BYTES, who, deadline), key, greetings, b"called")
    except PeerLost as error:
        raise TurnedAway(f"the connection ended before the other side had proven who it is ({error})") from error
    return Seals(key, greetings, b"caller")


def _send(connected: socket.socket, data: bytes, who: str, deadline: Deadline) -> None:
    try:
        connected.settimeout(_socket_timeout_s(deadline))
        connected.sendall(data)
    except TimeoutError as error:
        raise PeerTimeout(f"{who} did not take {len(data)} bytes within {deadline.timeout_s:g} s") from error
    except OSError as error:
        raise PeerLost(f"{who} broke the connection: {error.strerror or error}") from error


def _receive(connected: socket.socket, num_bytes: int, who: str, deadline: Deadline) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            connected.settimeout(_socket_timeout_s(deadline))
            received = connected.recv(num_bytes - len(data))
        except TimeoutError as error:
            raise PeerTimeout(
                f"{who} accepted a connection and then said nothing for {deadline.timeout_s:g} s"
            ) from error
        except OSError as error:
            raise PeerLost(f"{who} broke the connection: {error.strerror or error}") from error
        if not received:
            raise PeerLost(f"{who} ended the connection while it was being met")
        data += received
    return bytes(data)


def _socket_timeout_s(deadline: Deadline) -> float | None:
    return max(deadline.left_s, 0.001) if math.isfinite(deadline.timeout_s) else None


class Lifeline:
    """The line of a link, once values go another way: tells when the other side ends."""

    def __init__(self, line: Line, theirs: PeerAddress, *, carries_values: bool = False) -> None:
        """`carries_values`: the other side sends values on it, too. Whoever checks then knows that it is not its turn,
        so that whatever is there is the beginning of its farewell, which stays for the reader of values."""
        self._socket = line.socket
        self._socket.setblocking(False)
        self._carries_values = carries_values
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
            byte = self._socket.recv(1, socket.MSG_PEEK if self._carries_values else 0)
        except BlockingIOError:
            return None
        except OSError as error:
            return lost(self._theirs, f"the connection broke ({error.strerror})")
        if byte == FAREWELL or (byte and self._carries_values):
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
