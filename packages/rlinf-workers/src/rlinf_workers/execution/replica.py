"""Replica channels: the first rank of a replica takes items and broadcasts them to the other ranks.

The same method runs on every rank of a replica, so its reads and puts happen in the same order on each. The first rank
sends the result of each (an entry, the end, done, waiting) through a replica channel, with a key per other rank. Reads
on the other ranks return the same; their puts do nothing. docs/decisions/015 has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from rlinf_comm import Channel, ChannelTimeout, Item
from rlinf_workers.errors import WorkersError
from rlinf_workers.execution.item_channels import FarChannel
from rlinf_workers.launchers.base import Identity

PUT = "put"
WAITS = "waits"


class FirstRank:
    """A channel as the first rank of a replica uses it.

    Args:
        waiting: returns the context in which the rank waits for the others to read the replica channel.
    """

    def __init__(
        self,
        name: str,
        channel: Channel | FarChannel,
        replica_channel: Channel,
        identity: Identity,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._name = name
        self._channel = channel
        self._replica_channel = replica_channel
        self._others = range(identity.rank + 1, identity.rank + identity.num_ranks_per_replica)
        self._waiting = waiting

    def take(self, *, keys: Sequence[int] | None, timeout_s: float | None) -> list[Item]:
        try:
            items = self._channel.take(keys=keys, timeout_s=timeout_s)
        except ChannelTimeout:
            self._tell(WAITS)
            raise
        self._tell([item.value for item in items])
        return items

    def put(self, value: Any, *, key: int, timeout_s: float | None = None) -> None:
        try:
            self._channel.put(value, key=key, timeout_s=timeout_s)
        except ChannelTimeout:
            self._tell(WAITS)
            raise
        self._tell(PUT)

    def close(self) -> None:
        self._channel.close()

    def _tell(self, what: Any) -> None:
        for rank in self._others:
            try:
                self._replica_channel.put((self._name, what), key=rank, timeout_s=0.0)
            except ChannelTimeout:
                with self._waiting():
                    self._replica_channel.put((self._name, what), key=rank)


class OtherRank:
    """A channel as the other ranks of a replica use it.

    Args:
        waiting: returns the context in which the rank waits for the first one.
    """

    def __init__(
        self,
        name: str,
        replica_channel: Channel,
        identity: Identity,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._name = name
        self._replica_channel = replica_channel
        self._worker = identity.name
        self._keys = [identity.rank]
        self._waiting = waiting

    def take(self, *, keys: Sequence[int] | None, timeout_s: float | None) -> list[Item]:
        item, entries = self._hear("reads from")
        if entries == PUT:
            raise self._astray("reads from", f"put into channel {self._name}")
        return [replace(item, value=entry) for entry in entries]

    def put(self, value: Any, *, key: int, timeout_s: float | None = None) -> None:
        _, what = self._hear("puts into")
        if what != PUT:
            raise self._astray("puts into", f"read from channel {self._name}")

    def close(self) -> None:
        """The first rank closes the channel."""

    def _hear(self, doing: str) -> tuple[Item, Any]:
        with self._waiting():
            items = self._replica_channel.take(keys=self._keys)
        if not items:
            raise self._astray(doing, "was done")
        name, what = items[0].value
        if name != self._name:
            raise self._astray(doing, f"used channel {name}")
        if what == WAITS:
            raise ChannelTimeout(f"channel {self._name}: the first rank of the replica waits")
        return items[0], what

    def _astray(self, doing: str, instead: str) -> WorkersError:
        return WorkersError(
            f"{self._worker} {doing} channel {self._name}, but the first rank of its replica {instead}; "
            "a stage reads and puts in the same order on every rank of a replica"
        )
