"""Where the channels of a flow live, and how each rank accesses them.

A channel lives on the node of its readers, so that an item crosses the network only once: in the driver if that is the
driver's node, otherwise in the process of a reading rank. Ranks of that node share its memory; ranks of other nodes go
through its channel server (rlinf_comm.remote).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from rlinf_comm import Channel, ChannelServer, Item, ServerAddress, record
from rlinf_workers.addresses import DRIVERS_NODE, own_address
from rlinf_workers.execution.stage_calls import ItemAddress, StageCall


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelSpec:
    """How to create a channel."""

    name: str
    capacity_items: int
    capacity_bytes: int
    num_keys: int


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelPlace:
    """The addresses of a channel."""

    node: int
    near: ItemAddress
    """For ranks on the channel's node."""
    server: ServerAddress | None
    """For ranks on other nodes; None if there are none."""

    def seen_from(self, node: int) -> ItemAddress:
        if node == self.node:
            return self.near
        assert self.server is not None, f"channel {self.near.name!r} has no server, and node {node} uses it"
        return self.server


class HomeChannel:
    """A channel that lives in this process."""

    def __init__(self, spec: ChannelSpec, node: int, *, has_server: bool) -> None:
        """A server makes the channel reachable at this machine's address; the job's secret must be set."""
        self.channel = Channel.create(
            spec.name,
            capacity_items=spec.capacity_items,
            capacity_bytes=spec.capacity_bytes,
            num_keys=spec.num_keys,
            lost_peers="tolerate",  # the launcher reports deaths and restarts workers
        )
        self.server = ChannelServer(self.channel, host=own_address()) if has_server else None
        self.place = ChannelPlace(
            node=node, near=self.channel.address, server=None if self.server is None else self.server.address
        )


class FarChannel:
    """A channel of another node as a stage uses it. Operations that wait for neither items nor capacity still wait for
    a reply of the process that holds the channel.

    Args:
        asking: returns the context in which the stage waits for that reply.
    """

    def __init__(self, channel: Channel, asking: Callable[[], AbstractContextManager[object]]) -> None:
        self._channel, self._asking = channel, asking

    def take(self, *, keys: Sequence[int] | None, timeout_s: float | None) -> list[Item]:
        with nullcontext() if timeout_s is None else self._asking():
            return self._channel.take(keys=keys, timeout_s=timeout_s)

    def put(self, value: Any, *, key: int, timeout_s: float | None = None) -> None:
        with nullcontext() if timeout_s is None else self._asking():
            self._channel.put(value, key=key, timeout_s=timeout_s)

    def close(self) -> None:
        with self._asking():
            self._channel.close()


@functools.lru_cache(maxsize=256)
def open_channel(address: ItemAddress) -> Channel:
    """Opens a channel once per process and keeps it open for the life of the process."""
    return Channel.open(address)


def home_of(readers: Iterable[int]) -> int:
    """The node of most readers; the driver's node for a channel that only the driver reads."""
    counted = Counter(readers)
    return min(counted, key=lambda node: (-counted[node], node)) if counted else DRIVERS_NODE


def placed(call: StageCall, node: int, places: dict[str, ChannelPlace], replica_channel: str | None) -> StageCall:
    """The call for a rank on that node: its ports get the addresses that are reachable from there."""
    return replace(
        call,
        reads=tuple(replace(port, address=places[port.channel].seen_from(node)) for port in call.reads),
        writes=tuple(replace(port, address=places[port.channel].seen_from(node)) for port in call.writes),
        replica_channel=None if replica_channel is None else places[replica_channel].seen_from(node),
    )
