"""The peers that a check of a transport needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rlinf_comm.peers import Peer, Transport

HANG_S = 20.0
"""A check that takes longer has found a hang."""
SMALL_CAPACITY_BYTES = 1 << 20


class PeerLike(Protocol):
    """What the checks need of a peer; rlinf_comm.peers.Peer says what each method means."""

    @property
    def name(self) -> str: ...
    def send(self, to: str, value: Any, *, timeout_s: float) -> None: ...
    def receive(self, from_: str, *, timeout_s: float) -> Any: ...
    def close(self) -> None: ...


class PeersLike(Protocol):
    """Makes the peers of one check."""

    def make(self, *names: str, capacity_bytes: int = SMALL_CAPACITY_BYTES) -> Sequence[PeerLike]:
        """New peers, which know each other and those made before."""
        ...

    def crash(self, peer: PeerLike) -> None:
        """Ends the peer as the kernel ends those of a killed process: nothing more is said or sent."""
        ...


class PeersOver:
    """Peers of this process that use one transport only, by its name or one of your own.

    with PeersOver(MyTransport()) as peers:
        check(peers)
    """

    def __init__(self, transport: str | Transport) -> None:
        self._transport = transport
        self._peers: dict[str, Peer] = {}

    def make(self, *names: str, capacity_bytes: int = SMALL_CAPACITY_BYTES) -> Sequence[Peer]:
        peers = [Peer.listen(name, transports=(self._transport,), capacity_bytes=capacity_bytes) for name in names]
        for peer in peers:
            self._peers.pop(peer.name, None)
            for other in self._peers.values():
                peer.connect(other.address, timeout_s=HANG_S)
            self._peers[peer.name] = peer
        return peers

    def crash(self, peer: PeerLike) -> None:
        self._peers.pop(peer.name)._end(farewell=False)

    def __enter__(self) -> PeersOver:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers.values():
            peer.close()
