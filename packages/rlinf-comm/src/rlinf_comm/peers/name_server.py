"""The directory of a job that needs no other: names and claims in one process, for those who know the job's secret."""

from __future__ import annotations

import math
import threading
from typing import Literal

import msgspec

from rlinf_comm.errors import NotTrusted, PeerLost
from rlinf_comm.wire.connection import Connection
from rlinf_comm.wire.deadline import Deadline
from rlinf_comm.wire.handshake import Stranger
from rlinf_comm.wire.listener import Listener
from rlinf_comm.wire.secret import key_for, where_it_comes_from

MAX_LISTED = 1000
_ANSWER_TIMEOUT_S = 10.0
"""Many times what a busy server needs: it only looks into a dictionary."""


class _Request(msgspec.Struct):
    what: Literal["swap", "get", "list"]
    name: str = ""
    expected: bytes = b""
    new: bytes = b""


class _Reply(msgspec.Struct):
    claim: bytes = b""
    names: list[str] = []


class NameServer:
    """Keeps names for this process and for those that call."""

    def __init__(self, endpoint: tuple[str, int]) -> None:
        """Binds exactly this endpoint. OSError when that is taken."""
        self._lock = threading.Lock()
        self._claims: dict[str, bytes] = {}
        self._connections: set[Connection] = set()
        host, port = endpoint
        self._listener = Listener(endpoint, _key(), self._serve, f"the directory {host}:{port}")
        self._listener.start()

    def swap(self, name: str, expected: bytes, new: bytes) -> bytes:
        """Puts `new` in the place of `expected` if that is there; what is there afterwards. b"" stands for no claim."""
        with self._lock:
            if self._claims.get(name, b"") == expected:
                self._claims[name] = new
            return self._claims.get(name, b"")

    def get(self, name: str) -> bytes:
        with self._lock:
            return self._claims.get(name, b"")

    def listed(self) -> list[str]:
        """Names that are claimed, or were; at most MAX_LISTED."""
        with self._lock:
            return list(self._claims)[:MAX_LISTED]

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            connection.shut()

    def _serve(self, connection: Connection) -> None:
        """Answers one caller until it goes."""
        with self._lock:
            self._connections.add(connection)
        try:
            while True:
                request = connection.receive(_Request, Deadline(math.inf))
                connection.send(self._answer(request), Deadline(_ANSWER_TIMEOUT_S))
        except PeerLost:
            pass  # it has gone
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.shut()

    def _answer(self, request: _Request) -> _Reply:
        if request.what == "list":
            return _Reply(names=self.listed())
        if request.what == "get":
            return _Reply(self.get(request.name))
        return _Reply(self.swap(request.name, request.expected, request.new))


class ServedNames:
    """The names of another process. Safe for several threads."""

    def __init__(self, connection: Connection) -> None:
        """Private: use ServedNames.at."""
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def at(cls, endpoint: tuple[str, int], deadline: Deadline) -> ServedNames:
        """The names that are served at `endpoint`.

        Raises:
            PeerLost: nobody does.
            NotTrusted: somebody of another job does, or something else.
            PeerTimeout: it does not answer.
        """
        host, port = endpoint
        try:
            return cls(Connection.open(endpoint, _key(), f"the directory {host}:{port}", deadline))
        except Stranger as error:
            raise NotTrusted(
                f"{host}:{port} is no directory of this job: {error}; {where_it_comes_from()}. Give all processes of "
                "the job the same secret, or another endpoint"
            ) from error

    def swap(self, name: str, expected: bytes, new: bytes) -> bytes:
        return self._ask(_Request("swap", name, expected, new)).claim

    def get(self, name: str) -> bytes:
        return self._ask(_Request("get", name)).claim

    def listed(self) -> list[str]:
        return self._ask(_Request("list")).names

    def close(self) -> None:
        self._connection.shut()

    def _ask(self, request: _Request) -> _Reply:
        deadline = Deadline(_ANSWER_TIMEOUT_S)
        with self._lock:
            try:
                self._connection.send(request, deadline)
                return self._connection.receive(_Reply, deadline)
            except BaseException:  # also a signal: the reply may still come, and would be taken for the next one's
                self._connection.shut()
                raise


def _key() -> bytes:
    return key_for("directory")
