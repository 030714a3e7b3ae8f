"""What a server does for one connection of a client: a thread that takes a request, and waits in the channel for it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from rlinf_comm import _C, codec
from rlinf_comm._carried import Carried, carried, staying_carried
from rlinf_comm._outcomes import outcome_error
from rlinf_comm.channel import Channel, ChannelStats, Item, SharedBackEnd, checked_request
from rlinf_comm.codec import Encoded
from rlinf_comm.errors import ChannelTimeout, CommError, PeerLost
from rlinf_comm.remote.exchange import Exchange
from rlinf_comm.remote.messages import (
    Abort,
    Close,
    DropLost,
    Failed,
    Flush,
    Granted,
    Label,
    Message,
    Numbers,
    Put,
    Reopen,
    Room,
    Stats,
    Take,
    Taken,
    compose,
    request_of,
)
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.deadline import SLICE_S, Deadline

_ANSWER_TIMEOUT_S = 60.0
"""Time for an answer to a caller that has stopped reading, though it waits for one."""
_MAX_GRANTED_ITEMS = 4096
_MAX_GRANTED_BYTES = 64 << 20
"""The most that a caller puts without waiting for an answer: enough that the round trip is a small part of the time."""


@dataclass(slots=True, eq=False)
class Client:
    """One Channel object of a process elsewhere, with all of its connections."""

    address: PeerAddress
    num_connections: int = 0
    has_put: bool = False
    has_taken: bool = False
    has_closed: bool = False

    @property
    def is_missed(self) -> bool:
        """Whether its death concerns others: the same rule as for processes of the channel's host."""
        return self.has_taken or (self.has_put and not self.has_closed)


class ServerTraffic:
    """What has come and gone through a server, of all clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_put = self.put_bytes = self.num_taken = self.taken_bytes = 0
        """Bytes are those of the structure and the tensors, as codec.Encoded counts them."""

    def count_put(self, num_bytes: int) -> None:
        with self._lock:
            self.num_put += 1
            self.put_bytes += num_bytes

    def count_taken(self, num_items: int, num_bytes: int) -> None:
        with self._lock:
            self.num_taken += num_items
            self.taken_bytes += num_bytes


class ClientGone(Exception):
    """The client has ended while the server waited on its behalf."""

    def __init__(self, loss: PeerLost) -> None:
        super().__init__(str(loss))
        self.loss = loss


class ServedConnection:
    """One connection of a client."""

    def __init__(
        self,
        channel: Channel,
        back_end: SharedBackEnd,
        exchange: Exchange,
        client: Client,
        traffic: ServerTraffic,
        *,
        num_producers: Callable[[], int],
        check_others: Callable[[], None] | None,
    ) -> None:
        """`num_producers` says how many callers put; `check_others` raises PeerLost when a caller was lost and who
        waits is to be told."""
        self.exchange = exchange
        self.client = client
        self._channel = channel
        self._back_end = back_end
        self._traffic = traffic
        self._num_producers = num_producers
        self._check_others = check_others
        self._owed: deque[Callable[[float | None], None]] = deque()
        """Puts for which nobody waits any more, in order: calls with a timeout."""
        self._owed_error: Exception | None = None
        """Why such a put was given up."""
        self._is_stopped = False

    def serve(self) -> None:
        """Until the connection ends, by whose PeerLost this ends too. What was put before is in the channel then."""
        try:
            self._serve()
        except ClientGone as gone:
            raise gone.loss from gone
        finally:
            while self._owed and not self._is_stopped:
                self._try_owed(SLICE_S)

    def stop(self) -> None:
        """Ends the connection from here."""
        self._is_stopped = True
        self.exchange.shut(farewell=True)

    def _serve(self) -> None:
        while True:
            while self._owed and not self.exchange.has_more():
                self._try_owed(SLICE_S)
            header, buffers = self.exchange.receive()
            request, rest = request_of(header)
            if isinstance(request, Put):
                self._accept(request, rest, buffers)
            else:
                self._answer(partial(self._do, request))

    def _answer(self, do: Callable[[], Encoded]) -> None:
        try:
            answer = do()
        except (CommError, ValueError) as error:
            pids = list(error.pids) if isinstance(error, PeerLost) else []
            answer = compose(Failed(type(error).__name__, str(error), pids))
        self.exchange.check()
        self.exchange.send(answer, Deadline(_ANSWER_TIMEOUT_S))

    def _do(self, request: Message) -> Encoded:
        if isinstance(request, Take):
            return self._take(request)
        if isinstance(request, Room):
            return compose(self._room(request.num_bytes))
        if isinstance(request, Abort):
            self._channel.abort(request.reason)
        elif isinstance(request, Flush):
            if request.waits:
                self._put_owed(Deadline(math.inf))
            else:
                self._try_owed(0.0)
        elif isinstance(request, Close):
            self._put_owed(Deadline(math.inf))
            self._channel.close()
            self.client.has_closed = True
        elif isinstance(request, Reopen):
            self._channel.reopen(request.num_producers)
        elif isinstance(request, Stats):
            return compose(Numbers(asdict(self._channel.stats()), []))
        elif isinstance(request, DropLost):
            return compose(Numbers({}, self._channel.drop_lost_peers()))
        return compose(self._grant())

    # --- putting ---

    def _accept(self, put: Put, header: bytes, buffers: list[memoryview]) -> None:
        value = carried(header, buffers)
        self.client.has_put, self.client.has_closed = True, False
        self._traffic.count_put(value.num_bytes)
        append = partial(self._back_end.put, value, put.key, put.weight, put.policy_version)
        if put.answers:
            self._answer(partial(self._put, append, put.timeout_s))
            return
        self._owed.append(append)
        self._try_owed(0.0)

    def _put(self, append: Callable[[float | None], None], timeout_s: float | None) -> Encoded:
        deadline = Deadline(math.inf if timeout_s is None else timeout_s)
        self._put_owed(deadline)
        append(_timeout_s(deadline))
        return compose(self._grant())

    def _try_owed(self, timeout_s: float) -> None:
        try:
            self._put_owed(Deadline(timeout_s))
        except ChannelTimeout:
            pass  # there was room when it was granted, and there will be
        except PeerLost:
            time.sleep(timeout_s)  # until somebody goes on without who was lost
        except (CommError, ValueError) as error:
            self._owed_error = error

    def _put_owed(self, deadline: Deadline) -> None:
        """Raises why a put for which nobody waited is not done. It stays owed after ChannelTimeout and PeerLost."""
        while self._owed:
            try:
                self._owed[0](_timeout_s(deadline))
            except (ChannelTimeout, PeerLost):
                raise
            except (CommError, ValueError):
                self._owed.clear()
                raise
            self._owed.popleft()
        error, self._owed_error = self._owed_error, None
        if error is not None:
            raise error

    def _grant(self) -> Granted:
        """Half of the room that there is, shared by all callers that put: others may take it meanwhile, and what finds
        none waits here."""
        counts = self._channel.stats()
        if counts.num_keys > 1 or self._owed or _is_over(counts):
            return Granted(0, 0)
        share = 2 * max(self._num_producers(), 1)
        num_items = (counts.capacity_items - counts.num_items) // share
        num_bytes = (counts.capacity_bytes - counts.num_bytes) // share
        return Granted(min(num_items, _MAX_GRANTED_ITEMS), min(num_bytes, _MAX_GRANTED_BYTES))

    def _room(self, num_bytes: int) -> Granted:
        """For a put that would not wait: raises ChannelTimeout where it certainly would have to."""
        counts = self._channel.stats()
        has_room = counts.num_items < counts.capacity_items and counts.num_bytes + num_bytes <= counts.capacity_bytes
        if _is_over(counts) or (has_room and not self._owed):  # the put itself will say that it is over
            return self._grant()
        what = f"put of {num_bytes} bytes"
        raise outcome_error(self._channel.name, self._back_end.native, _C.Outcome.TIMED_OUT, what, 0.0)

    # --- taking ---

    def _take(self, request: Take) -> Encoded:
        self.client.has_taken = True
        limits = (request.max_items, request.min_items, request.min_weight, request.max_weight)
        take_request = checked_request(self._channel.name, *limits, request.keys)
        with staying_carried():
            items = self._back_end.take(take_request, request.timeout_s, self._look)
        values = [_encoded(item) for item in items]
        labels = [
            Label(item.key, item.weight, item.policy_version, item.sequence, len(value.header), len(value.buffers))
            for item, value in zip(items, values, strict=True)
        ]
        self._traffic.count_taken(len(items), sum(value.num_bytes for value in values))
        return compose(Taken(labels), *values)

    def _look(self) -> None:
        try:
            self.exchange.check()
        except PeerLost as error:
            raise ClientGone(error) from error
        if self._check_others is not None:
            self._check_others()


def _encoded(item: Item) -> Encoded:
    value = item.value
    if isinstance(value, Carried):
        return Encoded(value.header, tuple(buffer.data for buffer in value.buffers))
    return codec.encode(value)


def _is_over(counts: ChannelStats) -> bool:
    return counts.aborted or counts.num_closed >= counts.num_producers


def _timeout_s(deadline: Deadline) -> float | None:
    return deadline.left_s if math.isfinite(deadline.timeout_s) else None
