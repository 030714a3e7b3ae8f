"""The producing and consuming processes of the channel benchmark.

Each waits at a barrier until all are ready, and reports from when to when it worked (perf_counter is the same clock in
all processes), so that neither start nor end of a process is in the figures.
"""

from __future__ import annotations

import time
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


def produce(address: ChannelAddress, kind: str, num_items: int, start: Barrier, times: Any) -> None:
    torch.set_num_threads(1)
    channel = Channel.open(address)
    value = VALUES[kind]()
    start.wait()
    start_s = time.perf_counter()
    for _ in range(num_items):
        channel.put(value)
    channel.close()
    times.put((start_s, time.perf_counter()))


def consume(address: ChannelAddress, max_items: int, start: Barrier, times: Any) -> None:
    torch.set_num_threads(1)
    channel = Channel.open(address)
    start.wait()
    start_s = time.perf_counter()
    while channel.take(max_items=max_items):
        pass
    times.put((start_s, time.perf_counter()))


def produce_into_queue(queue: Any, kind: str, num_items: int, start: Barrier, times: Any) -> None:
    torch.set_num_threads(1)
    values = [VALUES[kind]() for _ in range(num_items)]  # a tensor that was sent once stays shared, and goes for free
    start.wait()
    start_s = time.perf_counter()
    for value in values:
        queue.put(value)
    times.put((start_s, time.perf_counter()))
    start.wait()  # the consumers open these tensors through this process


def consume_from_queue(queue: Any, num_items: int, start: Barrier, times: Any) -> None:
    torch.set_num_threads(1)
    start.wait()
    start_s = time.perf_counter()
    for _ in range(num_items):
        queue.get()
    times.put((start_s, time.perf_counter()))
    start.wait()


def echo(incoming: ChannelAddress, outgoing: ChannelAddress) -> None:
    back = Channel.open(outgoing)
    for _ in Channel.open(incoming):
        back.put(0)
    back.close()


def echo_queue(incoming: Any, outgoing: Any) -> None:
    while incoming.get() is not None:
        outgoing.put(0)
