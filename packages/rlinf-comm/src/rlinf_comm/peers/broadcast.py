"""One value to several peers: directly, or to other hosts once each where that is less to send (relay.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from rlinf_comm import codec
from rlinf_comm.errors import BroadcastError, CommError, PeerTimeout
from rlinf_comm.peers.address import PeerAddress
from rlinf_comm.peers.background import Background, Once
from rlinf_comm.peers.deadline import Deadline
from rlinf_comm.peers.links import Links
from rlinf_comm.peers.relay import MIN_RELAYED_BYTES, Dispatch, Relay, is_lost
from rlinf_comm.peers.spanning import Branch, spanning_branches


class Broadcaster:
    """The sending side of one peer's broadcasts."""

    def __init__(
        self,
        mine: PeerAddress,
        links: Links,
        relay: Relay,
        background: Background,
        find: Callable[[str], PeerAddress | None],
    ) -> None:
        self._mine = mine
        self._links = links
        self._relay = relay
        self._background = background
        self._find = find

    def send(self, value: Any, names: Sequence[str], deadline: Deadline) -> None:
        """Does what Peer.broadcast promises, for names that differ."""
        encoded = Once(lambda: codec.encode(value))
        plain = Once(lambda: codec.decode(encoded.get().header, encoded.get().buffers))
        branches = self._branches(names)
        with deadline.holding(self._relay.turn) if branches else nullcontext(True) as has_turn:
            if not has_turn:
                raise PeerTimeout(
                    f"{self._mine.name!r}: broadcast not done within timeout_s={deadline.timeout_s:g}: another thread "
                    "is broadcasting to other hosts"
                )
            dispatch = self._dispatched(encoded, branches, deadline) if branches else None
            relayed = set(dispatch.names if dispatch else ())

            def send(name: str) -> None:
                if dispatch is None or name not in relayed:
                    self._links.send(name, value, deadline, plain.get)
                else:
                    self._links.send(name, self._relay.announcement(dispatch, name, plain.get), deadline)

            failures = self._background.for_each(send, sorted(names, key=lambda name: name in relayed))
        if failures:
            reasons = "; ".join(f"{name}: {error}" for name, error in failures.items())
            raise BroadcastError(f"{len(failures)} of {len(names)} peers were not reached: {reasons}", failures)

    def _branches(self, names: Sequence[str]) -> tuple[Branch, ...]:
        links = ((name, self._links.get(name)) for name in names)
        addresses = (self._find(name) if link is None else link.address for name, link in links)
        return spanning_branches(self._mine.host, [address for address in addresses if address is not None])

    def _dispatched(self, encoded: Once, branches: Sequence[Branch], deadline: Deadline) -> Dispatch | None:
        """Sends parcels, or returns None where that does not pay or cannot be done: then each send says why."""
        try:
            if encoded.get().num_bytes < MIN_RELAYED_BYTES:
                return None
        except CommError:
            return None
        return self._relay.dispatch(encoded.get(), branches, deadline, self._has_lost)

    def _has_lost(self, theirs: PeerAddress) -> bool:
        link = self._links.get(theirs.name)
        return link is not None and link.address.incarnation == theirs.incarnation and is_lost(link)
