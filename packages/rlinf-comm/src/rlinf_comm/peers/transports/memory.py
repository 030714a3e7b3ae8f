"""Transport within one process: values are handed over by reference, without a copy.

Sender and receiver hold the same object afterwards, so that a later write by either is seen by both, and values that
could not cross a process border do cross. A link holds at most `_MAX_VALUES` values that wait.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, Protocol

from rlinf_comm.errors import PeerLost
from rlinf_comm.peers.transports.base import Incoming, Negotiation, Outgoing, Unusable
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.deadline import Deadline
from rlinf_comm.wire.lifeline import left, lost
from rlinf_comm.wire.stream import Traffic

_MAX_VALUES = 4096


class Door(Protocol):
    """The end at which a peer of this process takes links."""

    def enter(self, transport: str, theirs: PeerAddress, incoming: Incoming) -> None:
        """Raises Unusable when the peer does not want it."""
        ...


_servers: weakref.WeakValueDictionary[bytes, Door] = weakref.WeakValueDictionary()
"""The doors of this process's peers, by the peers' tokens."""


def open_door(incarnation: bytes, server: Door) -> None:
    _servers[incarnation] = server


def shut_door(incarnation: bytes) -> None:
    _servers.pop(incarnation, None)


class MemoryTransport:
    """Hands values over by reference, between two peers of one process."""

    name = "memory"
    needs_connection = False

    def objection(self, mine: PeerAddress, theirs: PeerAddress) -> str | None:
        if theirs.incarnation in _servers:
            return None
        if (mine.host, mine.pid) == (theirs.host, theirs.pid):
            return "the peer of this process has been closed"
        return "another process"

    def offer(self, negotiation: Negotiation) -> tuple[Outgoing, str]:
        server = _servers.get(negotiation.theirs.incarnation)
        if server is None:
            raise Unusable("the peer has just been closed")
        pipe = _Pipe()
        server.enter(self.name, negotiation.mine, _MemoryIncoming(pipe, Traffic(self.name, negotiation.mine)))
        return _MemoryOutgoing(pipe, Traffic(self.name, negotiation.theirs)), "the same process; values by reference"

    def answer(self, details: bytes, negotiation: Negotiation) -> tuple[Incoming, bytes]:
        raise Unusable("another process")


class _Pipe:
    """What the two ends share."""

    def __init__(self) -> None:
        self.values: deque[Any] = deque()
        self.changed = threading.Condition()
        self.sender_end: bool | None = None
        """None while it is there, then whether it said farewell."""
        self.receiver_end: bool | None = None


def _gone(theirs: PeerAddress, farewell: bool) -> PeerLost:
    kind, text = left(theirs) if farewell else lost(theirs, "its end of the link was dropped")
    return kind(text)


class _MemoryOutgoing:
    def __init__(self, pipe: _Pipe, traffic: Traffic) -> None:
        self._pipe = pipe
        self._traffic = traffic

    def send(self, value: Any, deadline: Deadline) -> None:
        pipe = self._pipe
        with pipe.changed:
            self.check()
            while len(pipe.values) >= _MAX_VALUES:
                if deadline.has_passed:
                    detail = f"{_MAX_VALUES} values wait for the receiver"
                    raise self._traffic.timeout("send to", deadline, detail)
                pipe.changed.wait(deadline.slice_s)
                self.check()
            pipe.values.append(value)
            self._traffic.count()
            pipe.changed.notify_all()

    def check(self) -> None:
        if self._pipe.receiver_end is not None:
            raise _gone(self._traffic.theirs, self._pipe.receiver_end)

    def close(self, *, farewell: bool) -> None:
        with self._pipe.changed:
            self._pipe.sender_end = farewell if self._pipe.sender_end is None else self._pipe.sender_end
            self._pipe.changed.notify_all()


class _MemoryIncoming:
    def __init__(self, pipe: _Pipe, traffic: Traffic) -> None:
        self._pipe = pipe
        self._traffic = traffic

    def receive(self, deadline: Deadline) -> Any:
        pipe = self._pipe
        with pipe.changed:
            while not pipe.values:
                if pipe.sender_end is not None:
                    raise _gone(self._traffic.theirs, pipe.sender_end)
                if deadline.has_passed:
                    raise self._traffic.timeout("receive from", deadline, "it has sent nothing")
                pipe.changed.wait(deadline.slice_s)
            value = pipe.values.popleft()
            self._traffic.count()
            pipe.changed.notify_all()
            return value

    def is_spent(self) -> bool:
        return self._pipe.sender_end is not None and not self._pipe.values

    def close(self, *, farewell: bool) -> None:
        with self._pipe.changed:
            self._pipe.receiver_end = farewell if self._pipe.receiver_end is None else self._pipe.receiver_end
            self._pipe.changed.notify_all()
