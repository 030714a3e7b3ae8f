"""Bounded queues of items between threads and processes: of one machine in shared memory, of others through a server.

On one machine an item is copied once, into the channel; the consumer's tensors are views of that memory, which is freed
when the last of them is collected. The native part (csrc/comm/channel.cc) knows bytes, keys and weights; this file adds
values and errors. Processes of other machines reach the same channel through a ChannelServer (rlinf_comm.remote).

    channel = Channel.create("samples", num_producers=2)      # the owner
    channel = Channel.open(address)                           # any other process; `address` travels as any value

    channel.put(value, key=3)                                 # blocks while the channel is full, in items or in bytes
    for value in channel: ...                                 # until every producer has called close()
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from rlinf_comm import (
    _C,
    _carried,  # noqa: F401 - what comes through a server is decoded by it
    _leaving,
    codec,
)
from rlinf_comm._arrays import NotEncodable
from rlinf_comm._checked import sealed, unsealed
from rlinf_comm._outcomes import outcome_error
from rlinf_comm.errors import DecodeError, PeerLost
from rlinf_comm.records import record

if TYPE_CHECKING:
    from rlinf_comm.remote.address import ServerAddress

MAX_COUNT = (1 << 63) - 1
_OPEN_TIMEOUT_S = 60.0
"""A loaded machine needs less, and a person can wait that long for the message."""
_SLICE_S = 0.1
"""A take that waits for more than the channel itself looks after it this often."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelAddress:
    """How a process of the same machine and user opens a channel. Valid while the creating Channel object lives."""

    name: str
    creator_pid: int
    creator_start_ticks: int
    """Start time of that process, which tells it from a later one with its pid."""
    fd: int
    """The channel's memory, as a file descriptor of the creator, which hands it to peers."""
    nonce: int
    """Tells the memory from another that was given the same descriptor later."""
    checked: bool = False
    """Whether items carry a digest."""


Key = int | str
"""A number of 64 bits with its sign, or a text that is not empty."""


@dataclass(frozen=True, slots=True)
class Item:
    """One taken item."""

    value: Any
    key: Key
    weight: float
    policy_version: int
    """The version that the producer gave; -1 when it gave none."""
    sequence: int
    """Position in the order of all puts on this channel, from 0; also across reopen()."""
    nbytes: int
    """Bytes of the structure and the tensors, without padding and without tensors in a SharedPool."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelStats:
    """A channel at one instant, with totals since it was created."""

    num_items: int
    """Items waiting to be taken."""
    num_bytes: int
    """Bytes that those occupy, with padding to 64 bytes for each tensor."""
    num_held_items: int
    """Items whose room is not free yet though they do not wait: they were taken, and their tensors are still alive and
    in place; or they are just being copied in."""
    num_held_bytes: int
    capacity_items: int
    capacity_bytes: int
    num_put: int
    num_taken: int
    num_blocked_puts: int
    """Puts that found the channel full."""
    blocked_put_s: float
    """Seconds that puts have waited, summed over producers. A put that waits now counts too, but for its last slice of
    at most 0.1 s."""
    blocked_take_s: float
    num_producers: int
    num_closed: int
    """Producers that have called close() since the channel was created or reopened."""
    num_keys: int
    """Number of keys that share the capacity; 1: it goes to whoever comes first."""
    aborted: bool


Request = tuple[int, int, float, float | None, Sequence[Key] | None]
"""What a take asks for: max_items, min_items, min_weight, max_weight and keys, as Channel.take says. A plain tuple: one
is made for each take, which takes microseconds."""


class BackEnd(Protocol):
    """Where a channel's items are: in this machine's shared memory, or behind the server of another one.

    Each method does what Channel's of the same name says, with its errors. Values have their digests already where the
    channel is checked.
    """

    def put(self, value: Any, key: Key, weight: float, policy_version: int, timeout_s: float | None) -> None: ...
    def take(self, request: Request, timeout_s: float | None) -> list[Item]: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def reopen(self, num_producers: int) -> None: ...
    def abort(self, reason: str) -> None: ...
    def leave(self) -> None: ...
    def drop_lost_peers(self) -> list[int]: ...
    def stats(self) -> ChannelStats: ...


class Channel:
    """A bounded FIFO queue for any number of producers and consumers, threads and processes alike.

    Items are taken in put order; with `keys`, in put order among those keys. A full channel blocks its producers. It is
    closed when `close` was called once for each of `num_producers`; what is left can still be taken.

    The channel lives as long as somebody uses it, and vanishes without a trace when all its processes are gone, however
    they ended. A process that dies while it puts or takes leaves the channel in order; its memory is taken back, and
    those who wait for it are told by PeerLost. A process uses the channel from its first put or take until it leaves.

    **On another machine** than its memory, a put goes at once, and without waiting for an answer while the server has
    granted room for it; `flush` waits until all of them are in the channel. A put that returned gets there also when
    this process is killed afterwards. When the *connection* breaks, or the server's process ends, all calls raise
    PeerLost, and what was put since the last call that was answered may not have arrived. A channel that is closed or
    aborted while such puts are on their way refuses them; the next call raises it.
    """

    def __init__(self, back_end: BackEnd, address: ChannelAddress | ServerAddress) -> None:
        """Private: use Channel.create or Channel.open."""
        _leaving.watch_the_end_of_this_process()
        self._back_end = back_end
        self._address = address
        self._name = address.name
        self._is_checked = address.checked

    @classmethod
    def create(
        cls,
        name: str,
        *,
        capacity_items: int = 4096,
        capacity_bytes: int = 64 << 20,
        num_producers: int = 1,
        num_keys: int = 1,
        prefault: bool = False,
        lost_peers: Literal["raise", "tolerate"] = "raise",
        checked: bool = False,
    ) -> Channel:
        """A new channel, owned by this process.

        Args:
            name: For messages, and for /proc/<pid>/maps.
            capacity_items: Items that may wait in the queue.
            capacity_bytes: Bytes of waiting items. Taken items whose tensors are still alive may occupy as much again;
                beyond that, take copies them out. Memory is only used as far as items reach.
            num_producers: Calls of close() that close the channel.
            num_keys: Keys that share the channel. Each may fill capacity_items/num_keys and capacity_bytes/num_keys, so
                that a consumer that asks for one key never waits behind items of the others. 1: whoever comes first.
            prefault: Take capacity_bytes of memory now; the first items are then as fast as all others.
            lost_peers: "raise": a put or take that has to wait raises PeerLost within about 0.2 s after a process that
                has put or taken died, see drop_lost_peers. "tolerate": it waits on, as somebody else watches the
                processes and may start them again. Memory that the dead held is taken back in either case.
            checked: Items carry a digest of 128 bits, of tensors in a SharedPool too. A take whose bytes are not those
                that were put raises DecodeError: for a defect of the memory, or for who wrote after the put.
        """
        for label, count in (
            ("capacity_items", capacity_items),
            ("capacity_bytes", capacity_bytes),
            ("num_producers", num_producers),
            ("num_keys", num_keys),
        ):
            if count < 1:
                raise ValueError(f"channel {name!r}: {label}={count}; at least 1")
        if lost_peers not in ("raise", "tolerate"):
            raise ValueError(f"channel {name!r}: lost_peers={lost_peers!r}; 'raise' or 'tolerate'")
        if num_keys > capacity_items:
            raise ValueError(
                f"channel {name!r}: num_keys={num_keys} with capacity_items={capacity_items}; one item each"
            )
        native = _C.Channel.create(name, capacity_items, capacity_bytes, num_producers, lost_peers == "raise", num_keys)
        if prefault:
            native.prefault()
        pid, start_ticks, fd, nonce = native.address()
        address = ChannelAddress(
            name=name, creator_pid=pid, creator_start_ticks=start_ticks, fd=fd, nonce=nonce, checked=checked
        )
        return cls(SharedBackEnd(native, address, owner_pid=pid, raises_on_loss=lost_peers == "raise"), address)

    @classmethod
    def open(cls, address: ChannelAddress | ServerAddress, *, timeout_s: float = _OPEN_TIMEOUT_S) -> Channel:
        """The channel at `address`: from any process of its machine and user or, by the address of a ChannelServer,
        from any process of the job. `timeout_s` is for the server to answer.

        Raises:
            PeerLost: the creating process is gone or has dropped its Channel object; or the server's process is gone,
                has closed the server, or has another secret.
            PeerTimeout: the server's host or process does not answer in time.
            DecodeError: the server speaks another version of the protocol.
        """
        if not isinstance(address, ChannelAddress):
            from rlinf_comm.remote.client import RemoteBackEnd

            return cls(RemoteBackEnd.open(address, timeout_s), address)
        fields = (address.creator_pid, address.creator_start_ticks, address.fd, address.nonce)
        try:
            native = _C.Channel.open(fields)
        except ValueError as error:
            raise PeerLost(f"channel {address.name!r}: {error}") from error
        return cls(SharedBackEnd(native, address, owner_pid=None), address)

    @property
    def name(self) -> str:
        return self._name

    @property
    def address(self) -> ChannelAddress | ServerAddress:
        return self._address

    @property
    def is_remote(self) -> bool:
        """Whether it is reached through a server."""
        return not isinstance(self._address, ChannelAddress)

    def __repr__(self) -> str:
        return f"<Channel {self.name!r} of process {self._address.creator_pid}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"channel {self.name!r} is not picklable; send channel.address, and Channel.open it over there")

    def put(
        self,
        value: Any,
        *,
        key: Key = 0,
        weight: float = 1.0,
        policy_version: int = -1,
        timeout_s: float | None = None,
    ) -> None:
        """Appends one item; blocks while the channel is full. The value may be changed as soon as this returns, but for
        tensors in a SharedPool, which cross by reference.

        Args:
            value: Anything that rlinf_comm.codec encodes.
            key: Consumers may ask for certain keys.
            weight: Consumers may ask for a bounded sum of weights. Finite, not negative.
            policy_version: The version of the weights that made the value; handed on.
            timeout_s: Seconds to wait at most; None waits for as long as it takes.

        Raises:
            ValueError: the item alone is larger than the channel, or than its key's share of it.
            UnsupportedValueError: the value cannot cross; names the part of it.
            ChannelClosed, ChannelAborted, ChannelTimeout: the item was not put.
            PeerLost: it was not put, the channel is full, and a process that used it died; see drop_lost_peers.
        """
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"channel {self.name!r}: weight={weight}; finite and not negative")
        self._back_end.put(sealed(value) if self._is_checked else value, key, weight, policy_version, timeout_s)

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
        """Removes items from the front; blocks until there are `min_items` of them that weigh `min_weight` together, or
        the channel is closed.

        Args:
            max_items: At most so many items.
            min_items: Wait for so many, capped to max_items. A closed channel gives what is left, perhaps nothing.
            min_weight: Wait until the sum of weights is so much, or max_items are there.
            max_weight: Stop before the sum of weights exceeds this, even below min_items; at least one item. With
                exactly this sum the take is done as well.
            keys: Only items with one of these keys; None takes any.
            timeout_s: Seconds to wait at most; None waits for as long as it takes.

        Returns:
            Items in put order; [] when the channel is closed and no matching item is left.

        Raises:
            ChannelAborted, ChannelTimeout: nothing was taken.
            PeerLost: nothing was taken, it would have to wait, and a process that used the channel died.
            ChannelStalled: min_items do not fit the channel's capacity, and the next producer waits for room.
        """
        request = checked_request(self._name, max_items, min_items, min_weight, max_weight, keys)
        taken = self._back_end.take(request, timeout_s)
        if not self._is_checked:
            return taken
        place = f"channel {self.name!r}, item"
        return [replace(item, value=unsealed(item.value, f"{place} {item.sequence}")) for item in taken]

    def __iter__(self) -> Iterator[Any]:
        """Values one by one, until the channel is closed and empty."""
        while items := self.take():
            yield items.pop().value

    def flush(self) -> None:
        """Returns when all that was put through this object is in the channel, for who tells others of it on another
        way. `close` does so by itself, and a take or stats() of this object sees what was put before."""
        self._back_end.flush()

    def close(self) -> None:
        """One producer is done. Counted: the channel is closed after num_producers calls, from wherever they come.

        Raises:
            ValueError: one call too many.
        """
        self._back_end.close()

    def reopen(self, num_producers: int) -> None:
        """Makes a closed and drained channel ready for the next step. Only the process that created it may, and its
        server.

        Raises:
            ValueError: another process calls it, items are left, or producers have not closed; says how many.
        """
        self._back_end.reopen(num_producers)

    def abort(self, reason: str) -> None:
        """Ends the channel for everybody: each waiting and each later put or take raises ChannelAborted(reason).

        The first reason stays.
        """
        self._back_end.abort(reason)

    def leave(self) -> None:
        """Unregisters this process from the channel; its exit is no longer reported.

        Happens by itself when its last Channel object is collected, when the interpreter ends without an exception, and
        on close() of a process that takes nothing. Call it before os._exit. A later put or take joins again; through a
        server it raises PeerLost.
        """
        self._back_end.leave()

    def drop_lost_peers(self) -> list[int]:
        """Goes on without the processes that died: takes back what they held, and returns their pids, [] if there are
        none. Puts and takes wait again afterwards, in all processes.

        Items that the dead had put stay; items that they had taken are gone. A dead producer closes nothing: call
        close() in its place, or start another one.
        """
        return self._back_end.drop_lost_peers()

    def stats(self) -> ChannelStats:
        return self._back_end.stats()


def checked_request(
    name: str,
    max_items: int,
    min_items: int,
    min_weight: float,
    max_weight: float | None,
    keys: Sequence[Key] | None,
) -> Request:
    """The request, its numbers cut to what the native code takes. Raises ValueError."""
    if max_items < 1 or min_items < 1:
        raise ValueError(f"channel {name!r}: max_items={max_items}, min_items={min_items}; at least 1 each")
    if max_weight is not None and not max_weight >= 0.0:
        raise ValueError(f"channel {name!r}: max_weight={max_weight}; must not be negative")
    if min_weight != 0.0 and not 0.0 <= min_weight <= (math.inf if max_weight is None else max_weight):
        raise ValueError(f"channel {name!r}: min_weight={min_weight}; from 0 to max_weight={max_weight}")
    if keys is not None and (len(keys) == 0 or isinstance(keys, str)):
        raise ValueError(f"channel {name!r}: keys={keys!r}; a sequence of keys, or None for any")
    # Comparisons: min() takes longer than all that is above.
    max_items = max_items if max_items < MAX_COUNT else MAX_COUNT
    return max_items, min_items if min_items < max_items else max_items, min_weight, max_weight, keys


class SharedBackEnd:
    """A channel in the shared memory of this machine."""

    def __init__(
        self, native: _C.Channel, address: ChannelAddress, *, owner_pid: int | None, raises_on_loss: bool = False
    ) -> None:
        self.native = native
        self.owner_pid = owner_pid
        self.raises_on_loss = raises_on_loss
        self.remote_users: RemoteUsers | None = None
        """Of a channel that has a server, which sets it."""
        self._name = address.name
        self._creator_pid = address.creator_pid

    def put(self, value: Any, key: Key, weight: float, policy_version: int, timeout_s: float | None) -> None:
        try:
            outcome = self.native.put(codec.NATIVE, value, key, weight, policy_version, timeout_s)
        except (NotEncodable, UnicodeEncodeError, RecursionError) as error:
            raise codec.refusal(value, error) from None
        except ValueError as error:
            raise ValueError(f"channel {self._name!r}: {error}") from None
        if outcome:
            what = f"put of {codec.encode(value).num_bytes} bytes with key {key!r}"
            raise outcome_error(self._name, self.native, outcome, what, timeout_s)

    def take(self, request: Request, timeout_s: float | None, look: Callable[[], None] | None = None) -> list[Item]:
        """`look` is called about every 0.1 s of a wait, and raises what ends it."""
        if look is None and self.remote_users is not None:
            look = self.remote_users.check
        try:
            if look is None:
                taken = self.native.take(codec.NATIVE, Item, *request, timeout_s)
            else:
                taken = self._take_in_slices(request, timeout_s, look)
        except DecodeError as error:
            raise DecodeError(f"channel {self._name!r}, {error}") from error
        except PeerLost as error:
            raise PeerLost(f"channel {self._name!r}, {error}", pids=error.pids) from error
        if isinstance(taken, int):
            _, min_items, _, _, keys = request
            what = f"take of {min_items} items" + (f" with keys {list(keys)}" if keys else "")
            raise outcome_error(self._name, self.native, taken, what, timeout_s, keys=keys)
        return taken

    def _take_in_slices(self, request: Request, timeout_s: float | None, look: Callable[[], None]) -> list[Item] | int:
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            is_short = timeout_s is not None and not timeout_s >= _SLICE_S  # also what is no number of seconds at all
            slice_s = timeout_s if is_short else max(min(left_s, _SLICE_S), 0.0)
            taken = self.native.take(codec.NATIVE, Item, *request, slice_s)
            if taken != _C.Outcome.TIMED_OUT or is_short or left_s <= _SLICE_S:
                return taken
            look()

    def flush(self) -> None:
        pass  # a put that has returned is in the channel

    def close(self) -> None:
        try:
            self.native.close_producer()
        except ValueError as error:
            raise ValueError(f"channel {self._name!r}: {error}") from None

    def reopen(self, num_producers: int) -> None:
        if self.owner_pid != os.getpid():
            raise ValueError(
                f"channel {self._name!r}: only its owner, process {self._creator_pid}, may reopen it; "
                f"this is process {os.getpid()}, or a Channel from Channel.open"
            )
        if num_producers < 1:
            raise ValueError(f"channel {self._name!r}: num_producers={num_producers}; at least 1")
        try:
            self.native.reopen(num_producers)
        except ValueError as error:
            raise ValueError(f"channel {self._name!r}: {error}") from None

    def abort(self, reason: str) -> None:
        self.native.abort(reason)

    def leave(self) -> None:
        self.native.leave()

    def drop_lost_peers(self) -> list[int]:
        remote = [] if self.remote_users is None else self.remote_users.drop()
        return self.native.drop_lost_users() + remote

    def stats(self) -> ChannelStats:
        return ChannelStats(**self.native.counts())


def native_of(channel: Channel) -> _C.Channel:
    """That of a channel in this machine's shared memory."""
    assert isinstance(channel._back_end, SharedBackEnd), f"{channel!r} is on another machine"
    return channel._back_end.native


class RemoteUsers(Protocol):
    """The users of a channel in processes of other hosts."""

    def check(self) -> None:
        """Raises PeerLost when one of them was lost."""
        ...

    def drop(self) -> list[int]:
        """Goes on without those that were lost; their pids."""
        ...
