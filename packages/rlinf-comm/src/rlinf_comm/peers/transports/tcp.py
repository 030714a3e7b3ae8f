"""Transport between hosts, and wherever nothing faster works: the TCP connection on which the peers met.

Values are written from the tensors' memory and read into the memory that they stay in (frames.py). While nobody
receives, ReadAhead takes in up to `capacity_bytes`, so that two peers may send to each other before either receives.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from typing import Any

from rlinf_comm import codec
from rlinf_comm.errors import PeerLeft, PeerLost
from rlinf_comm.peers.address import PeerAddress
from rlinf_comm.peers.deadline import SLICE_S, Deadline
from rlinf_comm.peers.line import Lifeline, left, lost
from rlinf_comm.peers.transports.base import (
    PROBE_BYTES,
    Incoming,
    Meeting,
    Outgoing,
    TornStream,
    Traffic,
    send_probe,
)
from rlinf_comm.peers.transports.frames import Outbox, StreamReader

_FAREWELL_TIMEOUT_S = 1.0
"""Time for the farewell to a receiver that has stopped reading."""


class TcpTransport:
    """One connection for each direction."""

    name = "tcp"
    needs_line = True

    def objection(self, mine: PeerAddress, theirs: PeerAddress) -> str | None:
        return None

    def offer(self, meeting: Meeting) -> tuple[Outgoing, str]:
        probe = os.urandom(PROBE_BYTES)
        line = send_probe(self.name, probe, probe, meeting)
        host, port = meeting.theirs.endpoint
        link = TcpOutgoing(line.socket, Lifeline(line, meeting.theirs), Traffic("TCP", meeting.theirs))
        return link, f"a probe of {PROBE_BYTES} bytes came back from {host}:{port}"

    def answer(self, details: bytes, meeting: Meeting) -> tuple[Incoming, bytes]:
        assert meeting.line is not None, "this transport needs a line"
        link = TcpIncoming(meeting.line.socket, meeting.capacity_bytes, Traffic("TCP", meeting.theirs))
        return link, details


class TcpOutgoing:
    def __init__(self, connected: socket.socket, lifeline: Lifeline, traffic: Traffic) -> None:
        self._socket = connected
        self._lifeline = lifeline
        self._traffic = traffic
        self._lock = threading.Lock()
        self._writable = select.poll()
        self._writable.register(connected, select.POLLOUT)
        self._residue: Outbox | None = None
        """The end of a value that was taken back."""

    def send(self, value: Any, deadline: Deadline) -> None:
        self.send_encoded(codec.encode(value), deadline)

    def send_encoded(self, encoded: codec.Encoded, deadline: Deadline) -> None:
        with deadline.holding(self._lock) as held:
            if not held:
                raise self._traffic.timeout("send to", deadline, "another thread is sending to it")
            self._lifeline.check()
            if self._residue is not None:
                self._write(self._residue, deadline)
                self._residue = None
            outbox = Outbox(encoded)
            try:
                self._write(outbox, deadline)
            except BaseException:  # also a signal: the stream has to go on at a border
                if outbox.has_begun and outbox:
                    outbox.cancel()
                    self._residue = outbox
                raise
            self._traffic.count()

    def _write(self, outbox: Outbox, deadline: Deadline) -> None:
        while outbox:
            try:
                outbox.write(self._socket)
            except BlockingIOError:
                if deadline.has_passed:
                    raise self._traffic.timeout("send to", deadline, "it does not read what it was sent") from None
                if not self._writable.poll(deadline.slice_s * 1000.0):
                    self._lifeline.check(look_at_process=True)
            except OSError as error:
                self._lifeline.check()  # perhaps it said farewell first
                kind, text = lost(self._traffic.theirs, f"the connection broke ({error.strerror})")
                raise kind(text) from error

    def check(self) -> None:
        self._lifeline.check(look_at_process=True)

    def close(self, *, farewell: bool) -> None:
        if farewell:
            with Deadline(_FAREWELL_TIMEOUT_S).holding(self._lock) as held:
                try:
                    if held and self._residue is None and not self._lifeline.has_ended():
                        self._write(Outbox(None), Deadline(_FAREWELL_TIMEOUT_S))
                except (PeerLost, TimeoutError):
                    pass  # it has gone first, or finds the end of the connection
        self._lifeline.close(farewell=False)


class TcpIncoming:
    def __init__(self, connected: socket.socket, capacity_bytes: int, traffic: Traffic) -> None:
        self._socket = connected
        self._traffic = traffic
        self._capacity_bytes = capacity_bytes
        self._reader = StreamReader(connected)
        self._lock = threading.Lock()
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)
        self._last_receive_s = 0.0
        self._is_open = True

    def receive(self, deadline: Deadline) -> Any:
        return codec.decode(*self.receive_encoded(deadline))

    def receive_encoded(self, deadline: Deadline) -> tuple[bytes, list[memoryview]]:
        """The header and the buffers of the next value."""
        self._last_receive_s = time.monotonic()
        with deadline.holding(self._lock) as held:
            if not held:
                raise self._traffic.timeout("receive from", deadline, "another thread is receiving from it")
            while not self._reader.ready:
                self._reader.pump_value()
                if not self._reader.ready:
                    self._wait(deadline)
            header, buffers = self._reader.take()
            self._traffic.count()
        self._last_receive_s = time.monotonic()
        return header, buffers

    @property
    def is_amid_a_value(self) -> bool:
        """Whether a part of the next value has been read."""
        return self._reader.num_bytes > 0 and not self._reader.ready

    @property
    def has_staged(self) -> bool:
        """Whether bytes were read from the connection together with the last value, and came after it."""
        return self._reader.has_staged

    def has_more(self) -> bool:
        """Whether some of the next value has come, or the stream has ended."""
        return bool(self._reader.ready or self.has_staged or self._reader.has_ended or self._readable.poll(0))

    def _wait(self, deadline: Deadline) -> None:
        """Waits until something can be read; raises the reason why nothing will come."""
        reader, theirs = self._reader, self._traffic.theirs
        if reader.torn is not None:
            raise TornStream(f"from {theirs.name!r}: {reader.torn}")
        if not self._is_open:
            raise PeerLeft(f"the link from {theirs.name!r} was closed by this process")
        if reader.has_ended:
            cause = f"its connection ended without a farewell, {reader.progress}"
            kind, text = left(theirs) if reader.said_farewell else lost(theirs, cause)
            raise kind(text)
        self._last_receive_s = time.monotonic()
        if self._readable.poll(deadline.slice_s * 1000.0):
            return
        if theirs.is_known_dead():
            reader.pump_value()
            reader.has_ended = True  # a forked child of the peer may still hold the connection open
        elif deadline.has_passed:
            raise self._traffic.timeout("receive from", deadline, reader.progress)

    # --- for ReadAhead ---

    def readable_descriptor(self) -> int | None:
        """The socket's descriptor while nobody receives and more may be read ahead; else None."""
        is_idle = time.monotonic() - self._last_receive_s > SLICE_S and not self._lock.locked()
        has_room = self._reader.num_bytes < self._capacity_bytes
        return self._socket.fileno() if self._is_open and is_idle and has_room and not self._reader.has_ended else None

    def read_ahead(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                if self._is_open:
                    self._reader.pump_bytes(self._capacity_bytes)
            finally:
                self._lock.release()

    # ---

    def is_spent(self) -> bool:
        if self._lock.acquire(blocking=False):
            try:
                if self._is_open:
                    self._reader.pump_bytes(self._capacity_bytes)
                return self._reader.has_ended and not self._reader.ready and self._reader.torn is None
            finally:
                self._lock.release()
        return False

    def close(self, *, farewell: bool) -> None:
        if not self._is_open:
            return
        self._is_open = False
        with Deadline(2 * SLICE_S).holding(self._lock):  # whoever polls the descriptor lets go of it first
            if farewell:
                try:
                    self._socket.send(b"F")
                except OSError:
                    pass  # it has gone first
            try:
                self._socket.shutdown(socket.SHUT_RDWR)  # close() alone would take effect when ReadAhead's poll ends
            except OSError:
                pass  # it has gone first
            self._socket.close()


class ReadAhead:
    """One thread that reads from the TCP links of a peer on which nobody receives."""

    def __init__(self) -> None:
        self._links: list[TcpIncoming] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, link: object) -> None:
        """Takes links of any transport. One that sends part of its data over TCP is read through that part (its
        `host`); other links need no reading ahead and are ignored."""
        link = getattr(link, "host", link)
        if not isinstance(link, TcpIncoming):
            return
        self._links = [*(known for known in self._links if known._is_open), link]
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
