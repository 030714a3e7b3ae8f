"""Values on a connection: written from the tensors' memory, and read into the memory that they stay in (values.py)."""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import Any

from rlinf_comm import codec
from rlinf_comm.errors import PeerLeft, PeerLost, PeerTimeout, TornStream
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.deadline import SLICE_S, Deadline
from rlinf_comm.wire.lifeline import FAREWELL, Lifeline, left, lost
from rlinf_comm.wire.values import Outbox, StreamReader

_FAREWELL_TIMEOUT_S = 1.0
"""Time for the farewell to a receiver that has stopped reading."""


class Traffic:
    """What has gone over a link, for messages."""

    def __init__(self, transport: str, theirs: PeerAddress) -> None:
        self.theirs = theirs
        self._transport = transport
        self._start_s = time.monotonic()
        self._last_s = self._start_s
        self._num_values = 0

    def count(self) -> None:
        self._num_values += 1
        self._last_s = time.monotonic()

    def timeout(self, what: str, deadline: Deadline, detail: str) -> PeerTimeout:
        """`what` is 'receive from' or 'send to'."""
        now_s = time.monotonic()
        last = f", the last {now_s - self._last_s:.1f} s ago" if self._num_values else ""
        return PeerTimeout(
            f"{what} {self.theirs.name!r} not done within timeout_s={deadline.timeout_s:g}: {detail}. The peer is "
            f"{self.theirs.place}, over {self._transport}, connected {now_s - self._start_s:.1f} s ago, "
            f"{self._num_values} values since{last}; raise timeout_s, or see what that process does"
        )


class ValueSender:
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


class ValueReceiver:
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
                    self._socket.send(FAREWELL)
                except OSError:
                    pass  # it has gone first
            try:
                self._socket.shutdown(socket.SHUT_RDWR)  # close() alone would take effect when ReadAhead's poll ends
            except OSError:
                pass  # it has gone first
            self._socket.close()
