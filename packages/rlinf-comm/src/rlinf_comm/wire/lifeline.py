"""The end of a connection is the end of the process behind it; one byte before it says that it left on purpose."""

from __future__ import annotations

import select
import socket
import threading

from rlinf_comm.errors import PeerLeft, PeerLost
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.connection import Connection

FAREWELL = b"F"


class Lifeline:
    """A connection whose values go another way: tells when the other side ends."""

    def __init__(self, connection: Connection, theirs: PeerAddress, *, carries_values: bool = False) -> None:
        """`carries_values`: the other side sends values on it, too. Whoever checks then knows that it is not its turn,
        so that whatever is there is the beginning of its farewell, which stays for the reader of values."""
        self._socket = connection.socket
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
