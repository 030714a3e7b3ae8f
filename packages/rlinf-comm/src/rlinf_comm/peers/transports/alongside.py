"""A host transport as a part of another: it meets inside of the other's offer, and carries its small values."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import msgspec

from rlinf_comm.peers.transports.base import Incoming, Negotiation, Outgoing, ProbeReply, Transport, TransportOffer
from rlinf_comm.peers.transports.shared import SharedTransport
from rlinf_comm.peers.transports.tcp import TcpTransport
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.deadline import Deadline


def host_transport(mine: PeerAddress, theirs: PeerAddress) -> Transport:
    """The one for what is in host memory: the same on both sides."""
    shared = SharedTransport()
    return shared if shared.objection(mine, theirs) is None else TcpTransport()


def offer_alongside(name: str, question: bytes, negotiation: Negotiation) -> tuple[Outgoing, str, bytes]:
    """Offers `name`, which asks `question`: (sender's end of the host transport, its reason, the reply).

    Raises:
        Unusable: one of the two does not work.
    """
    connection = _ConnectionAlongside(negotiation.connection, name, question)
    host = host_transport(negotiation.mine, negotiation.theirs)
    outgoing, reason = host.offer(dataclasses.replace(negotiation, connection=connection))  # pyright: ignore[reportArgumentType]
    return outgoing, reason, connection.reply


def question_in(details: bytes) -> tuple[bytes, bytes]:
    """(the host transport's details, the question) of the offer's details."""
    return msgspec.msgpack.decode(details, type=tuple[bytes, bytes])


def answer_alongside(host_details: bytes, reply: bytes, negotiation: Negotiation) -> tuple[Incoming, bytes]:
    """(the receiver's end of the host transport, what the offer is answered with). Raises Unusable."""
    incoming, arrived = host_transport(negotiation.mine, negotiation.theirs).answer(host_details, negotiation)
    return incoming, msgspec.msgpack.encode((arrived, reply))


class _ConnectionAlongside:
    """What the host transport takes for its connection: its offer and the answer to it travel inside of the other's."""

    def __init__(self, connection: Any, name: str, question: bytes) -> None:
        assert connection is not None, "this transport needs a connection"
        self._connection = connection
        self._name = name
        self._question = question
        self.reply = b""

    @property
    def socket(self) -> socket.socket:
        return self._connection.socket

    def send(self, message: TransportOffer, deadline: Deadline) -> None:
        details = msgspec.msgpack.encode((message.details, self._question))
        self._connection.send(TransportOffer(self._name, details), deadline)

    def receive(self, kind: type[ProbeReply], deadline: Deadline) -> ProbeReply:
        answer = self._connection.receive(kind, deadline)
        if answer.refusal:
            return answer
        arrived, self.reply = msgspec.msgpack.decode(answer.arrived, type=tuple[bytes, bytes])
        return ProbeReply(arrived=arrived)
