"""A connection between two processes of a job, authenticated and framed.

    connection = Connection.open(endpoint, key, who, deadline)    # TCP: both sides prove that they know the key
    connection = Connection.open_local(path, who, deadline)       # a Unix socket: of this user's processes alone
    ours, theirs = Connection.pair()                              # a pipe for a child, Connection.inherited(descriptor)

Before anything is decoded on TCP, each side proves that it knows a key that only this job can make, and which is
another one for each peer (handshake.py): so the called process is that peer, and not a later one on its port. Then come
messages (frame.py), of TCP's with the tag that authenticates them. Where a connection then carries something else, its
end is the peer's end (lifeline.py).
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import weakref
from multiprocessing import reduction
from typing import Any, TypeVar

import msgspec

from rlinf_comm.errors import DecodeError, PeerLost, PeerTimeout
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.deadline import FOREVER, Deadline
from rlinf_comm.wire.frame import MAX_FRAME_BYTES, receive_exactly, receive_frame, send_all, send_frame, set_timeout
from rlinf_comm.wire.handshake import (
    GREETING,
    MAX_HANDSHAKE_BYTES,
    PROOF_BYTES,
    PROOF_TIMEOUT_S,
    Stranger,
    Tags,
    TurnedAway,
    check_greeting,
    check_proof,
    new_greeting,
    proof,
)
from rlinf_comm.wire.secret import key_for, where_it_comes_from

_MAX_TURNED_AWAY = 3
"""Who has another key is turned away every time; who came while a flood of strangers did, hardly ever."""
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""A host that vanishes without a word is noticed after 11 s; a process that ends, at once."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid

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


class Connection:
    """One connected socket. Messages are sent and received whole; one thread sends at a time, and one receives."""

    def __init__(self, connected: socket.socket, who: str, tags: Tags | None = None) -> None:
        """Private: use one of the constructors. `who` is at the other end, for messages."""
        self.socket = connected
        self.who = who
        self._tags = tags

    @classmethod
    def open(cls, endpoint: tuple[str, int], key: bytes, who: str, deadline: Deadline) -> Connection:
        """A connection to `who` at `endpoint`, which has proven to know the key.

        Raises:
            Stranger: another process answers there.
            PeerLost: nobody does.
            PeerTimeout: the host or the process does not answer in time.
            DecodeError: a process of another version.
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
    def to_peer(cls, address: PeerAddress, deadline: Deadline) -> Connection:
        """A connection to the process at `address`. Raises as open(); PeerLost also where another is in its place."""
        host, port = address.endpoint
        who = f"{address.name!r} ({address.place}, {host}:{port})"
        try:
            return cls.open(address.endpoint, peer_key(address.incarnation), who, deadline)
        except Stranger as error:
            raise PeerLost(f"{who} is gone, or of another job: {error}; {where_it_comes_from()}") from error

    @classmethod
    def open_local(cls, path: str, who: str, deadline: Deadline) -> Connection:
        """A connection to `who` at a Unix socket, of a process of this user.

        Raises:
            PeerLost: nobody listens there, or a process of another user.
        """
        connected = socket.socket(socket.AF_UNIX)
        try:
            set_timeout(connected, deadline)
            connected.connect(path)
            return cls(_of_this_user(connected, who), who)
        except OSError as error:
            connected.close()
            raise PeerLost(f"{who} cannot be reached at {path}: {error.strerror or error}") from error
        except BaseException:
            connected.close()
            raise

    @classmethod
    def accept_local(cls, listening: socket.socket, who: str, deadline: Deadline) -> Connection:
        """The next connection to a Unix socket, of a process of this user.

        Raises:
            PeerTimeout: nobody calls in time.
            PeerLost: a process of another user calls.
        """
        set_timeout(listening, deadline)
        try:
            accepted, _ = listening.accept()
        except TimeoutError as error:
            raise PeerTimeout(f"{who} has not called within {deadline.timeout_s:g} s") from error
        return cls(_of_this_user(accepted, who), who)

    @classmethod
    def pair(cls) -> tuple[Connection, Connection]:
        """Two ends of a pipe; one goes to a child process, as an argument of multiprocessing's or as a descriptor."""
        ours, theirs = socket.socketpair()
        return cls(ours, "the child process"), cls(theirs, "the parent process")

    @classmethod
    def inherited(cls, descriptor: int) -> Connection:
        """This process's end, which its parent has handed to it."""
        os.set_inheritable(descriptor, False)
        connected = socket.socket(fileno=descriptor)
        connected.setblocking(True)
        return cls(connected, "the parent process")

    def __reduce__(self) -> Any:
        return _rebuilt, (reduction.DupFd(self.socket.fileno()), self.who)

    # --- messages ---

    def send(self, message: msgspec.Struct, deadline: Deadline) -> None:
        """Sends a message of a fixed type as MessagePack. Raises PeerLost, PeerTimeout."""
        self.send_bytes(msgspec.msgpack.encode(message), deadline)

    def receive(self, kind: type[_Message], deadline: Deadline) -> _Message:
        """The next message. Raises PeerLost, PeerTimeout, or DecodeError for another kind of message."""
        body = self.receive_bytes(deadline, max_bytes=MAX_HANDSHAKE_BYTES)
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DecodeError(f"{self.who} sent a message that is none of the expected kind: {error}") from error

    def send_bytes(self, body: bytes, deadline: Deadline = FOREVER) -> None:
        """Sends one message. Raises PeerLost, PeerTimeout."""
        tag = b"" if self._tags is None else self._tags.of_next(body)
        send_frame(self.socket, body, tag, self.who, deadline)

    def receive_bytes(self, deadline: Deadline = FOREVER, *, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
        """The next message. Raises PeerLost, PeerTimeout, or DecodeError for one that is longer or was changed."""
        if self._tags is None:
            return receive_frame(self.socket, 0, max_bytes, self.who, deadline)[0]
        body, tag = receive_frame(self.socket, Tags.NUM_BYTES, max_bytes, self.who, deadline)
        if not self._tags.is_next(body, tag):
            raise DecodeError(f"a message of {self.who} was changed on its way, or is out of turn: its tag is wrong")
        return body

    def without_tags(self) -> Connection:
        """The same connection, after the handshake: what follows is not authenticated any more, as it may go through
        another process, which inherits the connection."""
        self._tags = None
        return self

    # --- waiting, and the end ---

    def fileno(self) -> int:
        return self.socket.fileno()

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether a message, a part of one, or the end has come."""
        waiting = select.poll()
        waiting.register(self.socket, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1000.0))

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes this process's descriptor; another process that has inherited the connection goes on."""
        self.socket.close()

    def hang_up(self) -> None:
        """Ends the connection for all who have it, and wakes a thread of this process that receives."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it had ended by itself

    def shut(self) -> None:
        """Hangs up and closes."""
        self.hang_up()
        self.socket.close()


def _rebuilt(descriptor: Any, who: str) -> Connection:
    connection = Connection.inherited(descriptor.detach())
    connection.who = who
    return connection


def _of_this_user(connected: socket.socket, who: str) -> socket.socket:
    """Raises PeerLost when the process at the other end of a Unix socket is of another user."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        connected.close()
        raise PeerLost(f"{who} is process {pid} of another user ({uid})")
    connected.setblocking(True)
    return connected


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
    timeout_s = max(deadline.left_s, 0.001) if deadline.is_finite else None
    try:
        return prepare(watched(socket.create_connection(endpoint, timeout=timeout_s)))
    except TimeoutError as error:
        raise PeerTimeout(f"{who} did not answer a connection within {deadline.timeout_s:g} s") from error
    except OSError as error:
        raise PeerLost(f"{who} cannot be reached: {error.strerror or error}; it has ended, or its host is") from error


def _prove(connected: socket.socket, key: bytes, who: str, deadline: Deadline) -> Tags:
    """The caller's part of the handshake."""
    mine = new_greeting()
    try:
        send_all(connected, mine, who, deadline)
        theirs = receive_exactly(connected, GREETING.size, who, deadline)
        check_greeting(theirs, who)
        greetings = mine + theirs
        send_all(connected, proof(key, greetings, b"caller"), who, deadline)
        check_proof(receive_exactly(connected, PROOF_BYTES, who, deadline), key, greetings, b"called")
    except PeerLost as error:
        raise TurnedAway(f"the connection ended before the other side had proven who it is ({error})") from error
    return Tags(key, greetings, b"caller")
