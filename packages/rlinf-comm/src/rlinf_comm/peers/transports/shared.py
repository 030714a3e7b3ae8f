"""Transport between two processes of one host: a channel in shared memory for each direction, made by the sender.

A value that fits the channel crosses as one item, and the receiver's tensors are views of it. A larger one crosses as
its structure followed by parts, which the receiver copies together. What an item is, its key says.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec
import numpy as np

from rlinf_comm import _C, codec
from rlinf_comm._arrays import NotEncodable
from rlinf_comm.channel import Channel, ChannelAddress, Item, native_of
from rlinf_comm.errors import ChannelTimeout, PeerLost, TornStream
from rlinf_comm.peers.transports.base import PROBE_BYTES, Incoming, Negotiation, Outgoing, Unusable, send_probe
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.buffers import allocate, chunks
from rlinf_comm.wire.deadline import Deadline
from rlinf_comm.wire.lifeline import Lifeline, left
from rlinf_comm.wire.stream import Traffic

_VALUE, _START, _PART, _CANCEL = range(4)
"""Keys: a whole value; the structure and lengths of a large one; its bytes in order; 'the rest does not come'."""

_MAX_PART_BYTES = 4 << 20
"""A fraction of what caches hold, so that the receiver reads what the sender has just written."""

_MAX_PIECES = 32
"""The most pieces of tensors that go into one part as they are; if there are more, they are small and are joined."""

_PROBE_TIMEOUT_S = 5.0

_FOR_ROOM = 1
"""What the native channel calls a wait for room (channel.h)."""


class SharedTransport:
    """Channels of rlinf_comm, within one host."""

    name = "shared"

    def objection(self, mine: PeerAddress, theirs: PeerAddress) -> str | None:
        return mine.host.difference_to(theirs.host)

    def offer(self, negotiation: Negotiation) -> tuple[Outgoing, str]:
        channel = Channel.create(
            f"{negotiation.mine.name} to {negotiation.theirs.name}",
            capacity_bytes=negotiation.capacity_bytes,
            lost_peers="tolerate",  # the lifeline tells, and names the peer
        )
        probe = os.urandom(PROBE_BYTES)
        channel.put(probe)
        connection = send_probe(self.name, msgspec.msgpack.encode(channel.address), probe, negotiation)
        link = _SharedOutgoing(
            channel, Lifeline(connection, negotiation.theirs), Traffic("shared memory", negotiation.theirs)
        )
        return link, f"the same host, and a probe of {PROBE_BYTES} bytes came back"

    def answer(self, details: bytes, negotiation: Negotiation) -> tuple[Incoming, bytes]:
        try:
            channel = Channel.open(msgspec.msgpack.decode(details, type=ChannelAddress))
            (item,) = channel.take(timeout_s=negotiation.deadline.capped(_PROBE_TIMEOUT_S).left_s)
        except (PeerLost, ChannelTimeout, OSError, RuntimeError) as error:
            raise Unusable(f"the segment cannot be opened: {error}") from error
        link = _SharedIncoming(
            channel, Lifeline(negotiation.connection, negotiation.theirs), Traffic("shared memory", negotiation.theirs)
        )
        return link, item.value


class _SharedOutgoing:
    def __init__(self, channel: Channel, lifeline: Lifeline, traffic: Traffic) -> None:
        self._channel, self._native = channel, native_of(channel)
        self._lifeline = lifeline
        self._traffic = traffic
        self._capacity_bytes = channel.stats().capacity_bytes
        self._lock = threading.Lock()
        self._owes_cancel = False

    def send(self, value: Any, deadline: Deadline) -> None:
        with deadline.holding(self._lock) as held:
            if not held:
                raise self._traffic.timeout("send to", deadline, "another thread is sending to it")
            self._lifeline.check()
            if self._owes_cancel:
                self._put(None, _CANCEL, deadline)
                self._owes_cancel = False
            try:
                self._put(value, _VALUE, deadline)
            except _TooLarge:
                self._send_in_parts(codec.encode(value), deadline)
            self._traffic.count()

    def _send_in_parts(self, encoded: codec.Encoded, deadline: Deadline) -> None:
        part_bytes = min(_MAX_PART_BYTES, max(self._capacity_bytes // 4, 1))
        buffers = (memoryview(encoded.header), *encoded.buffers)
        self._owes_cancel = True  # whatever ends this early, a signal included
        self._put([buffer.nbytes for buffer in buffers], _START, deadline)
        for chunk in chunks(buffers, part_bytes):
            pieces = chunk if len(chunk) <= _MAX_PIECES else [memoryview(b"".join(chunk))]
            self._put([np.frombuffer(piece, dtype=np.uint8) for piece in pieces], _PART, deadline)
        self._owes_cancel = False

    def _put(self, value: Any, kind: int, deadline: Deadline) -> None:
        """Encodes once, however long it waits."""
        try:
            put = _C.PendingPut(self._native, codec.NATIVE, value, kind, 1.0, -1, None)
        except (NotEncodable, UnicodeEncodeError, RecursionError) as error:
            raise codec.refusal(value, error) from None
        while True:
            seen = self._native.event_sequence(_FOR_ROOM)
            try:
                outcome = put.attempt()
            except ValueError as error:
                raise _TooLarge from error
            if outcome == _C.Outcome.DONE:
                return
            if outcome != _C.Outcome.PENDING:
                raise PeerLost(f"the link to {self._traffic.theirs.name!r} was closed by this process")
            if deadline.has_passed:
                stats = self._channel.stats()
                detail = f"{stats.num_items} items of {stats.num_bytes} bytes wait for the receiver"
                raise self._traffic.timeout("send to", deadline, f"{detail} (capacity_bytes={self._capacity_bytes})")
            self._native.wait_for_event(_FOR_ROOM, seen)
            self._lifeline.check(look_at_process=True)

    def check(self) -> None:
        self._lifeline.check(look_at_process=True)

    def close(self, *, farewell: bool) -> None:
        if farewell:
            try:
                self._channel.close()
            except ValueError:
                pass  # closed before
        self._lifeline.close(farewell=farewell)


class _SharedIncoming:
    def __init__(self, channel: Channel, lifeline: Lifeline, traffic: Traffic) -> None:
        self._channel = channel
        self._lifeline = lifeline
        self._traffic = traffic
        self._lock = threading.Lock()
        self._assembly: _Assembly | None = None

    def receive(self, deadline: Deadline) -> Any:
        with deadline.holding(self._lock) as held:
            if not held:
                raise self._traffic.timeout("receive from", deadline, "another thread is receiving from it")
            while True:
                item = self._take(deadline)
                if item.key == _VALUE:
                    self._traffic.count()
                    return item.value
                if item.key == _CANCEL:
                    self._assembly = None
                elif item.key == _START:
                    self._assembly = _Assembly(item.value)
                elif self._assembly is None or item.key != _PART:
                    raise TornStream(f"from {self._traffic.theirs.name!r}: an item of kind {item.key} out of turn")
                elif self._assembly.add(item.value):
                    assembly, self._assembly = self._assembly, None
                    self._traffic.count()
                    return codec.decode(assembly.buffers[0], assembly.buffers[1:])

    def _take(self, deadline: Deadline) -> Item:
        is_last = False
        while True:
            try:
                items = self._channel.take(timeout_s=0.0 if is_last else deadline.slice_s)
            except ChannelTimeout:
                if is_last:
                    self._lifeline.check()
                is_last = self._lifeline.has_ended()  # it may have sent something between the two looks
                if not is_last and deadline.has_passed:
                    raise self._traffic.timeout("receive from", deadline, self._progress()) from None
                continue
            if items:
                return items[0]
            kind, text = left(self._traffic.theirs)
            raise kind(text)

    def _progress(self) -> str:
        return "it has sent nothing" if self._assembly is None else self._assembly.progress

    def is_spent(self) -> bool:
        return self._lifeline.has_ended() and self._channel.stats().num_items == 0

    def close(self, *, farewell: bool) -> None:
        self._lifeline.close(farewell=farewell)


class _Assembly:
    """A value that comes in parts."""

    def __init__(self, lengths: list[int]) -> None:
        self.buffers = allocate(lengths)
        """The header, then the tensors."""
        self._targets = [np.frombuffer(buffer, dtype=np.uint8) for buffer in reversed(self.buffers) if buffer.nbytes]
        self._num_left = self._num_bytes = sum(lengths)

    @property
    def progress(self) -> str:
        return f"{self._num_bytes - self._num_left} of {self._num_bytes} bytes of a value have come"

    def add(self, pieces: list[np.ndarray]) -> bool:
        """Whether the value is complete."""
        for piece in pieces:
            if piece.nbytes > self._num_left:
                raise TornStream(f"a part of {piece.nbytes} bytes where {self._num_left} are left of the value")
            self._num_left -= piece.nbytes
            while piece.nbytes:
                target = self._targets.pop()
                num_bytes = min(target.nbytes, piece.nbytes)
                _C.copy_bytes(target.ctypes.data, piece.ctypes.data, num_bytes)
                piece = piece[num_bytes:]
                if num_bytes < target.nbytes:
                    self._targets.append(target[num_bytes:])
        return not self._num_left


class _TooLarge(Exception):
    """A value that does not fit the channel as one item."""
