"""What a transport is: one direction between two peers, tried before it is used.

A transport carries values from one peer, the sender, to another, the receiver; the way back is another link, perhaps
of another transport. When a peer first sends to another, it goes through its transports in order of speed and takes
the first that really carries a probe:

    objection(mine, theirs)     known without trying, from the two addresses
    offer(meeting)              the sender's part: sends a probe, checks that it came back, returns its end
    answer(offer, meeting)      the receiver's part: gives back the probe that arrived, returns its end

Further ones are further classes in the list of Peer(transports=...).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from rlinf_comm.errors import DecodeError, PeerTimeout
from rlinf_comm.peers.address import PeerAddress
from rlinf_comm.peers.deadline import Deadline
from rlinf_comm.peers.line import Line

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


class Offer(msgspec.Struct, tag=True):
    """The sender would like to use this transport."""

    transport: str
    details: bytes


class Answer(msgspec.Struct):
    """What the receiver has got of the probe, or why nothing."""

    arrived: bytes = b""
    refusal: str = ""


class TornStream(DecodeError):
    """Bytes between two values are not what the protocol says: there is no going on with this link."""


class Unusable(Exception):
    """This transport does not work for this pair; the text says why."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Two peers about to be linked, as one of them sees it."""

    mine: PeerAddress
    theirs: PeerAddress
    line: Line | None
    """The authenticated socket between the two; the link that is made owns it. None where needs_line is False."""
    capacity_bytes: int
    """Bytes of values that may be on their way before the sender has to wait."""
    deadline: Deadline


def send_probe(name: str, details: bytes, probe: bytes, meeting: Meeting) -> Line:
    """Offers the transport `name`, whose receiver answers with what it has got of the probe; the meeting's line.

    Raises:
        Unusable: the receiver refuses, or something else has arrived.
    """
    line = meeting.line
    assert line is not None, "this transport needs a line"
    line.tell(Offer(name, details), meeting.deadline)
    answer = line.hear(Answer, meeting.deadline)
    if answer.refusal:
        raise Unusable(answer.refusal)
    if answer.arrived != probe:
        raise Unusable(f"a probe of {len(probe)} bytes arrived as something else")
    return line


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

    @property
    def needs_line(self) -> bool:
        """Whether the peers have to meet over a socket first."""
        ...

    def objection(self, mine: PeerAddress, theirs: PeerAddress) -> str | None: ...

    def offer(self, meeting: Meeting) -> tuple[Outgoing, str]:
        """The sender's end, and the reason why it is usable. Raises Unusable."""
        ...

    def answer(self, details: bytes, meeting: Meeting) -> tuple[Incoming, bytes]:
        """The receiver's end, and what arrived of the probe. Raises Unusable."""
        ...


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
