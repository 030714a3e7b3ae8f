"""What a transport is: one direction between two peers, tried before it is used.

A transport carries values from one peer, the sender, to another, the receiver; the way back is another link, perhaps
of another transport. When a peer first sends to another, it goes through its transports in order of speed and takes
the first that really carries a probe:

    objection(mine, theirs)     known without trying, from the two addresses
    offer(negotiation)              the sender's part: sends a probe, checks that it came back, returns its end
    answer(offer, negotiation)      the receiver's part: gives back the probe that arrived, returns its end

Further ones are further classes in the list of Peer(transports=...).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.connection import Connection
from rlinf_comm.wire.deadline import Deadline

PROBE_BYTES = 4096
"""One page: larger than what any transport treats as a special case of small."""


@dataclass(frozen=True, slots=True)
class ChosenTransport:
    """How values reach a peer, and why this way.

    Example: ChosenTransport("tcp", "a probe of 4096 bytes came back", (("shared memory", "another host ..."),))
    """

    name: str
    reason: str
    refused: tuple[tuple[str, str], ...]
    """(name, reason) of those that were tried before."""

    def __str__(self) -> str:
        others = "".join(f"; not {name}: {reason}" for name, reason in self.refused)
        return f"{self.name}: {self.reason}{others}"


class TransportOffer(msgspec.Struct, tag=True):
    """The sender would like to use this transport."""

    transport: str
    details: bytes


class ProbeReply(msgspec.Struct):
    """What the receiver has got of the probe, or why nothing."""

    arrived: bytes = b""
    refusal: str = ""


class Unusable(Exception):
    """This transport does not work for this pair; the text says why."""


@dataclass(frozen=True, slots=True)
class Negotiation:
    """Two peers about to be linked, as one of them sees it."""

    mine: PeerAddress
    theirs: PeerAddress
    connection: Connection
    """The authenticated socket between the two; the link that is made owns it."""
    capacity_bytes: int
    """Bytes of values that may be on their way before the sender has to wait."""
    deadline: Deadline


def send_probe(name: str, details: bytes, probe: bytes, negotiation: Negotiation) -> Connection:
    """Offers the transport `name`, whose receiver answers with what it has got of the probe.

    Returns:
        The negotiation's connection.

    Raises:
        Unusable: the receiver refuses, or something else has arrived.
    """
    connection = negotiation.connection
    connection.send(TransportOffer(name, details), negotiation.deadline)
    answer = connection.receive(ProbeReply, negotiation.deadline)
    if answer.refusal:
        raise Unusable(answer.refusal)
    if answer.arrived != probe:
        raise Unusable(f"a probe of {len(probe)} bytes arrived as something else")
    return connection


class Outgoing(Protocol):
    """The sender's end. Safe for several threads."""

    def send(self, value: Any, deadline: Deadline) -> None:
        """Hands one value to the transport, whole or not at all.

        Raises:
            PeerLost, PeerLeft: the receiver is gone.
            PeerTimeout: not within the deadline; the receiver will not see any of it.
            UnsupportedValueError: the value cannot cross.
        """
        ...

    def check(self) -> None:
        """Raises PeerLost or PeerLeft when the receiver is gone."""
        ...

    def close(self, *, farewell: bool) -> None:
        """Ends the link. Without farewell the receiver sees what it would see if this process were killed."""
        ...


class Incoming(Protocol):
    """The receiver's end. Safe for several threads."""

    def receive(self, deadline: Deadline) -> Any:
        """The next value in the order of sends; what was sent whole before the sender's end is still handed out.

        Raises:
            PeerLost, PeerLeft: the sender is gone, and nothing is left.
            PeerTimeout: nothing within the deadline.
            DecodeError: this value cannot be built here; the next can.
            TornStream: the link is of no use any more.
        """
        ...

    def is_spent(self) -> bool:
        """Whether the sender is gone, and nothing is left."""
        ...

    def close(self, *, farewell: bool) -> None: ...


class Transport(Protocol):
    """One way to carry values. Objects of this kind have no state of their own."""

    @property
    def name(self) -> str:
        """The name in Peer(transports=...), RLINF_COMM_TRANSPORTS and messages."""
        ...

    def objection(self, mine: PeerAddress, theirs: PeerAddress) -> str | None: ...

    def offer(self, negotiation: Negotiation) -> tuple[Outgoing, str]:
        """The sender's end, and the reason why it is usable. Raises Unusable."""
        ...

    def answer(self, details: bytes, negotiation: Negotiation) -> tuple[Incoming, bytes]:
        """The receiver's end, and what arrived of the probe. Raises Unusable."""
        ...
