"""How two peers agree on a transport, when the first value is to go from one to the other.

caller                                            called one
the handshake (wire/handshake.py): my address, whom I am looking for, and whether I am welcome
Offer: a transport, and how to open it      ->    Answer: the probe that arrived, or why none      (repeated)
Chosen: this one                            ->    Ready; from here on the link owns the connection
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from rlinf_comm.errors import CommError, DecodeError, NoTransport, PeerLost, PeerNameTaken
from rlinf_comm.peers.transports.base import (
    ChosenTransport,
    Incoming,
    Negotiation,
    Outgoing,
    ProbeReply,
    Transport,
    TransportOffer,
    Unusable,
)
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.connection import Connection
from rlinf_comm.wire.deadline import Deadline
from rlinf_comm.wire.handshake import Hello, Refused, accept_handshake, introduce, refusing, send_hello

_OWN = Hello(service="peer")


class ChosenMessage(msgspec.Struct, tag=True):
    transport: str


class Ready(msgspec.Struct):
    """The called side has its end of the link."""


@dataclass(frozen=True, slots=True)
class OutgoingLink:
    """A link as its sender keeps it."""

    outgoing: Outgoing
    transport: ChosenTransport
    address: PeerAddress


def call(
    mine: PeerAddress,
    theirs: PeerAddress,
    transports: Sequence[Transport],
    capacity_bytes: int,
    deadline: Deadline,
) -> OutgoingLink:
    """A link to the peer at `theirs`, over the first of `transports` that carries a probe.

    Raises:
        PeerLost: it is not there any more.
        NoTransport: none works; says why, for each.
        PeerTimeout, PeerNameTaken: as they say.
    """
    connection: Connection | None = None
    refused: list[tuple[str, str]] = []
    try:
        for transport in transports:
            objection = transport.objection(mine, theirs)
            if objection is not None:
                refused.append((transport.name, objection))
                continue
            if connection is None:
                connection = _introduce(mine, theirs, deadline)
            negotiation = Negotiation(mine, theirs, connection, capacity_bytes, deadline)
            try:
                outgoing, reason = transport.offer(negotiation)
            except Unusable as error:
                refused.append((transport.name, str(error)))
                continue
            connection.send(ChosenMessage(transport.name), deadline)
            connection.receive(Ready, deadline)
            connection.socket.setblocking(False)
            connection = None  # the link's
            return OutgoingLink(outgoing, ChosenTransport(transport.name, reason, tuple(refused)), theirs)
    finally:
        if connection is not None:
            connection.shut()
    raise NoTransport(
        f"no transport from {mine.name!r} to {theirs.name!r} ({theirs.place}): "
        + "; ".join(f"{name}: {reason}" for name, reason in refused)
        + "; allow more of them on both sides (transports=..., RLINF_COMM_TRANSPORTS)"
    )


def _introduce(mine: PeerAddress, theirs: PeerAddress, deadline: Deadline) -> Connection:
    connection = Connection.to_peer(theirs, deadline)
    try:
        introduce(connection, Hello(service=_OWN.service, name=theirs.name, caller=mine), deadline)
    except Refused as error:
        connection.shut()
        raise PeerNameTaken(f"{theirs.name!r} refuses {mine.name!r}: {error}") from error
    except BaseException:
        connection.shut()
        raise
    return connection


def is_living(address: PeerAddress, deadline: Deadline) -> bool:
    """Whether the peer at `address` still answers; a process that is merely slow counts as living."""
    if address.is_known_dead():
        return False
    try:
        Connection.to_peer(address, deadline).shut()
    except PeerLost:
        return False
    except (CommError, TimeoutError):
        return True
    return True


def answer(
    connection: Connection,
    mine: PeerAddress,
    transports: Sequence[Transport],
    capacity_bytes: int,
    objection: Callable[[PeerAddress], str | None],
    deadline: Deadline,
) -> tuple[PeerAddress, Incoming] | None:
    """The called side, after the proof: (caller, link), or None when the caller only looked.

    Raises:
        PeerLost, PeerTimeout, DecodeError: no link came of it.
    """
    try:
        hello = accept_handshake(connection, _OWN, deadline)
    except PeerLost:
        return None
    caller = hello.caller
    if caller is None:
        raise DecodeError(f"{connection.who} wants a peer and has no address of its own")
    refusal = objection(caller)
    if refusal is None and hello.name != mine.name:
        refusal = f"this is {mine.name!r}, and {hello.name!r} was called"
    send_hello(connection, refusing(_OWN, refusal or ""), deadline)
    if refusal is not None:
        return None
    negotiation = Negotiation(mine, caller, connection, capacity_bytes, deadline)
    offered: tuple[str, Incoming] | None = None
    while True:
        message = connection.receive(TransportOffer | ChosenMessage, deadline)  # pyright: ignore[reportArgumentType]
        if isinstance(message, ChosenMessage):
            if offered is None or offered[0] != message.transport:
                raise DecodeError(f"{caller.name!r} chose {message.transport!r} without a probe that came through")
            connection.send(Ready(), deadline)
            connection.socket.setblocking(False)
            return caller, offered[1]
        offered = None
        try:
            incoming, arrived = _probe(message, transports, negotiation)
        except Unusable as error:
            connection.send(ProbeReply(refusal=str(error)), deadline)
        else:
            offered = message.transport, incoming
            connection.send(ProbeReply(arrived=arrived), deadline)


def _probe(offer: TransportOffer, transports: Sequence[Transport], negotiation: Negotiation) -> tuple[Incoming, bytes]:
    for transport in transports:
        if transport.name == offer.transport:
            return transport.answer(offer.details, negotiation)
    allowed = ", ".join(transport.name for transport in transports)
    raise Unusable(f"{negotiation.mine.name!r} allows {allowed} only")
