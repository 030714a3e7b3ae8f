"""Ports: a channel as a worker's method sees it.

Ports separate logic from granularity. A stage puts items one by one or in lists; its readers get chunks of the size in
the plan, however the items arrived. While a port waits, it pauses its stage, which may yield its devices to another
turn.

    producer: put([a, b, c]) put([d])      granularity 2      consumer: for chunk in port: [a, b] then [c, d]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Literal, TypeVar

from rlinf_comm import Channel, ChannelTimeout
from rlinf_workers.errors import WorkersError
from rlinf_workers.execution.item_channels import FarChannel
from rlinf_workers.execution.replica import FirstRank, OtherRank
from rlinf_workers.execution.stage_calls import WHOLE_BATCH, Port

T = TypeVar("T")


class Pauses:
    """The callbacks of a port to its stage. The driver's ports use this class, which does nothing: the driver shares no
    devices."""

    def waiting(
        self, kind: Literal["items", "room"], channel: str, *, keeps_lease: bool
    ) -> AbstractContextManager[None]:
        """Context in which the port waits for items or for free capacity in the channel; the stage does not compute."""
        return nullcontext()

    def begin_chunk(self, num_items: int) -> None:
        """The stage starts computing: takes the lease and brings its state onto the devices."""

    def add_to_chunk(self, num_items: int) -> None:
        """The stage took further items while computing; if it was not computing, like `begin_chunk`."""

    def hands_on(self, began_ns: Sequence[int]) -> AbstractContextManager[None]:
        """Context in which the stage puts results of some items of its chunk, which it began at these times; before and
        after it computes on the others."""
        return nullcontext()

    def was_put(self, channel: str, num_items: int) -> None:
        """The stage has put that many items into a channel."""

    def end_chunk(self) -> None:
        """The stage asked for more items, so it has finished computing on the previous chunk."""

    def before_put(self) -> None:
        """Called before the stage puts items: returns once the weights that it used are verified to be the published
        ones. Raises: WeightMismatchError if they are not."""


ItemEnd = Channel | FarChannel | FirstRank | OtherRank
"""A local or remote channel, or the view of a channel on a rank of a replica."""


class Reader(Generic[T]):
    """The reading end of a channel in a stage. Iterating gives chunks (non-empty lists) until all writers are done."""

    def __init__(self, port: Port, channel: ItemEnd, stage: Pauses) -> None:
        self._port = port
        self._channel = channel
        self._stage = stage
        self._ready: list[T] = []
        self._early: dict[int, T] = {}
        self._next_key = port.partition
        self._closed = False
        self._keys = [port.partition] if port.num_partitions > 1 else None

    @property
    def granularity(self) -> int:
        """Items per chunk; WHOLE_BATCH: all items of the run."""
        return self._port.granularity

    def __iter__(self) -> Iterator[list[T]]:
        while chunk := self.next_chunk():
            yield chunk

    def next_chunk(self, *, at_most: int = WHOLE_BATCH) -> list[T]:
        """The next chunk; empty at the end. A stage that knows how many items remain before the channel closes passes
        that number as `at_most`."""
        self._stage.end_chunk()
        num_items = min(self._port.granularity, at_most) or self._port.granularity or at_most
        # In a cycle the item has never arrived yet, and a failed attempt would cost more than the pause.
        if self._port.of_own_turn or not self._gather(num_items, timeout_s=0.0):
            with self._stage.waiting("items", self._port.channel, keeps_lease=self._port.of_own_turn):
                self._gather(num_items, timeout_s=None)
        return self._begin(num_items)

    def ready_chunk(self) -> list[T]:
        """The next chunk if it has already arrived, for a stage that can take more while it computes; otherwise
        empty."""
        if not self._gather(self._port.granularity, timeout_s=0.0) or not self._ready:
            return []
        chunk = self._taken(self._port.granularity)
        self._stage.add_to_chunk(len(chunk))
        return chunk

    def hands_on(self, began_ns: Sequence[int]) -> AbstractContextManager[None]:
        """For a stage that puts some results while it computes on other items: the context for these puts, with the
        time (`spans.now_ns`) at which it began each of the items they come from."""
        return self._stage.hands_on(began_ns)

    def _begin(self, num_items: int) -> list[T]:
        chunk = self._taken(num_items)
        self._stage.begin_chunk(len(chunk))  # also at the end, because code after the loop computes too
        return chunk

    def _taken(self, num_items: int) -> list[T]:
        size = num_items or len(self._ready)
        chunk, self._ready = self._ready[:size], self._ready[size:]
        return chunk

    def _gather(self, num_items: int, timeout_s: float | None) -> bool:
        """Takes entries until a chunk is complete or the channel is closed; False if neither happens in time."""
        while not self._closed and (num_items == WHOLE_BATCH or len(self._ready) < num_items):
            try:
                entries = self._channel.take(keys=self._keys, timeout_s=timeout_s)
            except ChannelTimeout:
                return False
            if not entries:
                self._close()
            for entry in entries:
                self._accept(entry.value)
        return True

    def _accept(self, entry: Sequence[tuple[int, T]]) -> None:
        for key, item in entry:
            if self._port.ordered:
                self._early[key] = item
            else:
                self._ready.append(item)
        while self._next_key in self._early:
            self._ready.append(self._early.pop(self._next_key))
            self._next_key += self._port.num_partitions

    def _close(self) -> None:
        self._closed = True
        if self._early:
            raise WorkersError(
                f"channel {self._port.channel} was closed, but item {self._next_key} never arrived; "
                f"later ones did: {sorted(self._early)[:8]}; an ordered stage needs keys 0, 1, 2, ... once each"
            )


class Writer(Generic[T]):
    """The writing end of a channel in a stage."""

    def __init__(self, port: Port, channel: ItemEnd, stage: Pauses) -> None:
        self._port = port
        self._channel = channel
        self._stage = stage

    def instead(self, other: Writer[T]) -> Writer[T]:
        """The end of another run of the stage, as the stage of this one uses it."""
        return self if other is self else Writer(other._port, other._channel, self._stage)

    def put(self, item: T, *, key: int = 0) -> None:
        """Puts one item. Blocks while the channel is full.

        Args:
            key: index of the item in this run if a reader wants them in order, or its partition (an environment group)
                if readers are bound to partitions.
        """
        self.put_many([(key, item)])

    def offer(self, item: T, *, key: int = 0) -> bool:
        """Puts one item if the channel has room for it; returns whether it had."""
        return not self.offer_many([(key, item)])

    def offer_many(self, items: Sequence[tuple[int, T]]) -> list[tuple[int, T]]:
        """Puts (key, item) pairs as far as the channel has room for them; returns the others."""
        self._stage.before_put()
        left: list[tuple[int, T]] = []
        for entry, partition in self._entries(items):
            if not self._offer_entry(entry, partition):
                left += entry
        return left

    def put_many(self, items: Sequence[tuple[int, T]]) -> None:
        """Puts (key, item) pairs, several at once if the readers' granularity allows it."""
        self._stage.before_put()
        for entry, partition in self._entries(items):
            if not self._offer_entry(entry, partition):
                with self._stage.waiting("room", self._port.channel, keeps_lease=self._port.of_own_turn):
                    self._channel.put(entry, key=partition)
                self._stage.was_put(self._port.channel, len(entry))

    def _entries(self, items: Sequence[tuple[int, T]]) -> Iterator[tuple[list[tuple[int, T]], int]]:
        """Entries for the channel, each with its partition."""
        for partition in range(self._port.num_partitions):
            mine = [pair for pair in items if pair[0] % self._port.num_partitions == partition]
            size = self._port.granularity or max(1, len(mine))
            for start in range(0, len(mine), size):
                yield mine[start : start + size], partition

    def _offer_entry(self, entry: list[tuple[int, T]], partition: int) -> bool:
        """Whether the channel had room for it."""
        try:
            self._channel.put(entry, key=partition, timeout_s=0.0)
        except ChannelTimeout:
            return False
        self._stage.was_put(self._port.channel, len(entry))
        return True
