"""One connection between a client and a channel's server, after the handshake: a stream of values each way."""

from __future__ import annotations

import math

from rlinf_comm.codec import Encoded
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.connection import Connection
from rlinf_comm.wire.deadline import Deadline
from rlinf_comm.wire.lifeline import Lifeline, left
from rlinf_comm.wire.stream import Traffic, ValueReceiver, ValueSender

_NO_READ_AHEAD = 0
"""It is read by who waits for a message, and by nobody else."""


class Exchange:
    """Sends and receives messages (messages.py). For one thread at a time."""

    def __init__(self, connection: Connection, theirs: PeerAddress) -> None:
        """Owns the connection; `theirs` is at its other end."""
        self._theirs = theirs
        self._lifeline = Lifeline(connection, theirs, carries_values=True)
        traffic = Traffic("TCP", theirs)
        self._outgoing = ValueSender(connection.socket, self._lifeline, traffic)
        self._incoming = ValueReceiver(connection.socket, _NO_READ_AHEAD, traffic)
        self.is_in_turn = True
        """Whether both sides agree on who speaks next; not after a wait for an answer was broken off."""

    def send(self, message: Encoded, deadline: Deadline) -> None:
        """Whole or not at all. Raises PeerLost, PeerLeft, or PeerTimeout: it will not arrive."""
        self._outgoing.send_encoded(message, deadline)

    def receive(self, timeout_s: float = math.inf) -> tuple[bytes, list[memoryview]]:
        """The next message. Raises PeerLost, PeerLeft, PeerTimeout or TornStream."""
        return self._incoming.receive_encoded(Deadline(timeout_s))

    @property
    def is_amid_a_message(self) -> bool:
        """Whether a part of what the other side says has come."""
        return self._incoming.is_amid_a_value

    def has_more(self) -> bool:
        """Whether receive() would return at once, or raise."""
        return self._incoming.has_more()

    def check(self) -> None:
        """Raises PeerLeft or PeerLost when the other side, whose turn it is not, has ended."""
        if self._incoming.has_staged:
            kind, text = left(self._theirs)
            raise kind(text)
        self._lifeline.check(look_at_process=True)

    def leave(self) -> None:
        """Ends the connection on purpose, for its client."""
        self._outgoing.close(farewell=True)
        self._incoming.close(farewell=False)

    def shut(self, *, farewell: bool) -> None:
        """Ends the connection, for the server, or, without farewell, as if this process had been killed."""
        self._incoming.close(farewell=farewell)
        self._outgoing.close(farewell=False)
