"""A channel of another host, as a process here sees it."""

from __future__ import annotations

import math
import operator
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from rlinf_comm import _C, _leaving, codec, errors
from rlinf_comm._checked import sealed, unsealed
from rlinf_comm.channel import _MAX_COUNT, ChannelStats, Item, Key
from rlinf_comm.codec import Encoded
from rlinf_comm.errors import ChannelError, ChannelTimeout, CommError, DecodeError, PeerLost, PeerTimeout
from rlinf_comm.peers.address import PeerAddress, this_host
from rlinf_comm.peers.deadline import DEFAULT_TIMEOUT_S, Deadline
from rlinf_comm.peers.line import Line
from rlinf_comm.peers.meeting import Hello
from rlinf_comm.remote.address import DoorAddress
from rlinf_comm.remote.messages import (
    NOTHING,
    Abort,
    Answer,
    Close,
    DropLost,
    Enter,
    Failed,
    Flush,
    Granted,
    Put,
    Reopen,
    Request,
    Room,
    Stats,
    Take,
    Taken,
    Told,
    answer_of,
    compose,
)
from rlinf_comm.remote.wire import Wire

_GRACE_S = 10.0
"""A door answers a call that has timed out at once; one that is silent for so much longer does not run any more."""
_ITEM_BYTES = 512
"""What an item may take in the channel beside its bytes, its padding to 64 bytes for each tensor apart."""


class RemoteChannel:
    """The channel behind a door: Channel's puts and takes, with its arguments, errors and order.

    A put goes at once, and without waiting for an answer while the door has granted room for it; `flush` waits until
    all of them are in the channel. A put that returned gets there also when this process is killed afterwards. When the
    *connection* breaks, or the door's process ends, all calls raise PeerLost, and what was put since the last call that
    was answered may not have arrived. A channel that is closed or aborted while such puts are on their way refuses
    them; the next call raises it.

    Safe for several threads. Puts of a process go one after the other, takes have lines of their own.
    """

    def __init__(self, address: DoorAddress, line: Line, me: PeerAddress, entered: Enter) -> None:
        """Private: use RemoteChannel.open."""
        _leaving.watch_the_end_of_this_process()
        self._address = address
        self._me = me
        self._entered = entered
        self._pid = os.getpid()
        self._putting = threading.Lock()
        self._put_wire = Wire(line, address.door)
        self._granted = Granted(0, 0)
        self._num_unanswered = 0
        """Puts since the last answer."""
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._wires: list[Wire] = [self._put_wire]
        self._loss: str | None = None
        self._finalizer = weakref.finalize(self, _end, self._wires, self._pid)
        self._finalizer.atexit = False  # a process that ends by an exception is missed, as one that is killed
        _open_channels.add(self)

    @classmethod
    def open(cls, address: DoorAddress, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> RemoteChannel:
        """The channel behind the door at `address`, from any process of the job.

        Raises:
            PeerLost: the door's process is gone, has closed the door, or has another secret.
            PeerTimeout: its host or process does not answer within `timeout_s`.
            DecodeError: it speaks another version of the protocol.
        """
        pid, start_ticks = _C.current_process()
        me = PeerAddress(
            name=f"process {pid}",
            host=this_host(),
            pid=pid,
            start_ticks=start_ticks,
            endpoint=("", 0),
            incarnation=os.urandom(16),
        )
        line, me, entered = _enter(address, me, Deadline(timeout_s))
        return cls(address, line, me, entered)

    @property
    def name(self) -> str:
        return self._address.name

    @property
    def address(self) -> DoorAddress:
        return self._address

    def __repr__(self) -> str:
        return f"<RemoteChannel {self.name!r} of {self._address.door!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"channel {self.name!r} is not picklable; send its address, and RemoteChannel.open it over there"
        )

    # --- putting ---

    def put(
        self,
        value: Any,
        *,
        key: Key = 0,
        weight: float = 1.0,
        policy_version: int = -1,
        timeout_s: float | None = None,
    ) -> None:
        """Channel.put, with its arguments and errors; tensors in a SharedPool cross as all others.

        Raises:
            PeerLost: also when the connection or the door's process ended.
        """
        encoded, key = self._encoded(value, weight), self._checked(key)
        deadline = _deadline(self.name, timeout_s)
        labels = (key, float(weight), operator.index(policy_version))
        if self._entered.num_keys > 1:  # no key waits behind another: each put has a line, and waits for its answer
            self._ask(self._put_request(labels, deadline), encoded, deadline)
            return
        with deadline.holding(self._putting) as held:
            if not held:
                raise self._put_timeout(encoded, key, timeout_s, "another put of this process waits for room")
            self._put_in_turn(labels, encoded, deadline)

    def _put_in_turn(self, labels: tuple[Key, float, int], encoded: Encoded, deadline: Deadline) -> None:
        num_bytes = encoded.num_bytes + _ITEM_BYTES + 64 * len(encoded.buffers)
        if not self._is_granted(num_bytes) and deadline.timeout_s == 0.0:
            self._grant_by(self._exchange(self._put_wire, compose(Room(encoded.num_bytes)), deadline))
        if self._is_granted(num_bytes):
            self._granted.num_items -= 1
            self._granted.num_bytes -= num_bytes
            # Room for it is there: the time limit is for the wait for room.
            message = compose(Put(*labels, None, answers=False), encoded)
            self._say(self._put_wire, message, deadline if deadline.timeout_s else Deadline(_GRACE_S))
            self._num_unanswered += 1
        else:
            message = compose(self._put_request(labels, deadline), encoded)
            self._grant_by(self._exchange(self._put_wire, message, deadline))

    def _is_granted(self, num_bytes: int) -> bool:
        return self._granted.num_items >= 1 and self._granted.num_bytes >= num_bytes

    def _grant_by(self, answer: Answer) -> None:
        assert isinstance(answer, Granted), f"{answer} for a put"
        self._granted = answer
        self._num_unanswered = 0

    def flush(self) -> None:
        """Returns when all that was put here is in the channel, for who tells others of it on another way. `close` does
        so by itself, and a take or stats() of this object sees what was put before."""
        with self._putting:
            self._grant_by(self._exchange(self._put_wire, compose(Flush(waits=True)), Deadline(math.inf)))

    def _settle(self) -> None:
        """So that a call over another line finds what this process has put, if there is room for it."""
        if self._num_unanswered and self._putting.acquire(
            blocking=False
        ):  # else a put waits, and those before it are in
            try:
                self._grant_by(self._exchange(self._put_wire, compose(Flush(waits=False)), Deadline(math.inf)))
            finally:
                self._putting.release()

    @staticmethod
    def _put_request(labels: tuple[Key, float, int], deadline: Deadline) -> Put:
        return Put(*labels, deadline.left_s if math.isfinite(deadline.timeout_s) else None, answers=True)

    def _checked(self, key: Key) -> Key:
        if isinstance(key, int) and -(1 << 63) <= key < 1 << 63:
            return int(key)
        if isinstance(key, str) and key:
            return key
        raise ValueError(
            f"channel {self.name!r}: key={key!r}; a number of 64 bits with its sign, or a text that is not empty"
        )

    def _encoded(self, value: Any, weight: float) -> Encoded:
        """Raises ValueError for an item that the channel does not take."""
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"channel {self.name!r}: weight={weight}; finite and not negative")
        encoded = codec.encode(sealed(value) if self._address.checked else value)
        room = self._entered.capacity_bytes // self._entered.num_keys
        if encoded.num_bytes > room:
            share = f", of which each of num_keys={self._entered.num_keys} keys has {room}"
            raise ValueError(
                f"channel {self.name!r}: an item of {encoded.num_bytes} bytes does not fit into "
                f"capacity_bytes={self._entered.capacity_bytes}{share if self._entered.num_keys > 1 else ''}"
            )
        return encoded

    def _put_timeout(self, encoded: Encoded, key: Key, timeout_s: float | None, why: str) -> ChannelTimeout:
        what = f"put of {encoded.num_bytes} bytes with key {key!r}"
        return ChannelTimeout(f"channel {self.name!r}: {what} not done within timeout_s={timeout_s}; {why}")

    # --- taking ---

    def take(
        self,
        *,
        max_items: int = 1,
        min_items: int = 1,
        min_weight: float = 0.0,
        max_weight: float | None = None,
        keys: Sequence[Key] | None = None,
        timeout_s: float | None = None,
    ) -> list[Item]:
        """Channel.take, with its arguments and errors. Items that were on their way when this process died are gone."""
        if isinstance(keys, str):
            raise ValueError(f"channel {self.name!r}: keys={keys!r}; a sequence of keys, or None for any")
        deadline = _deadline(self.name, timeout_s)
        chosen = None if keys is None else [self._checked(key) for key in keys]
        request = Take(
            min(operator.index(max_items), _MAX_COUNT),
            min(operator.index(min_items), _MAX_COUNT),
            min_weight,
            max_weight,
            chosen,
            None if timeout_s == math.inf else timeout_s,
        )
        answer, rest, buffers = self._ask_for_values(request, deadline)
        assert isinstance(answer, Taken), f"{answer} for a take"
        items, start, first = [], 0, 0
        for label in answer.labels:
            header = rest[start : start + label.header_bytes]
            mine = buffers[first : first + label.num_buffers]
            start, first = start + label.header_bytes, first + label.num_buffers
            items.append(self._item(label.key, label.weight, label.policy_version, label.sequence, header, mine))
        return items

    def _item(
        self, key: Key, weight: float, policy_version: int, sequence: int, header: bytes, buffers: list[memoryview]
    ) -> Item:
        place = f"channel {self.name!r}, item {sequence}"
        try:
            value = codec.decode(header, buffers)
        except DecodeError as error:
            raise DecodeError(f"{place}: {error}") from error
        return Item(
            value=unsealed(value, place) if self._address.checked else value,
            key=key,
            weight=weight,
            policy_version=policy_version,
            sequence=sequence,
            nbytes=len(header) + sum(map(len, buffers)),
        )

    def __iter__(self) -> Iterator[Any]:
        """Values one by one, until the channel is closed and empty."""
        while items := self.take():
            yield items.pop().value

    # --- the rest ---

    def close(self) -> None:
        """Channel.close: one producer is done. All that was put here is in the channel when this returns."""
        with self._putting:
            self._grant_by(self._exchange(self._put_wire, compose(Close()), Deadline(math.inf)))

    def reopen(self, num_producers: int) -> None:
        """Channel.reopen, which the channel's owner does, since its door stands there."""
        self._ask(Reopen(num_producers), NOTHING, Deadline(_GRACE_S))

    def abort(self, reason: str) -> None:
        """Channel.abort: ends the channel for everybody."""
        self._ask(Abort(reason), NOTHING, Deadline(_GRACE_S))
        self._granted = Granted(0, 0)  # what was granted before; the next put asks, and learns that it is over

    def stats(self) -> ChannelStats:
        answer = self._ask(Stats(), NOTHING, Deadline(_GRACE_S))
        assert isinstance(answer, Told), f"{answer} for stats"
        return ChannelStats(**answer.stats)  # pyright: ignore[reportArgumentType]

    def drop_lost_peers(self) -> list[int]:
        """Channel.drop_lost_peers: goes on without the processes that died, for all users of the channel."""
        answer = self._ask(DropLost(), NOTHING, Deadline(_GRACE_S))
        assert isinstance(answer, Told), f"{answer} for drop_lost_peers"
        return answer.pids

    def leave(self) -> None:
        """Ends the connections: this process has no more to do with the channel, and its death concerns nobody.

        Happens by itself when the object is collected, and when the interpreter ends without an exception. A later call
        raises PeerLost.
        """
        self._loss = f"channel {self.name!r}: this process has left it; RemoteChannel.open it again"
        self._finalizer()

    # --- lines ---

    def _ask(self, request: Request, encoded: Encoded, deadline: Deadline) -> Answer:
        return self._ask_for_values(request, deadline, encoded)[0]

    def _ask_for_values(
        self, request: Request, deadline: Deadline, encoded: Encoded = NOTHING
    ) -> tuple[Answer, bytes, list[memoryview]]:
        """Asks over a line that nobody uses."""
        self._check_is_there()
        self._settle()
        with self._lock:
            wire = self._idle.pop() if self._idle else None
        wire = wire or self._another_wire(deadline)
        try:
            return self._exchange_values(wire, compose(request, encoded), deadline)
        finally:
            with self._lock:
                if wire.is_in_turn:
                    self._idle.append(wire)
                else:
                    self._wires.remove(wire)
            if not wire.is_in_turn:
                wire.leave()

    def _another_wire(self, deadline: Deadline) -> Wire:
        try:
            line, _, _ = _enter(self._address, self._me, Deadline(max(deadline.left_s, _GRACE_S)))
        except PeerLost as error:
            raise self._lost(error) from error
        wire = Wire(line, self._address.door)
        with self._lock:
            self._wires.append(wire)
        if self._loss is not None:  # another thread has left meanwhile, and may not have seen this line
            wire.leave()
            raise PeerLost(self._loss)
        return wire

    def _exchange(self, wire: Wire, message: Encoded, deadline: Deadline) -> Answer:
        return self._exchange_values(wire, message, deadline)[0]

    def _exchange_values(
        self, wire: Wire, message: Encoded, deadline: Deadline
    ) -> tuple[Answer, bytes, list[memoryview]]:
        """Says a message, and hears the answer; raises the error that it tells of."""
        self._say(wire, message, deadline if deadline.timeout_s else Deadline(_GRACE_S))
        wire.is_in_turn = False
        try:
            header, buffers = wire.hear(deadline.left_s + _GRACE_S)
            answer, rest = answer_of(header)
        except PeerTimeout as error:
            raise self._lost(f"it has not answered {_GRACE_S:g} s after the end of a call: {error}") from error
        except (PeerLost, DecodeError) as error:
            raise self._lost(error) from error
        wire.is_in_turn = True
        if isinstance(answer, Failed):
            raise _error_of(answer)
        return answer, rest, buffers

    def _say(self, wire: Wire, message: Encoded, deadline: Deadline) -> None:
        self._check_is_there()
        if not wire.is_in_turn:
            raise self._lost("a wait for its answer was broken off, so that it is not known what was put")
        try:
            wire.say(message, deadline)
        except PeerTimeout as error:
            raise ChannelTimeout(f"channel {self.name!r}: {error}") from error
        except PeerLost as error:
            raise self._lost(error) from error

    def _check_is_there(self) -> None:
        if self._loss is not None:
            raise PeerLost(self._loss)
        if self._pid != os.getpid():
            raise PeerLost(f"channel {self.name!r}: this process was forked; RemoteChannel.open it here")

    def _lost(self, why: object) -> PeerLost:
        self._loss = self._loss or f"channel {self.name!r}: {why}"
        return PeerLost(self._loss)


def _enter(address: DoorAddress, me: PeerAddress, deadline: Deadline) -> tuple[Line, PeerAddress, Enter]:
    """Meets the door: the line, this process as the door knows it, and what the door says of its channel."""
    line = Line.to_peer(address.door, deadline)
    try:
        host, port = line.socket.getsockname()[:2]
        me = replace(me, endpoint=(host, port))
        line.tell(Hello(me, address.name), deadline)
        return line, me, line.hear(Enter, deadline)
    except BaseException:
        line.close()
        raise


def _end(wires: list[Wire], pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no lines
        for wire in list(wires):
            wire.leave()


def _leave_all() -> None:
    for channel in list(_open_channels):
        channel.leave()


_open_channels: weakref.WeakSet[RemoteChannel] = weakref.WeakSet()
_leaving.when_leaving(_leave_all)


def _deadline(name: str, timeout_s: float | None) -> Deadline:
    if timeout_s is not None and not timeout_s >= 0.0:
        raise ValueError(f"channel {name!r}: timeout_s={timeout_s} must not be negative; None waits without a limit")
    return Deadline(math.inf if timeout_s is None else timeout_s)


def _error_of(failed: Failed) -> Exception:
    if failed.error == "PeerLost":
        return PeerLost(failed.text, pids=tuple(failed.pids))
    kind = getattr(errors, failed.error, None)
    if isinstance(kind, type) and issubclass(kind, (ChannelError, DecodeError)):
        return kind(failed.text)
    return ValueError(failed.text) if failed.error == "ValueError" else CommError(failed.text)
