"""How two peers agree on a transport, when the first value is to go from one to the other.

caller                                            called one
proof of the job's secret, both ways (handshake.py)
Hello: my address, whom I am looking for    ->    Welcome, or why not
Offer: a transport, and how to open it      ->    Answer: the probe that arrived, or why none      (repeated)
Chosen: this one                            ->    Welcome; from here on the link owns the socket
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from rlinf_comm.errors import CommError, DecodeError, NoTransport, PeerLost, PeerNameTaken
from rlinf_comm.peers.address import PeerAddress
from rlinf_comm.peers.deadline import Deadline
from rlinf_comm.peers.line import Line
from rlinf_comm.peers.transports.base import (
    Answer,
    ChosenTransport,
    Incoming,
    Meeting,
    Offer,
    Outgoing,
    Transport,
    Unusable,
)


class Hello(msgspec.Struct, tag=True):
    caller: PeerAddress
    wanted: str


class Welcome(msgspec.Struct):
    refusal: str = ""


class Chosen(msgspec.Struct, tag=True):
    transport: str


@dataclass(frozen=True, slots=True)
class Link:
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
) -> Link:
    """A link to the peer at `theirs`, over the first of `transports` that carries a probe.

    Raises:
        PeerLost: it is not there any more.
        NoTransport: none works; says why, for each.
        PeerTimeout, PeerNameTaken: as they say.
    """
    line: Line | None = None
    refused: list[tuple[str, str]] = []
    try:
        for transport in transports:
            objection = transport.objection(mine, theirs)
            if objection is not None:
                refused.append((transport.name, objection))
                continue
            if transport.needs_line and line is None:
                line = _introduce(mine, theirs, deadline)
            meeting = Meeting(mine, theirs, line if transport.needs_line else None, capacity_bytes, deadline)
            try:
                outgoing, reason = transport.offer(meeting)
            except Unusable as error:
                refused.append((transport.name, str(error)))
                continue
            if transport.needs_line and line is not None:
                line.tell(Chosen(transport.name), deadline)
                line.hear(Welcome, deadline)
                line.socket.setblocking(False)
                line = None  # the link's
            return Link(outgoing, ChosenTransport(transport.name, reason, tuple(refused)), theirs)
    finally:
        if line is not None:
            line.close()
    raise NoTransport(
        f"no transport from {mine.name!r} to {theirs.name!r} ({theirs.place}): "
        + "; ".join(f"{name}: {reason}" for name, reason in refused)
        + "; allow more of them on both sides (transports=..., RLINF_COMM_TRANSPORTS)"
    )


def _introduce(mine: PeerAddress, theirs: PeerAddress, deadline: Deadline) -> Line:
    line = Line.to_peer(theirs, deadline)
    try:
        line.tell(Hello(mine, theirs.name), deadline)
        welcome = line.hear(Welcome, deadline)
        if welcome.refusal:
            raise PeerNameTaken(f"{theirs.name!r} refuses {mine.name!r}: {welcome.refusal}")
    except BaseException:
        line.close()
        raise
    return line


def is_living(address: PeerAddress, deadline: Deadline) -> bool:
    """Whether the peer at `address` still answers; a process that is merely slow counts as living."""
    if address.is_known_dead():
        return False
    try:
        Line.to_peer(address, deadline).close()
    except PeerLost:
        return False
    except (CommError, TimeoutError):
        return True
    return True


def answer(
    line: Line,
    mine: PeerAddress,
    transports: Sequence[Transport],
    capacity_bytes: int,
    objection: Callable[[PeerAddress], str | None],
    deadline: Deadline,
) -> tuple[str, PeerAddress, Incoming] | None:
    """The called side, after the proof: (transport, caller, link), or None when the caller only looked.

    Raises:
        PeerLost, PeerTimeout, DecodeError: no link came of it.
    """
    try:
        hello = line.hear(Hello, deadline)
    except PeerLost:
        return None
    refusal = objection(hello.caller)
    if refusal is None and hello.wanted != mine.name:
        refusal = f"this is {mine.name!r}, and {hello.wanted!r} was called"
    line.tell(Welcome(refusal or ""), deadline)
    if refusal is not None:
        return None
    meeting = Meeting(mine, hello.caller, line, capacity_bytes, deadline)
    offered: tuple[str, Incoming] | None = None
    while True:
        message = line.hear(Offer | Chosen, deadline)  # pyright: ignore[reportArgumentType]
        if isinstance(message, Chosen):
            if offered is None or offered[0] != message.transport:
                raise DecodeError(
                    f"{hello.caller.name!r} chose {message.transport!r} without a probe that came through"
                )
            line.tell(Welcome(), deadline)
            line.socket.setblocking(False)
            return message.transport, hello.caller, offered[1]
        offered = None
        try:
            incoming, arrived = _probe(message, transports, meeting)
        except Unusable as error:
            line.tell(Answer(refusal=str(error)), deadline)
        else:
            offered = message.transport, incoming
            line.tell(Answer(arrived=arrived), deadline)


def _probe(offer: Offer, transports: Sequence[Transport], meeting: Meeting) -> tuple[Incoming, bytes]:
    for transport in transports:
        if transport.name == offer.transport:
            return transport.answer(offer.details, meeting)
    allowed = ", ".join(transport.name for transport in transports)
    raise Unusable(f"{meeting.mine.name!r} allows {allowed} only")
