"""The producing and consuming processes of the channel benchmark. Each waits at a barrier until all are ready."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
import torch

from rlinf_comm import Channel, ChannelAddress

ITEM_BYTES = 1024
VALUES: dict[str, Callable[[], Any]] = {
    "bytes": lambda: b"x" * ITEM_BYTES,
    "tensor": lambda: {"t": torch.ones(ITEM_BYTES // 4)},
    "array": lambda: {"t": np.ones(ITEM_BYTES // 4, dtype=np.float32)},
}


def produce(address: ChannelAddress, kind: str, num_items: int, start: Barrier) -> None:
    torch.set_num_threads(1)
    channel = Channel.open(address)
    value = VALUES[kind]()
    start.wait()
    for _ in range(num_items):
        channel.put(value)
    channel.close()


def consume(address: ChannelAddress, max_items: int, start: Barrier) -> None:
    torch.set_num_threads(1)
    channel = Channel.open(address)
    start.wait()
    while channel.take(max_items=max_items):
        pass


def produce_into_queue(queue: Any, kind: str, num_items: int, start: Barrier) -> None:
    torch.set_num_threads(1)
    values = [VALUES[kind]() for _ in range(num_items)]  # a tensor that was sent once stays shared, and goes for free
    start.wait()
    for value in values:
        queue.put(value)


def consume_from_queue(queue: Any, num_items: int, start: Barrier) -> None:
    torch.set_num_threads(1)
    start.wait()
    for _ in range(num_items):
        queue.get()


def echo(incoming: ChannelAddress, outgoing: ChannelAddress) -> None:
    back = Channel.open(outgoing)
    for _ in Channel.open(incoming):
        back.put(0)
    back.close()


def echo_queue(incoming: Any, outgoing: Any) -> None:
    while incoming.get() is not None:
        outgoing.put(0)
