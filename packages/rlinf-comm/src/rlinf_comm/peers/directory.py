"""Names to addresses: a directory that one of the peers serves.

A name is claimed by one atomic step, so that it has one owner. A claim of a peer that does not answer any more can be
taken over. Where the server has gone, and another serves the same endpoint, the client connects anew and puts its own
claim back. Only processes that know the secret of the job (secret.py) can claim or look up a name.

The server lives in one process. When that one ends, links go on, new names cannot be found until somebody serves the
endpoint again; so serve it from a process that outlives the others.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from rlinf_comm.errors import CommError, NotTrusted, PeerLost, PeerNameTaken, PeerTimeout
from rlinf_comm.peers.name_server import NameServer, ServedNames
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.deadline import Deadline
from rlinf_comm.wire.secret import require_secret_beyond

_RECONNECT_TIMEOUT_S = 1.0

Names = NameServer | ServedNames
"""The names of this process, or of another one. Both raise CommError when they cannot be reached."""

_Result = TypeVar("_Result")


class Directory:
    """The peers of one job by name."""

    def __init__(self, connect: Callable[[Deadline], Names], place: str, deadline: Deadline) -> None:
        """Private: use Directory.of."""
        self._connect = connect
        self._place = place
        self._names: Names | None = connect(deadline)
        self._claim: tuple[str, bytes] | None = None

    @classmethod
    def of(cls, where: str, serve: bool | None, deadline: Deadline) -> Directory:
        """The directory at "host:port".

        Args:
            where: Endpoint of a directory.
            serve: Serve it from this process; None: when it is on this host and nobody does.
            deadline: For reaching it.

        Raises:
            PeerTimeout: nobody serves it.
            NotTrusted: what is served there is not of this job.
        """
        host, separator, port = where.rpartition(":")
        if not separator or not port.isdigit():
            raise ValueError(f"directory={where!r}; give 'host:port', [::1]:29400 for IPv6")
        endpoint = host.strip("[]"), int(port)
        require_secret_beyond(endpoint[0], f"the directory {where}")
        return cls(lambda until: _served_or_serving(endpoint, serve, until), where, deadline)

    def claim(self, address: PeerAddress, is_living: Callable[[PeerAddress], bool]) -> None:
        """Makes `address` what its name means.

        Raises:
            PeerNameTaken: a living peer has the name.
        """
        claim = msgspec.msgpack.encode(address)
        expected = b""
        while (current := self._try(lambda names, before=expected: names.swap(address.name, before, claim))) != claim:
            if current:
                owner = _address_in(current)
                if is_living(owner):
                    raise PeerNameTaken(
                        f"{address.name!r} is taken in the directory {self._place} by {owner.place}, which is alive; "
                        "choose another name, or end that process"
                    )
            expected = current
        self._claim = address.name, claim

    def find(self, name: str) -> PeerAddress | None:
        """The latest claim of the name, by a peer alive or dead; None when there is none, or it has left."""
        claim = self._try(lambda names: names.get(name))
        return _address_in(claim) if claim else None

    def leave(self) -> None:
        """Gives the claim up, and stops serving. Without effect when the directory is gone."""
        names, self._names = self._names, None
        if names is None:
            return
        try:
            if self._claim is not None:
                name, claim = self._claim
                names.swap(name, claim, b"")
        except CommError:
            pass  # no server, no claim
        names.close()

    def describe(self) -> str:
        """Says where the directory is and who is in it, for messages."""
        names = sorted({name for name in self._try(lambda names: names.listed()) if self.find(name) is not None})
        listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        return f"the directory {self._place} (in it: {listed or 'nobody'})"

    def _try(self, call: Callable[[Names], _Result]) -> _Result:
        """Calls, and calls once more with a new connection when the directory fails."""
        if self._names is None:
            raise CommError(f"the directory {self._place} was left by this process")
        try:
            return call(self._names)
        except CommError as error:
            try:
                self._names = names = self._connect(Deadline(_RECONNECT_TIMEOUT_S))
                if self._claim is not None:
                    name, claim = self._claim
                    names.swap(name, b"", claim)
                return call(names)
            except NotTrusted:
                raise
            except CommError:
                raise CommError(
                    f"the directory {self._place} does not answer any more; peers that have met go on, "
                    "others cannot be found until it is served again"
                ) from error


def _served_or_serving(endpoint: tuple[str, int], serve: bool | None, deadline: Deadline) -> Names:
    host, port = endpoint
    may_serve = serve or (serve is None and _is_here(host))
    while True:
        try:
            if not serve:
                return ServedNames.at(endpoint, deadline)
        except PeerLost:
            pass  # nobody serves it
        if may_serve:
            try:
                return NameServer(endpoint)
            except OSError as error:
                if serve or error.errno != errno.EADDRINUSE:  # else another has been faster
                    raise
        if deadline.has_passed:
            raise PeerTimeout(
                f"nobody serves the directory {host}:{port} within timeout_s={deadline.timeout_s:g}; start the process "
                "that serves it (Peer.join(..., serve=True)), or check host and port"
            )
        time.sleep(min(0.05, deadline.left_s))


def _is_here(host: str) -> bool:
    """Whether this host has the address."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as attempt:
            try:
                attempt.bind(address)
            except OSError:
                continue
            return True
    return False


def route_to(where: str) -> str:
    """The address of this host that others see who reach the directory too."""
    host = where.rpartition(":")[0].strip("[]")
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as attempt:
        attempt.connect(address)  # sends nothing: a datagram socket only learns its route
        return attempt.getsockname()[0]


def _address_in(claim: bytes) -> PeerAddress:
    return msgspec.msgpack.decode(claim, type=PeerAddress)
