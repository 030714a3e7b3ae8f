"""The links that come in from one name: of its present process, and of those before it that still have something."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from rlinf_comm.errors import PeerLeft, PeerLost, PeerTimeout, TornStream
from rlinf_comm.peers.transports.base import Incoming
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.deadline import Deadline


class NoLink(Exception):
    """Nothing has come in from this name, or what there was has just ended."""


@dataclass(frozen=True, slots=True, eq=False)
class IncomingLink:
    """One link that has come in."""

    theirs: PeerAddress
    incoming: Incoming


class Inbox:
    """What one sender has sent, in its order, over all of its links."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrivals: deque[IncomingLink] = deque()
        self._loss: PeerLost | None = None
        """The loss of a process that ended when its links had nothing left to receive; the next receive raises it, and
        only that one."""
        self.ended: bytes | None = None
        """Token of the latest process whose end a receive has been told."""

    def add(self, arrival: IncomingLink) -> None:
        with self._lock:
            self._arrivals.append(arrival)

    @property
    def latest(self) -> PeerAddress | None:
        with self._lock:
            return self._arrivals[-1].theirs if self._arrivals else None

    def is_empty(self) -> bool:
        with self._lock:
            return not (self._arrivals or self._loss)

    def receive(self, deadline: Deadline) -> Any:
        """The next value.

        Raises:
            NoLink: there is no link, or not any more.
            PeerLost, PeerLeft: once for each process that has ended, after all that it had sent.
        """
        with self._lock:
            loss, self._loss = self._loss, None
            if loss is not None:
                raise loss
            if not self._arrivals:
                raise NoLink
            arrival = self._arrivals[0]
        try:
            return arrival.incoming.receive(deadline)
        except PeerLost as error:
            if not self._drop(arrival):
                raise NoLink from None  # another thread has been told
            if isinstance(error, PeerLeft) and self.latest is not None:
                raise NoLink from None  # it has left and come back, and nothing is lost
            self.ended = arrival.theirs.incarnation
            raise
        except TornStream:
            self._drop(arrival)
            raise

    def _drop(self, arrival: IncomingLink) -> bool:
        with self._lock:
            if arrival not in self._arrivals:
                return False
            self._arrivals.remove(arrival)
        arrival.incoming.close(farewell=False)
        return True

    def sweep(self) -> None:
        """Closes the links of processes that have ended with nothing left, and keeps only their loss to be told."""
        with self._lock:
            arrivals = list(self._arrivals)
        for arrival in arrivals:
            if not arrival.incoming.is_spent():
                continue
            try:
                arrival.incoming.receive(Deadline(0.0))
            except PeerTimeout:
                continue  # another thread receives from it, and will be told
            except PeerLost as error:
                if self._drop(arrival) and not (isinstance(error, PeerLeft) and self.latest is not None):
                    self._loss = type(error)(str(error))  # without the frames, which hold the link's memory
                    self.ended = arrival.theirs.incarnation

    def close(self, *, farewell: bool) -> None:
        with self._lock:
            arrivals = list(self._arrivals)
            self._arrivals.clear()
        for arrival in arrivals:
            arrival.incoming.close(farewell=farewell)
