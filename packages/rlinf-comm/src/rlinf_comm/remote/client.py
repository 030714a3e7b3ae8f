"""A channel of another host, as a process here sees it."""

from __future__ import annotations

import math
import operator
import os
import threading
import weakref
from dataclasses import replace
from typing import Any

import msgspec

from rlinf_comm import _leaving, codec, errors
from rlinf_comm.channel import ChannelStats, Item, Key, Request
from rlinf_comm.codec import Encoded
from rlinf_comm.errors import ChannelError, ChannelTimeout, CommError, DecodeError, PeerLost, PeerTimeout
from rlinf_comm.remote.address import ServerAddress
from rlinf_comm.remote.exchange import Exchange
from rlinf_comm.remote.messages import (
    NOTHING,
    SERVICE,
    Abort,
    Answer,
    Close,
    DropLost,
    Enter,
    Failed,
    Flush,
    Granted,
    Message,
    Numbers,
    Put,
    Reopen,
    Room,
    Stats,
    Take,
    Taken,
    answer_of,
    compose,
)
from rlinf_comm.wire.address import PeerAddress, own_address
from rlinf_comm.wire.connection import Connection
from rlinf_comm.wire.deadline import FOREVER, Deadline
from rlinf_comm.wire.handshake import Hello, Refused, introduce

_GRACE_S = 10.0
"""A server answers a call that has timed out at once; one that is silent for so much longer does not run any more."""
_ITEM_BYTES = 512
"""What an item may take in the channel beside its bytes, its padding to 64 bytes for each tensor apart."""


class RemoteBackEnd:
    """A channel behind its server; what Channel says of one on another machine.

    Safe for several threads. Puts of a process go one after the other, takes have connections of their own.
    """

    def __init__(self, address: ServerAddress, connection: Connection, me: PeerAddress, entered: Enter) -> None:
        """Private: use RemoteBackEnd.open."""
        self._address = address
        self._name = address.name
        self._me = me
        self._entered = entered
        self._pid = os.getpid()
        self._putting = threading.Lock()
        self._put_exchange = Exchange(connection, address.server)
        self._granted = Granted(0, 0)
        self._num_unanswered = 0
        """Puts since the last answer."""
        self._lock = threading.Lock()
        self._idle: list[Exchange] = []
        self._exchanges: list[Exchange] = [self._put_exchange]
        self._loss: str | None = None
        self._finalizer = weakref.finalize(self, _end, self._exchanges, self._pid)
        self._finalizer.atexit = False  # a process that ends by an exception is missed, as one that is killed
        _open_channels.add(self)

    @classmethod
    def open(cls, address: ServerAddress, timeout_s: float) -> RemoteBackEnd:
        """Raises PeerLost, PeerTimeout, DecodeError as Channel.open."""
        me = own_address(f"process {os.getpid()}")
        connection, me, entered = _enter(address, me, Deadline(timeout_s))
        return cls(address, connection, me, entered)

    # --- putting ---

    def put(self, value: Any, key: Key, weight: float, policy_version: int, timeout_s: float | None) -> None:
        """Tensors in a SharedPool cross as all others. Raises PeerLost also when the connection or the server's process
        has ended."""
        encoded, key = self._encoded(value), self._checked(key)
        deadline = _deadline(self._name, timeout_s)
        labels = (key, float(weight), operator.index(policy_version))
        if self._entered.num_keys > 1:  # no key waits behind another: each put has its connection and its answer
            self._ask(self._put_request(labels, deadline), encoded, deadline)
            return
        with deadline.holding(self._putting) as held:
            if not held:
                what = f"put of {encoded.num_bytes} bytes with key {key!r}"
                raise ChannelTimeout(
                    f"channel {self._name!r}: {what} not done within timeout_s={timeout_s}; another put of this "
                    "process waits for room"
                )
            self._put_in_turn(labels, encoded, deadline)

    def _put_in_turn(self, labels: tuple[Key, float, int], encoded: Encoded, deadline: Deadline) -> None:
        num_bytes = encoded.num_bytes + _ITEM_BYTES + 64 * len(encoded.buffers)
        if not self._is_granted(num_bytes) and deadline.timeout_s == 0.0:
            self._grant_by(self._exchange(self._put_exchange, compose(Room(encoded.num_bytes)), deadline))
        if self._is_granted(num_bytes):
            self._granted.num_items -= 1
            self._granted.num_bytes -= num_bytes
            # Room for it is there: the time limit is for the wait for room.
            message = compose(Put(*labels, None, answers=False), encoded)
            self._send(self._put_exchange, message, deadline if deadline.timeout_s else Deadline(_GRACE_S))
            self._num_unanswered += 1
        else:
            message = compose(self._put_request(labels, deadline), encoded)
            self._grant_by(self._exchange(self._put_exchange, message, deadline))

    def _is_granted(self, num_bytes: int) -> bool:
        return self._granted.num_items >= 1 and self._granted.num_bytes >= num_bytes

    def _grant_by(self, answer: Answer) -> None:
        assert isinstance(answer, Granted), f"{answer} for a put"
        self._granted = answer
        self._num_unanswered = 0

    def flush(self) -> None:
        self._exchange_put(Flush(waits=True))

    def _exchange_put(self, message: Message) -> None:
        """Exchanges a message after all that was put, with the grant that answers it."""
        with self._putting:
            self._grant_by(self._exchange(self._put_exchange, compose(message), FOREVER))

    def _flush_puts(self) -> None:
        """So that a call over another connection finds what this process has put, if there is room for it."""
        if self._num_unanswered and self._putting.acquire(
            blocking=False
        ):  # else a put waits, and those before it are in
            try:
                self._grant_by(self._exchange(self._put_exchange, compose(Flush(waits=False)), FOREVER))
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
            f"channel {self._name!r}: key={key!r}; a number of 64 bits with its sign, or a text that is not empty"
        )

    def _encoded(self, value: Any) -> Encoded:
        """Raises ValueError for an item that the channel does not take."""
        encoded = codec.encode(value)
        room = self._entered.capacity_bytes // self._entered.num_keys
        if encoded.num_bytes > room:
            share = f", of which each of num_keys={self._entered.num_keys} keys has {room}"
            raise ValueError(
                f"channel {self._name!r}: an item of {encoded.num_bytes} bytes does not fit into "
                f"capacity_bytes={self._entered.capacity_bytes}{share if self._entered.num_keys > 1 else ''}"
            )
        return encoded

    # --- taking ---

    def take(self, request: Request, timeout_s: float | None) -> list[Item]:
        """Items that were on their way when this process died are gone."""
        deadline = _deadline(self._name, timeout_s)
        max_items, min_items, min_weight, max_weight, keys = request
        message = Take(
            operator.index(max_items),
            operator.index(min_items),
            min_weight,
            max_weight,
            None if keys is None else [self._checked(key) for key in keys],
            None if timeout_s == math.inf else timeout_s,
        )
        answer, rest, buffers = self._ask_for_values(message, deadline)
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
        try:
            value = codec.decode(header, buffers)
        except DecodeError as error:
            raise DecodeError(f"channel {self._name!r}, item {sequence}: {error}") from error
        num_bytes = len(header) + sum(map(len, buffers))
        return Item(value, key, weight, policy_version, sequence, num_bytes)

    # --- the rest ---

    def close(self) -> None:
        self._exchange_put(Close())

    def reopen(self, num_producers: int) -> None:
        self._ask(Reopen(num_producers), NOTHING, Deadline(_GRACE_S))

    def abort(self, reason: str) -> None:
        self._ask(Abort(reason), NOTHING, Deadline(_GRACE_S))
        self._granted = Granted(0, 0)  # what was granted before; the next put asks, and learns that it is over

    def stats(self) -> ChannelStats:
        answer = self._ask(Stats(), NOTHING, Deadline(_GRACE_S))
        assert isinstance(answer, Numbers), f"{answer} for stats"
        return ChannelStats(**answer.stats)  # pyright: ignore[reportArgumentType]

    def drop_lost_peers(self) -> list[int]:
        answer = self._ask(DropLost(), NOTHING, Deadline(_GRACE_S))
        assert isinstance(answer, Numbers), f"{answer} for drop_lost_peers"
        return answer.pids

    def leave(self) -> None:
        """Ends the connections."""
        self._loss = f"channel {self._name!r}: this process has left it; Channel.open it again"
        self._finalizer()

    # --- lines ---

    def _ask(self, message: Message, encoded: Encoded, deadline: Deadline) -> Answer:
        return self._ask_for_values(message, deadline, encoded)[0]

    def _ask_for_values(
        self, message: Message, deadline: Deadline, encoded: Encoded = NOTHING
    ) -> tuple[Answer, bytes, list[memoryview]]:
        """Asks over a connection that nobody uses."""
        self._check_is_there()
        self._flush_puts()
        with self._lock:
            exchange = self._idle.pop() if self._idle else None
        exchange = exchange or self._another_exchange(deadline)
        try:
            return self._exchange_values(exchange, compose(message, encoded), deadline)
        finally:
            with self._lock:
                if exchange.is_in_turn:
                    self._idle.append(exchange)
                else:
                    self._exchanges.remove(exchange)
            if not exchange.is_in_turn:
                exchange.leave()

    def _another_exchange(self, deadline: Deadline) -> Exchange:
        try:
            connection, _, _ = _enter(self._address, self._me, Deadline(max(deadline.left_s, _GRACE_S)))
        except PeerLost as error:
            raise self._lost(error) from error
        exchange = Exchange(connection, self._address.server)
        with self._lock:
            self._exchanges.append(exchange)
        if self._loss is not None:  # another thread has left meanwhile, and may not have seen this connection
            exchange.leave()
            raise PeerLost(self._loss)
        return exchange

    def _exchange(self, exchange: Exchange, message: Encoded, deadline: Deadline) -> Answer:
        return self._exchange_values(exchange, message, deadline)[0]

    def _exchange_values(
        self, exchange: Exchange, message: Encoded, deadline: Deadline
    ) -> tuple[Answer, bytes, list[memoryview]]:
        """Says a message, and hears the answer; raises the error that it tells of."""
        self._send(exchange, message, deadline if deadline.timeout_s else Deadline(_GRACE_S))
        exchange.is_in_turn = False
        try:
            header, buffers = exchange.receive(deadline.left_s + _GRACE_S)
            answer, rest = answer_of(header)
        except PeerTimeout as error:
            raise self._lost(f"it has not answered {_GRACE_S:g} s after the end of a call: {error}") from error
        except (PeerLost, DecodeError) as error:
            raise self._lost(error) from error
        exchange.is_in_turn = True
        if isinstance(answer, Failed):
            raise _error_of(answer)
        return answer, rest, buffers

    def _send(self, exchange: Exchange, message: Encoded, deadline: Deadline) -> None:
        self._check_is_there()
        if not exchange.is_in_turn:
            raise self._lost("a wait for its answer was broken off, so that it is not known what was put")
        try:
            exchange.send(message, deadline)
        except PeerTimeout as error:
            raise ChannelTimeout(f"channel {self._name!r}: {error}") from error
        except PeerLost as error:
            raise self._lost(error) from error

    def _check_is_there(self) -> None:
        if self._loss is not None:
            raise PeerLost(self._loss)
        if self._pid != os.getpid():
            raise PeerLost(f"channel {self._name!r}: this process was forked; Channel.open it here")

    def _lost(self, why: object) -> PeerLost:
        self._loss = self._loss or f"channel {self._name!r}: {why}"
        return PeerLost(self._loss)


def _enter(address: ServerAddress, me: PeerAddress, deadline: Deadline) -> tuple[Connection, PeerAddress, Enter]:
    """Connects: the connection, this process as the server knows it, and what the server says of its channel."""
    connection = Connection.to_peer(address.server, deadline)
    try:
        host, port = connection.socket.getsockname()[:2]
        me = replace(me, endpoint=(host, port))
        hello = Hello(service=SERVICE, name=address.name, caller=me)
        answer = introduce(connection, hello, deadline)
        return connection, me, msgspec.msgpack.decode(answer.details, type=Enter)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        connection.shut()
        raise DecodeError(f"{connection.who} does not describe its channel: {error}") from error
    except Refused as error:
        connection.shut()
        raise PeerLost(f"{connection.who}: {error}") from error
    except BaseException:
        connection.shut()
        raise


def _end(exchanges: list[Exchange], pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no lines
        for exchange in list(exchanges):
            exchange.leave()


def _leave_all() -> None:
    for channel in list(_open_channels):
        channel.leave()


_open_channels: weakref.WeakSet[RemoteBackEnd] = weakref.WeakSet()
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
