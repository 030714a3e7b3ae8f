"""The transport protocol: one direction between two peers, tested before it is used.

A transport carries values from one peer, the sender, to another, the receiver; the reverse direction is another link,
possibly with another transport. When a peer first sends to another, it goes through its transports in order of speed
and uses the first that actually delivers a probe:

    objection(mine, theirs)     known without trying, from the two addresses
    offer(negotiation)              the sender's part: sends a probe, checks the echo, returns its end
    answer(offer, negotiation)      the receiver's part: returns the received probe and its end

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
"""One page: larger than what any transport treats as a small message."""


@dataclass(frozen=True, slots=True)
class ChosenTransport:
    """The transport to a peer, and why it was chosen.

    Example: ChosenTransport("tcp", "a probe of 4096 bytes came back", (("shared memory", "another host ..."),))
    """

    name: str
    reason: str
    refused: tuple[tuple[str, str], ...]
    """(name, reason) of the transports that were tried before."""

    def __str__(self) -> str:
        others = "".join(f"; not {name}: {reason}" for name, reason in self.refused)
        return f"{self.name}: {self.reason}{others}"


class TransportOffer(msgspec.Struct, tag=True):
    """The sender proposes this transport."""

    transport: str
    details: bytes


class ProbeReply(msgspec.Struct):
    """The probe as received, or the reason why it was not."""

    arrived: bytes = b""
    refusal: str = ""


class Unusable(Exception):
    """This transport does not work for this pair; the message says why."""


@dataclass(frozen=True, slots=True)
class Negotiation:
    """Two peers that are about to be linked, as seen by one of them."""

    mine: PeerAddress
    theirs: PeerAddress
    connection: Connection
    """The authenticated socket between the two; the created link owns it."""
    capacity_bytes: int
    """Bytes of values in transit before the sender has to wait."""
    deadline: Deadline


def send_probe(name: str, details: bytes, probe: bytes, negotiation: Negotiation) -> Connection:
    """Offers the transport `name`; the receiver replies with the received probe.

    Returns:
        The negotiation's connection.

    Raises:
        Unusable: the receiver refuses, or the probe arrived corrupted.
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
    """The sender's end. Thread-safe."""

    def send(self, value: Any, deadline: Deadline) -> None:
        """Passes one value to the transport, whole or not at all.

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
        """Ends the link. Without farewell the receiver sees the same as if this process were killed."""
        ...


class Incoming(Protocol):
    """The receiver's end. Thread-safe."""

    def receive(self, deadline: Deadline) -> Any:
        """The next value in the order of sends; values sent completely before the sender's end are still returned.

        Raises:
            PeerLost, PeerLeft: the sender is gone, and nothing is left.
            PeerTimeout: nothing within the deadline.
            DecodeError: this value cannot be built here; the next can.
            TornStream: the link cannot be used any more.
        """
        ...

    def is_spent(self) -> bool:
        """Whether the sender is gone, and nothing is left."""
        ...

    def close(self, *, farewell: bool) -> None: ...


class Transport(Protocol):
    """One way to send values. These objects have no state."""

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
