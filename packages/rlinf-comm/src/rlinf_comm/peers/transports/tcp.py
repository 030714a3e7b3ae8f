"""Transport between hosts, and wherever nothing faster works: the connection on which the peers met.

While nobody receives, ReadAhead takes in up to `capacity_bytes`, so that two peers may send to each other before either
receives.
"""

from __future__ import annotations

import os
import select
import threading

from rlinf_comm.peers.transports.base import PROBE_BYTES, Incoming, Negotiation, Outgoing, send_probe
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.deadline import SLICE_S
from rlinf_comm.wire.lifeline import Lifeline
from rlinf_comm.wire.stream import Traffic, ValueReceiver, ValueSender


class TcpTransport:
    """One connection for each direction."""

    name = "tcp"

    def objection(self, mine: PeerAddress, theirs: PeerAddress) -> str | None:
        return None

    def offer(self, negotiation: Negotiation) -> tuple[Outgoing, str]:
        probe = os.urandom(PROBE_BYTES)
        connection = send_probe(self.name, probe, probe, negotiation)
        host, port = negotiation.theirs.endpoint
        link = ValueSender(
            connection.socket, Lifeline(connection, negotiation.theirs), Traffic("TCP", negotiation.theirs)
        )
        return link, f"a probe of {PROBE_BYTES} bytes came back from {host}:{port}"

    def answer(self, details: bytes, negotiation: Negotiation) -> tuple[Incoming, bytes]:
        link = ValueReceiver(
            negotiation.connection.socket, negotiation.capacity_bytes, Traffic("TCP", negotiation.theirs)
        )
        return link, details


class ReadAhead:
    """One thread that reads from the TCP links of a peer on which nobody receives."""

    def __init__(self) -> None:
        self._links: list[ValueReceiver] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, link: object) -> None:
        """Takes links of any transport; those that are not TCP need no reading ahead and are ignored."""
        if not isinstance(link, ValueReceiver):
            return
        self._links = [*(other for other in self._links if other._is_open), link]
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rlinf-comm read ahead", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            idle = ((link.readable_descriptor(), link) for link in self._links)
            links = {descriptor: link for descriptor, link in idle if descriptor is not None}
            if not links:
                self._stop.wait(SLICE_S / 2)
                continue
            poll = select.poll()
            for descriptor in links:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(SLICE_S / 2 * 1000.0):
                links[descriptor].read_ahead()
