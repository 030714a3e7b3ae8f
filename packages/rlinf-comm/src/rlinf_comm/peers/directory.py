"""Names to addresses, in any torch.distributed.Store.

A name is claimed by one atomic compare_set, so that it has one owner. A claim of a peer that does not answer any more
can be taken over. Where the store's server has gone, and another serves the same endpoint, the client connects anew
and puts its own claim back.

The store's server lives in one process. When that one ends, links go on, new names cannot be found until somebody
serves the endpoint again; so serve it from a process that outlives the others.
"""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rlinf_comm.errors import CommError, PeerNameTaken, PeerTimeout
from rlinf_comm.peers.address import PeerAddress
from rlinf_comm.peers.deadline import Deadline

if TYPE_CHECKING:
    import torch.distributed

_PREFIX = "rlinf-comm/peers/"
_LEFT = "left"
"""Stands where a claim was, since a store cannot delete a key only if it is unchanged."""

_RECONNECT_TIMEOUT_S = 1.0

_Result = TypeVar("_Result")


class Directory:
    """The peers of one job by name."""

    def __init__(self, connect: Callable[[Deadline], torch.distributed.Store], place: str, deadline: Deadline) -> None:
        """Private: use Directory.of."""
        self._connect = connect
        self._place = place
        self._store: Any = connect(deadline)
        self._claim: tuple[str, str] | None = None

    @classmethod
    def of(cls, where: str | torch.distributed.Store, serve: bool | None, deadline: Deadline) -> Directory:
        """The directory at "host:port", or in a store that is already there.

        Args:
            where: Endpoint of a torch.distributed.TCPStore, or any Store.
            serve: Serve it from this process; None: when it is on this host and nobody does.
            deadline: For reaching it.

        Raises:
            PeerTimeout: nobody serves it.
        """
        if not isinstance(where, str):
            return cls(lambda _: where, f"the {type(where).__name__} given", deadline)
        host, separator, port = where.rpartition(":")
        if not separator or not port.isdigit():
            raise ValueError(
                f"directory={where!r}; give 'host:port', [::1]:29400 for IPv6, or a torch.distributed.Store"
            )
        endpoint = host.strip("[]"), int(port)
        return cls(lambda until: _tcp_store(endpoint, serve, until), where, deadline)

    def claim(self, address: PeerAddress, is_living: Callable[[PeerAddress], bool]) -> None:
        """Makes `address` what its name means.

        Raises:
            PeerNameTaken: a living peer has the name.
        """
        key, text = _PREFIX + address.name, _to_text(address)
        expected = ""
        while (current := self._set(key, expected, text)) != text:
            if current != _LEFT:
                owner = _from_text(current)
                if is_living(owner):
                    raise PeerNameTaken(
                        f"{address.name!r} is taken in the directory {self._place} by {owner.place}, which is alive; "
                        "choose another name, or end that process"
                    )
            expected = current
        self._claim = key, text
        index = self._try(lambda: self._store.add(_PREFIX + "/count", 1))
        self._try(lambda: self._store.set(f"{_PREFIX}/{index}", address.name))

    def find(self, name: str) -> PeerAddress | None:
        """The latest claim of the name, by a peer alive or dead; None when there is none, or it has left."""
        key = _PREFIX + name
        text = self._try(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if text is None or text.decode() == _LEFT else _from_text(text.decode())

    def leave(self) -> None:
        """Gives the claim up, and stops serving. Without effect when the directory is gone."""
        store, self._store = self._store, None
        if self._claim is not None and store is not None:
            try:
                store.compare_set(*self._claim, _LEFT)
            except RuntimeError:
                pass  # no server, no claim

    def describe(self) -> str:
        """Where it is and who is in it, for messages."""

        def read() -> list[str]:
            count = self._store.add(_PREFIX + "/count", 0)
            keys = [f"{_PREFIX}/{index}" for index in range(1, min(count, 1000) + 1)]
            return [self._store.get(key).decode() for key in keys if self._store.check([key])]

        names = sorted({name for name in self._try(read) if self.find(name) is not None})
        listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        return f"the directory {self._place} (in it: {listed or 'nobody'})"

    def _set(self, key: str, expected: str, text: str) -> str:
        return self._try(lambda: self._store.compare_set(key, expected, text)).decode()

    def _try(self, call: Callable[[], _Result]) -> _Result:
        """Once more with a new connection when the store fails."""
        if self._store is None:
            raise CommError(f"the directory {self._place} was left by this process")
        try:
            return call()
        except RuntimeError as error:
            try:
                self._store = self._connect(Deadline(_RECONNECT_TIMEOUT_S))
                if self._claim is not None:
                    key, text = self._claim
                    self._store.compare_set(key, "", text)
                return call()
            except (RuntimeError, CommError):
                raise CommError(
                    f"the directory {self._place} does not answer any more; peers that have met go on, "
                    "others cannot be found until it is served again"
                ) from error


def _tcp_store(endpoint: tuple[str, int], serve: bool | None, deadline: Deadline) -> Any:
    from torch.distributed import DistNetworkError, TCPStore

    host, port = endpoint
    timeout = timedelta(seconds=max(min(deadline.left_s, 3600.0), 0.001))
    if serve or (serve is None and not _is_served(endpoint, deadline) and _is_here(host)):
        try:
            return TCPStore(host, port, None, True, timeout=timeout, wait_for_workers=False)
        except DistNetworkError:  # another has been faster
            if serve:
                raise
    while not _is_served(endpoint, deadline):  # TCPStore would print a stack trace for each attempt
        if deadline.has_passed:
            raise PeerTimeout(
                f"nobody serves the directory {host}:{port} within timeout_s={deadline.timeout_s:g}; start the process "
                "that serves it (Peer.join(..., serve=True)), or check host and port"
            )
        time.sleep(min(0.05, deadline.left_s))
    return TCPStore(host, port, None, False, timeout=timeout)


def _is_served(endpoint: tuple[str, int], deadline: Deadline) -> bool:
    try:
        socket.create_connection(endpoint, timeout=max(min(deadline.left_s, 5.0), 0.01)).close()
    except OSError:
        return False
    return True


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


def route_to(where: str | torch.distributed.Store) -> str:
    """The address of this host that others see who reach the directory too; loopback for a store that says nothing."""
    while hasattr(where, "underlying_store"):  # a prefix
        where = where.underlying_store  # pyright: ignore[reportAttributeAccessIssue]
    host = where.rpartition(":")[0].strip("[]") if isinstance(where, str) else getattr(where, "host", "127.0.0.1")
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as attempt:
        attempt.connect(address)  # sends nothing: a datagram socket only learns its route
        return attempt.getsockname()[0]


def _to_text(address: PeerAddress) -> str:
    return base64.b85encode(msgspec.msgpack.encode(address)).decode()


def _from_text(text: str) -> PeerAddress:
    return msgspec.msgpack.decode(base64.b85decode(text), type=PeerAddress)
