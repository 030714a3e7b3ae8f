"""Large broadcasts to other hosts: one copy for each host, which goes on from peer to peer.

    sender     Parcel  ->  first peer of a host  ->  its host-mates, and with many hosts the first peers of others
    each one   Receipt ->  sender
    sender     Announced  ->  each one, over its ordinary link

The bytes come ahead of their turn and wait at the receiver; Announced takes their place among the sender's other
values, so that order, capacity and loss are those of the ordinary link. Whoever has not sent a receipt, be it that a
peer on the way is gone, is stuck or has no room, gets the value itself in that place. So a peer on the way that dies
costs its host-mates some time and nothing else.

Relays have links of their own, whose sender has the name `relay of ...`, and never wait for their users.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlinf_comm import codec
from rlinf_comm.errors import CommError, DecodeError, PeerLost, PeerTimeout
from rlinf_comm.peers.address import RELAY_PREFIX, PeerAddress
from rlinf_comm.peers.background import Background
from rlinf_comm.peers.deadline import Deadline
from rlinf_comm.peers.links import Links
from rlinf_comm.peers.meeting import Link
from rlinf_comm.peers.spanning import Branch
from rlinf_comm.peers.transports.base import Incoming, TornStream
from rlinf_comm.records import record

MIN_RELAYED_BYTES = 1 << 20
"""Below this size, receipts take longer than the bytes."""

MakeLink = Callable[[PeerAddress, PeerAddress, Deadline], Link]
"""(mine, theirs, deadline) -> link"""


@record
@dataclasses.dataclass(frozen=True, slots=True)
class Parcel:
    """The bytes of one value, and where they go from here."""

    origin: PeerAddress
    number: int
    """Number of this broadcast among those of the origin, in their order."""
    header: bytes
    buffers: list[np.ndarray]
    """The buffers of codec.encode, as uint8 arrays."""
    then: tuple[Branch, ...]
    timeout_s: float

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers)


@record
@dataclasses.dataclass(frozen=True, slots=True)
class Receipt:
    """Tells the origin who has the bytes, and who will not get them this way."""

    number: int
    reached: tuple[str, ...]
    unreached: tuple[str, ...]


@record
@dataclasses.dataclass(frozen=True, slots=True)
class Announced:
    """Stands among a sender's values for one whose bytes came in a parcel, or brings it if they did not."""

    incarnation: bytes
    """Token of the sender's process; a restarted one has another."""
    number: int
    is_here: bool
    value: Any


class Dispatch:
    """One broadcast on its way, as its origin sees it."""

    def __init__(
        self, number: int, branches: Sequence[Branch], deadline: Deadline, is_lost: Callable[[PeerAddress], bool]
    ) -> None:
        self.number = number
        self._ways = {way[-1].name: way for branch in branches for way in branch.ways()}
        self._deadline = deadline
        self._is_lost = is_lost
        self._changed = threading.Condition()
        self._reached: set[str] = set()
        self._unreached: set[str] = set()

    @property
    def names(self) -> list[str]:
        return list(self._ways)

    def note(self, reached: Sequence[str], unreached: Sequence[str]) -> None:
        with self._changed:
            self._reached.update(reached)
            self._unreached.update(unreached)
            self._changed.notify_all()

    def has_reached(self, name: str) -> bool:
        """Waits for the receipt of that peer; False when it is not going to come."""
        while True:
            with self._changed:
                if name not in self._reached | self._unreached and not self._deadline.has_passed:
                    self._changed.wait(self._deadline.slice_s)
                if name in self._reached:
                    return True
                if name in self._unreached or self._deadline.has_passed:
                    return False
            if any(self._is_lost(address) for address in self._ways[name]):
                self.note((), (name,))


class Relay:
    """One peer's part in the broadcasts of all."""

    def __init__(self, mine: PeerAddress, make: MakeLink, capacity_bytes: int) -> None:
        self._mine = mine
        self._capacity_bytes = capacity_bytes
        self._addresses: dict[str, PeerAddress] = {}
        """Incarnation -> address. The links have the same keys, not names: a name may pass on to another process."""
        sender = dataclasses.replace(mine, name=RELAY_PREFIX + mine.name)
        self._links = Links(sender.name, lambda key, deadline: make(sender, self._addresses[key], deadline))
        self._background = Background()
        self._lock = threading.Lock()
        self._kept: dict[bytes, dict[int, Parcel]] = {}
        """Incarnation of the origin -> number -> parcel, for the parcels that have not been taken."""
        self._latest: dict[bytes, int] = {}
        """Incarnation of the origin -> the last number taken; a parcel that comes later with a smaller one was given up
        by its origin."""
        self._ended: set[bytes] = set()
        self._incoming: list[Incoming] = []
        self._closed = threading.Event()
        self.turn = threading.Lock()
        """Each broadcast holds it, so that they go one after the other."""
        self._num_dispatched = 0
        self._dispatch: Dispatch | None = None

    # --- the origin ---

    def dispatch(
        self,
        encoded: codec.Encoded,
        branches: Sequence[Branch],
        deadline: Deadline,
        is_lost: Callable[[PeerAddress], bool],
    ) -> Dispatch:
        """Sends a parcel to each branch, in threads. They have half of the time; the rest is for sending directly."""
        deadline = deadline.capped(deadline.left_s / 2)
        self._num_dispatched += 1
        made = Dispatch(
            self._num_dispatched, branches, deadline, lambda theirs: self._has_lost(theirs) or is_lost(theirs)
        )
        self._dispatch = made
        parcel = Parcel(
            origin=self._mine,
            number=made.number,
            header=bytes(encoded.header),
            buffers=[_array_of(buffer) for buffer in encoded.buffers],
            then=tuple(branches),
            timeout_s=deadline.left_s,
        )
        self._background.start(lambda: made.note((), self._pass_on(parcel)))
        return made

    def _has_lost(self, theirs: PeerAddress) -> bool:
        link = self._links.get(theirs.incarnation.hex())
        return theirs.is_known_dead() or (link is not None and is_lost(link))

    def announcement(self, dispatch: Dispatch, name: str, value: Callable[[], Any]) -> Announced:
        """What that peer gets in its turn. Waits for its receipt."""
        if dispatch.has_reached(name):
            return Announced(self._mine.incarnation, dispatch.number, False, None)
        return Announced(self._mine.incarnation, dispatch.number, True, value())

    # --- on the way ---

    def enter(self, incoming: Incoming) -> None:
        """Takes a link from another relay, and reads from it until its sender ends."""
        with self._lock:
            self._incoming.append(incoming)
        threading.Thread(target=self._read, args=(incoming,), name="rlinf-comm relay", daemon=True).start()

    def _read(self, incoming: Incoming) -> None:
        while not self._closed.is_set():
            try:
                message = incoming.receive(Deadline(math.inf), self._closed.is_set)
            except (PeerLost, TornStream, PeerTimeout):
                break
            except DecodeError:
                continue  # its receipt does not come, and the origin goes another way
            if isinstance(message, Parcel):
                self._take_in(message)
            elif isinstance(message, Receipt) and (dispatch := self._dispatch) and dispatch.number == message.number:
                dispatch.note(message.reached, message.unreached)
        with self._lock:
            if incoming in self._incoming:
                self._incoming.remove(incoming)
        incoming.close(farewell=False)

    def _take_in(self, parcel: Parcel) -> None:
        mine = (self._mine.name,)
        self._report(parcel, *((mine, ()) if self._keep(parcel) else ((), mine)))
        unreached = self._pass_on(parcel)
        if unreached:
            self._report(parcel, (), unreached)

    def _keep(self, parcel: Parcel) -> bool:
        """Whether there was room for it, as on a link: for one of any size, or for several up to the capacity."""
        with self._lock:
            if parcel.origin.incarnation in self._ended or parcel.number <= self._latest.get(
                parcel.origin.incarnation, 0
            ):
                return False
            parcels = self._kept.setdefault(parcel.origin.incarnation, {})
            num_bytes = sum(kept.num_bytes for kept in parcels.values())
            if parcels and num_bytes + parcel.num_bytes > self._capacity_bytes:
                return False
            parcels[parcel.number] = dataclasses.replace(parcel, then=())
            return True

    def _pass_on(self, parcel: Parcel) -> tuple[str, ...]:
        """Sends to all branches at once and returns the names of those that it cannot reach."""
        deadline = Deadline(parcel.timeout_s)
        branches = {branch.address.name: branch for branch in parcel.then}

        def send(name: str) -> None:
            branch = branches[name]
            onward = dataclasses.replace(parcel, then=branch.then, timeout_s=deadline.left_s)
            self._send(branch.address, onward, deadline)

        failed = self._background.for_each(send, branches)
        return tuple(way[-1].name for name in failed for way in branches[name].ways())

    def _report(self, parcel: Parcel, reached: tuple[str, ...], unreached: tuple[str, ...]) -> None:
        try:
            self._send(parcel.origin, Receipt(parcel.number, reached, unreached), Deadline(parcel.timeout_s))
        except CommError:
            pass  # an origin that is gone, or that will send the value itself

    def _send(self, to: PeerAddress, message: Any, deadline: Deadline) -> None:
        key = to.incarnation.hex()
        self._addresses.setdefault(key, to)
        self._links.send(key, message, deadline)

    # --- the receiver ---

    def open(self, announced: Announced) -> Any:
        """The value. Raises DecodeError when it cannot be built here."""
        with self._lock:
            self._latest[announced.incarnation] = announced.number
            parcels = self._kept.get(announced.incarnation, {})
            parcel = parcels.get(announced.number)
            for number in [number for number in parcels if number <= announced.number]:
                del parcels[number]
        if announced.is_here:
            return announced.value
        if parcel is None:
            raise DecodeError(f"the bytes of broadcast {announced.number} are not here any more")
        return codec.decode(parcel.header, [buffer.data for buffer in parcel.buffers])

    def forget(self, origin: PeerAddress) -> None:
        """Drops everything that is kept of a peer that has ended."""
        with self._lock:
            self._ended.add(origin.incarnation)
            self._kept.pop(origin.incarnation, None)
            self._latest.pop(origin.incarnation, None)

    # --- the end ---

    def sweep(self) -> None:
        self._links.sweep()

    def close(self, *, farewell: bool) -> None:
        self._closed.set()
        self._links.close(farewell=farewell)
        with self._lock:
            incoming, self._incoming = self._incoming, []
        for link in incoming:
            link.close(farewell=farewell)
        self._background.close()


def _array_of(buffer: memoryview) -> np.ndarray:
    return np.frombuffer(buffer, np.uint8) if buffer.nbytes else np.empty(0, np.uint8)


def is_lost(link: Link) -> bool:
    try:
        link.outgoing.check()
    except PeerLost:
        return True
    return False
