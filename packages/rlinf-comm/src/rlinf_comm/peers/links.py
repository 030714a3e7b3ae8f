"""The outgoing links of a peer, by the names of the other peers: created when needed, dropped when the other ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rlinf_comm.errors import PeerLeft, PeerLost, PeerTimeout
from rlinf_comm.peers.negotiation import OutgoingLink
from rlinf_comm.wire.deadline import Deadline


class PeerLinks:
    """A peer's outgoing links. Thread-safe: threads connect to different peers concurrently, and to each peer once."""

    def __init__(self, mine: str, make: Callable[[str, Deadline], OutgoingLink]) -> None:
        """`make` connects to a peer; `mine` is this peer's name in messages."""
        self._mine = mine
        self._make = make
        self._lock = threading.Lock()
        self._links: dict[str, OutgoingLink] = {}
        self._making: dict[str, threading.Lock] = {}
        self._losses: dict[str, PeerLost] = {}
        """Name of a peer whose link was swept -> its error, kept until a send to that peer raises it."""

    def get(self, name: str) -> OutgoingLink | None:
        return self._links.get(name)

    def to(self, name: str, deadline: Deadline) -> OutgoingLink:
        """The link to that peer; connects if there is none."""
        link = self._links.get(name)
        if link is not None:
            return link
        with self._lock:
            making = self._making.setdefault(name, threading.Lock())
        with deadline.holding(making) as held:
            if not held:
                raise PeerTimeout(
                    f"{self._mine!r}: another thread has been connecting to {name!r} for {deadline.timeout_s:g} s"
                )
            link = self._links.get(name)
            if link is None:
                link = self._make(name, deadline)
                with self._lock:
                    self._links[name] = link
        return link

    def send(self, to: str, value: Any, deadline: Deadline) -> None:
        """Sends over the link to that peer; a link that turns out to be lost is dropped."""
        if self._losses and (loss := self._losses.pop(to, None)) is not None:
            raise loss
        link = self.to(to, deadline)
        try:
            link.outgoing.send(value, deadline)
        except PeerLost:
            self.drop(to, link)
            self._losses.pop(to, None)  # of this link, if it was swept meanwhile: a loss is raised once
            raise

    def look_at(self, name: str, deadline: Deadline) -> None:
        """Raises PeerLost if that peer is gone; connects to it if there is no link. A slow peer is not gone."""
        link = self.get(name)
        try:
            if link is None:
                self.to(name, deadline)
            else:
                link.outgoing.check()
        except PeerTimeout:
            pass
        except PeerLost:
            if link is not None:
                self.drop(name, link)
            raise

    def drop(self, name: str, link: OutgoingLink, loss: PeerLost | None = None) -> None:
        """Frees a link. `loss`: its error, for the next send; one that was dropped before has raised it already."""
        with self._lock:
            if self._links.get(name) is link:
                del self._links[name]
                if loss is not None:
                    self._losses[name] = loss
        link.outgoing.close(farewell=False)

    def sweep(self) -> None:
        """Frees the links of peers that have ended, and keeps only their errors."""
        for name, link in list(self._links.items()):
            try:
                link.outgoing.check()
            except PeerLeft:
                self.drop(name, link)
            except PeerLost as error:
                self.drop(name, link, PeerLost(str(error)))  # without the frames, which hold the link's memory

    def close(self, *, farewell: bool) -> None:
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.outgoing.close(farewell=farewell)
