"""Which way a broadcast takes: from its sender to the first peer of each host, and on from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlinf_comm.peers.address import HostIdentity, PeerAddress
from rlinf_comm.records import record

_MAX_HOSTS_FROM_ONE = 3
"""Most hosts that a sender serves itself. With more, a host sends to two others at most: the depth is log2 of their
number, and no uplink carries more than two copies."""


@record
@dataclass(frozen=True, slots=True)
class Branch:
    """A peer, and whom it passes on to.

    Example: two peers of one host: Branch(address of "engine/0", (Branch(address of "engine/1", ()),))
    """

    address: PeerAddress
    then: tuple[Branch, ...]

    def ways(self) -> Iterator[tuple[PeerAddress, ...]]:
        """Yields the way to each peer of the branch: the peers that a value passes, that peer last."""
        yield (self.address,)
        for branch in self.then:
            for way in branch.ways():
                yield (self.address, *way)


def spanning_branches(here: HostIdentity, receivers: Sequence[PeerAddress]) -> tuple[Branch, ...]:
    """The branches of those receivers that are better reached through others; the rest is for sending directly.

    These are the peers of this host, and with few hosts those that are alone on theirs.
    """
    by_host: dict[str, list[PeerAddress]] = {}
    for receiver in receivers:
        if receiver.host.boot_id != here.boot_id:
            by_host.setdefault(receiver.host.boot_id, []).append(receiver)
    hosts = list(by_host.values())
    if len(hosts) > _MAX_HOSTS_FROM_ONE:
        return _in_halves(hosts)
    return tuple(_branch(peers, ()) for peers in hosts if len(peers) > 1)


def _in_halves(hosts: Sequence[Sequence[PeerAddress]]) -> tuple[Branch, ...]:
    halves = (hosts[::2], hosts[1::2])
    return tuple(_branch(half[0], _in_halves(half[1:])) for half in halves if half)


def _branch(peers: Sequence[PeerAddress], farther: tuple[Branch, ...]) -> Branch:
    """One host: its first peer serves other hosts and its mates."""
    first, *mates = peers
    return Branch(first, farther + tuple(Branch(mate, ()) for mate in mates))
