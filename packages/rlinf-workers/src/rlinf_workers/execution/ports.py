"""Ports: what a worker's method sees of a channel.

Logic and granularity part ways here. A stage puts items one by one or in lists; its readers get chunks of the size
that the plan says, in whatever pieces the items came. While a port has to wait it pauses its stage, which may give
its devices to another turn.

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
    """What a port tells its stage. The driver's ports tell it to this class: it shares no devices and just waits."""

    def waiting(
        self, kind: Literal["items", "room"], channel: str, *, keeps_lease: bool
    ) -> AbstractContextManager[None]:
        """The port waits inside this block, for items of the channel or room in it; the stage does not compute."""
        return nullcontext()

    def begin_chunk(self, num_items: int) -> None:
        """The stage computes from here on: takes the lease and brings its state onto the devices."""

    def add_to_chunk(self, num_items: int) -> None:
        """The stage has taken further items while it computes; else as `begin_chunk`."""

    def hands_on(self, began_ns: Sequence[int]) -> AbstractContextManager[None]:
        """Inside this block the stage hands on what it made of as many items of its chunk, begun at these times; it
        computes on the others before and afterwards."""
        return nullcontext()

    def end_chunk(self) -> None:
        """The stage has asked for more, so it has stopped computing on the chunk before."""

    def before_put(self) -> None:
        """The stage is about to hand items on: returns when the weights that it made them with are known to be those
        that were published, and raises WeightMismatchError when they are not."""


ItemEnd = Channel | FarChannel | FirstRank | OtherRank
"""A channel of this node or of another, or how the ranks of a replica see it."""


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
        """Items of a chunk; WHOLE_BATCH for all of the run."""
        return self._port.granularity

    def __iter__(self) -> Iterator[list[T]]:
        while chunk := self.next_chunk():
            yield chunk

    def next_chunk(self, *, at_most: int = WHOLE_BATCH) -> list[T]:
        """The next chunk, empty at the end. A stage that knows how many items are still to come before the channel
        closes says how many to wait for `at_most`."""
        self._stage.end_chunk()
        num_items = min(self._port.granularity, at_most) or self._port.granularity or at_most
        # In a cycle the item is never there yet: a look that fails would cost more than the pause.
        if self._port.of_own_turn or not self._gather(num_items, timeout_s=0.0):
            with self._stage.waiting("items", self._port.channel, keeps_lease=self._port.of_own_turn):
                self._gather(num_items, timeout_s=None)
        return self._begin(num_items)

    def ready_chunk(self) -> list[T]:
        """The next chunk where it is there already, for a stage that can take more while it computes; else empty."""
        if not self._gather(self._port.granularity, timeout_s=0.0) or not self._ready:
            return []
        chunk = self._taken(self._port.granularity)
        self._stage.add_to_chunk(len(chunk))
        return chunk

    def hands_on(self, began_ns: Sequence[int]) -> AbstractContextManager[None]:
        """For a stage that hands some items on while it computes on others: the block in which it puts them, and when
        (`spans.now_ns`) it began each of the items that it took for them."""
        return self._stage.hands_on(began_ns)

    def _begin(self, num_items: int) -> list[T]:
        chunk = self._taken(num_items)
        self._stage.begin_chunk(len(chunk))  # also at the end: what stands behind a loop computes too
        return chunk

    def _taken(self, num_items: int) -> list[T]:
        size = num_items or len(self._ready)
        chunk, self._ready = self._ready[:size], self._ready[size:]
        return chunk

    def _gather(self, num_items: int, timeout_s: float | None) -> bool:
        """Takes entries until a chunk is there or the channel is closed; False when that did not come in time."""
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
                f"channel {self._port.channel} was closed, but item {self._next_key} never came; "
                f"later ones did: {sorted(self._early)[:8]}; an ordered stage needs keys 0, 1, 2, ... once each"
            )


class Writer(Generic[T]):
    """The writing end of a channel in a stage."""

    def __init__(self, port: Port, channel: ItemEnd, stage: Pauses) -> None:
        self._port = port
        self._channel = channel
        self._stage = stage

    def put(self, item: T, *, key: int = 0) -> None:
        """Hands one item on. Blocks while the channel is full.

        Args:
            key: number of the item in this run where a reader wants them in order, or the lane that it belongs to (an
                environment group) where readers are bound to lanes.
        """
        self.put_many([(key, item)])

    def put_many(self, items: Sequence[tuple[int, T]]) -> None:
        """Hands (key, item) pairs on, several in one piece where the readers' granularity allows it."""
        self._stage.before_put()
        for partition in range(self._port.num_partitions):
            mine = [pair for pair in items if pair[0] % self._port.num_partitions == partition]
            size = self._port.granularity or max(1, len(mine))
            for start in range(0, len(mine), size):
                self._put_entry(mine[start : start + size], partition)

    def _put_entry(self, entry: list[tuple[int, T]], partition: int) -> None:
        try:
            self._channel.put(entry, key=partition, timeout_s=0.0)
        except ChannelTimeout:
            with self._stage.waiting("room", self._port.channel, keeps_lease=self._port.of_own_turn):
                self._channel.put(entry, key=partition)
