"""Values between named peers: processes, or parts of one, wherever they run.

    with Peer.join("10.0.0.1:29400", "trainer/0") as me:
        me.send("engine/0", {"w": tensor})
        reply = me.receive("engine/0", timeout_s=30)
        print(me.transport_to("engine/0"))

Each ordered pair has a link of its own, made when the first value goes that way, over the fastest transport that
carries a probe (transports/base.py). Links are independent: a receiver takes from one sender in the order of its sends,
and a sender that is not received from holds up nobody else.

A send is done when the transport has the value: the receiver may be up to `capacity_bytes` behind. All waits end: with
what was waited for, with PeerTimeout, or, soon after the other process is gone, with PeerLost (PeerLeft when it said
farewell). A loss is told to those who send, until somebody else has the name (wait_for), and once to those who receive,
after all values that had been sent: a receive that begins later waits for the next process of that name.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from rlinf_comm.errors import PeerLeft, PeerLost, PeerTimeout
from rlinf_comm.peers import negotiation
from rlinf_comm.peers.directory import Directory, route_to
from rlinf_comm.peers.inbox import Inbox, IncomingLink, NoLink
from rlinf_comm.peers.links import PeerLinks
from rlinf_comm.peers.transports import Transport, chosen_transports
from rlinf_comm.peers.transports.base import ChosenTransport, Incoming
from rlinf_comm.peers.transports.tcp import ReadAhead
from rlinf_comm.wire.address import PeerAddress, check_arguments, own_address
from rlinf_comm.wire.connection import Connection, peer_key
from rlinf_comm.wire.deadline import DEFAULT_TIMEOUT_S, SLICE_S, Deadline
from rlinf_comm.wire.listener import Listener
from rlinf_comm.wire.secret import require_secret_beyond

DEFAULT_CAPACITY_BYTES = 64 << 20

_MEETING_TIMEOUT_S = 30.0
"""Time that the called side has to meet; the caller has the deadline of its call."""
_LOOK_TIMEOUT_S = 2.0
"""Time to find out whether a peer is alive; one that is slower counts as alive."""


class Peer:
    """One named end of links to other peers. Safe for several threads; not for a forked child, which makes its own."""

    def __init__(
        self,
        name: str,
        *,
        host: str,
        transports: Sequence[str | Transport] | None,
        capacity_bytes: int,
    ) -> None:
        """Private: use Peer.join or Peer.listen."""
        check_arguments(name, host, capacity_bytes)
        require_secret_beyond(host, f"peer {name!r}")
        self._transports = chosen_transports(transports)
        self._capacity_bytes = capacity_bytes
        incarnation = secrets.token_bytes(16)
        self._listener = Listener((host, 0), peer_key(incarnation), self._meet, f"peer {name!r}")
        self._address = own_address(name, (host, self._listener.port), incarnation)
        self._directory: Directory | None = None
        self._addresses: dict[str, PeerAddress] = {}
        self._links = PeerLinks(name, self._make_link)
        self._inboxes: dict[str, Inbox] = {}
        self._changed = threading.Condition()
        """Guards the dictionaries; notified when a link comes in, and by close()."""
        self._read_ahead = ReadAhead()
        self._is_open = True
        self._listener.start()

    @classmethod
    def join(
        cls,
        directory: str,
        name: str,
        *,
        serve: bool | None = None,
        host: str | None = None,
        transports: Sequence[str | Transport] | None = None,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Peer:
        """A peer that finds the others, and is found, by name. All of them have the same job secret (secret.py).

        Args:
            directory: "host:port", at exactly which one of the peers serves it.
            name: Unique among the living; the name of a peer that has died can be had again.
            serve: Serve the directory from this process; None: if it is on this host and nobody does yet.
            host: Address or interface to be called at; by default the one that leads to the directory.
            transports: The only ones to use, in order of preference; by default all, the fastest first. Names
                ("shared", "tcp") or Transport objects. RLINF_COMM_TRANSPORTS="tcp" does the same.
            capacity_bytes: Bytes of values that may be on their way over one link before the sender waits for the
                receiver. Larger values cross too, in parts.
            timeout_s: Seconds for reaching the directory.

        Raises:
            PeerNameTaken: a living peer has the name.
            PeerTimeout: nobody serves the directory.
            NotTrusted: what is there is not of this job, or others can call and the job has no secret.
        """
        name_directory = Directory.of(directory, serve, Deadline(timeout_s))
        peer = cls(name, host=host or route_to(directory), transports=transports, capacity_bytes=capacity_bytes)
        try:
            name_directory.claim(peer.address, lambda owner: negotiation.is_living(owner, Deadline(_LOOK_TIMEOUT_S)))
        except BaseException:
            peer.close()
            raise
        peer._directory = name_directory
        return peer

    @classmethod
    def listen(
        cls,
        name: str,
        *,
        host: str = "127.0.0.1",
        transports: Sequence[str | Transport] | None = None,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
    ) -> Peer:
        """A peer without a directory: hand its `address` to others of the job, who connect() to it. Arguments as of
        join().

        One side of a pair is enough: who has been called knows the caller.
        """
        return cls(name, host=host, transports=transports, capacity_bytes=capacity_bytes)

    @property
    def name(self) -> str:
        return self._address.name

    @property
    def address(self) -> PeerAddress:
        return self._address

    def __repr__(self) -> str:
        host, port = self._address.endpoint
        return f"<Peer {self.name!r} at {host}:{port}{'' if self._is_open else ', closed'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"peer {self.name!r} is not picklable; send peer.address, and connect() to it over there")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- finding others ---

    def connect(self, address: PeerAddress, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> ChosenTransport:
        """Makes the peer at `address` known by its name, and a link to it.

        Raises:
            PeerLost: it is gone.
            NoTransport: none works between the two; says why, for each.
        """
        with self._changed:
            self._addresses[address.name] = address
        before = self._links.get(address.name)
        if before is not None and before.address.incarnation != address.incarnation:
            self._links.drop(address.name, before)
        return self.transport_to(address.name, timeout_s=timeout_s)

    def wait_for(self, name: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> PeerAddress:
        """Waits until a living peer has this name, say the replacement of one that was lost."""
        deadline = Deadline(timeout_s)
        while True:
            address = self._find(name)
            if address is not None and negotiation.is_living(address, deadline.capped(_LOOK_TIMEOUT_S)):
                return address
            if deadline.has_passed:
                raise PeerTimeout(f"{self.name!r}: no living {name!r} within timeout_s={timeout_s:g}; {self._where()}")
            time.sleep(deadline.slice_s / 2)

    def transport_to(self, name: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> ChosenTransport:
        """How values get from here to that peer, and why so. Makes the link if there is none."""
        self._check_open()
        return self._links.to(name, Deadline(timeout_s)).transport

    def _find(self, name: str) -> PeerAddress | None:
        listed = None if self._directory is None else self._directory.find(name)
        return listed or self._addresses.get(name)

    def _where(self) -> str:
        if self._directory is not None:
            return self._directory.describe()
        names = ", ".join(sorted(self._addresses)) or "nobody"
        return f"it has no directory and knows {names}; connect(address) first, or let the other one connect"

    # --- sending ---

    def send(self, to: str, value: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Sends one value; waits for the peer to appear, and while more than capacity_bytes are on their way.

        Within one host tensors of a SharedPool cross by reference; of all else a copy is made before this returns.

        Args:
            to: The peer's name.
            value: Anything that rlinf_comm.codec encodes; tensors of any strides.
            timeout_s: Seconds for all of it.

        Raises:
            PeerLost, PeerLeft: it is gone; values that it had not received are lost.
            PeerTimeout: nothing of the value will be received.
            UnsupportedValueError: the value cannot cross; names the part of it.
        """
        self._check_open()
        self._links.send(to, value, Deadline(timeout_s))

    def _make_link(self, name: str, deadline: Deadline) -> negotiation.OutgoingLink:
        theirs = self._await_address(name, deadline)
        return negotiation.call(self._address, theirs, self._transports, self._capacity_bytes, deadline)

    def _await_address(self, name: str, deadline: Deadline) -> PeerAddress:
        while (address := self._find(name)) is None:
            self._check_open()
            if deadline.has_passed:
                raise PeerTimeout(
                    f"{self.name!r}: no peer {name!r} within timeout_s={deadline.timeout_s:g}; {self._where()}"
                )
            time.sleep(min(deadline.slice_s, SLICE_S / 4))
        return address

    # --- receiving ---

    def receive(self, from_: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """The next value of that peer, in the order of its sends.

        Raises:
            PeerLost, PeerLeft: once, when it is gone and all that it had sent has been received.
            PeerTimeout: nothing came; says what is known of the peer.
            DecodeError: the value cannot be built here; later ones can be received.
        """
        name, deadline = from_, Deadline(timeout_s)
        inbox = self._inbox(name)
        ended = inbox.ended
        while True:
            self._check_open()
            try:
                return inbox.receive(deadline)
            except NoLink:
                pass  # wait for one
            with self._changed:
                if inbox.is_empty():
                    self._changed.wait(deadline.slice_s)
            if not inbox.is_empty():
                continue
            self._look_at(name, ended, deadline)
            if deadline.has_passed:
                peer = self._find(name)
                state = "has ended, and no other has come" if peer and peer.incarnation == ended else "has sent nothing"
                what = f"{name!r} ({peer.place}) {state}" if peer else f"no {name!r} yet; {self._where()}"
                raise PeerTimeout(f"{self.name!r}: receive from {name!r} not done in {deadline.timeout_s:g} s: {what}")

    def _look_at(self, name: str, ended: bytes | None, deadline: Deadline) -> None:
        """Raises PeerLost when a peer that has never sent anything is gone, unless its incarnation is `ended`."""
        link = self._links.get(name)
        address = self._find(name) if link is None else link.address
        if address is None or address.incarnation == ended:
            return
        try:
            self._links.look_at(name, deadline.capped(_LOOK_TIMEOUT_S))
        except PeerLost:
            inbox = self._inbox(name)
            if inbox.is_empty():  # else it has sent something meanwhile
                inbox.ended = address.incarnation
                raise

    def _inbox(self, name: str) -> Inbox:
        inbox = self._inboxes.get(name)
        if inbox is None:
            with self._changed:
                inbox = self._inboxes.setdefault(name, Inbox())
        return inbox

    # --- being called ---

    def _meet(self, connection: Connection) -> None:
        """Meets a caller, in a thread of the listener."""
        deadline = Deadline(_MEETING_TIMEOUT_S)
        met = negotiation.answer(
            connection, self._address, self._transports, self._capacity_bytes, self._objection, deadline
        )
        if met is None:
            connection.shut()
        else:
            self._add_incoming(*met)

    def _objection(self, caller: PeerAddress) -> str | None:
        """Why this caller is not to be met."""
        before = self._address if caller.name == self.name else self._addresses.get(caller.name)
        is_me = before is self._address
        if (
            before
            and before.incarnation != caller.incarnation
            and (is_me or negotiation.is_living(before, Deadline(_LOOK_TIMEOUT_S)))
        ):
            return f"a living peer has the name {caller.name!r}: {before.place}"
        with self._changed:
            self._addresses[caller.name] = caller
        return None

    def _add_incoming(self, theirs: PeerAddress, incoming: Incoming) -> None:
        self._read_ahead.add(incoming)
        with self._changed:
            if self._is_open:
                self._addresses[theirs.name] = theirs
                self._inboxes.setdefault(theirs.name, Inbox()).add(IncomingLink(theirs, incoming))
                self._changed.notify_all()
                inboxes = list(self._inboxes.values())
        if not self._is_open:
            incoming.close(farewell=True)
            return
        for end in (*inboxes, self._links):
            end.sweep()

    # --- the end ---

    def _check_open(self) -> None:
        if not self._is_open:
            raise PeerLeft(f"peer {self.name!r} has been closed by this process")
        if self._address.pid != os.getpid():
            raise ValueError(f"peer {self.name!r} belongs to process {self._address.pid}; make one in this process")

    def close(self) -> None:
        """Says farewell to all, gives the name up, and frees everything. Values on their way still arrive."""
        self._end(farewell=True)

    def _end(self, *, farewell: bool) -> None:
        with self._changed:
            if not self._is_open:
                return
            self._is_open = False
            inboxes = list(self._inboxes.values())
            self._changed.notify_all()
        self._listener.close()
        self._read_ahead.close()
        if farewell and self._directory is not None:
            self._directory.leave()
        for end in (self._links, *inboxes):
            end.close(farewell=farewell)
