"""The other process of the tests: `python comm_peers.py ROLE ARGUMENTS`, a packed tuple in hexadecimal.

Roles print one line when they are ready, so that no test sleeps and hopes.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

import rlinf_comm.weights  # noqa: F401 - registers what it defines
from rlinf_comm import Channel, ChannelAddress, record, unpack
from rlinf_comm.channel import native_of


@record
@dataclass(frozen=True)
class Tag:
    """Lives in this script's __main__."""

    text: str
    nested: tuple[Tag, ...] = ()


def ready() -> None:
    print("ready", flush=True)


def echo(source: ChannelAddress, target: ChannelAddress) -> None:
    outgoing = Channel.open(target)
    ready()
    for value in Channel.open(source):
        outgoing.put(value)
    outgoing.close()


def produce(address: ChannelAddress, producer: int, num_items: int) -> None:
    """Arrays whose every element tells producer and index."""
    channel = Channel.open(address)
    for index in range(num_items):
        num_elements = (producer * 7919 + index * 104729) % 3000
        channel.put((producer, index, np.full(num_elements, producer * 1_000_000 + index)), key=producer)
    channel.close()


def consume(source: ChannelAddress, target: ChannelAddress) -> None:
    """Checks the arrays of produce(), and hands on who and which."""
    outgoing = Channel.open(target)
    incoming = Channel.open(source)
    while items := incoming.take(max_items=4):
        for item in items:
            producer, index, array = item.value
            outgoing.put((producer, index, bool((array == producer * 1_000_000 + index).all()), item.sequence))
    outgoing.close()


def produce_one_key(address: ChannelAddress, key: int | str, num_items: int) -> None:
    channel = Channel.open(address)
    ready()
    for index in range(num_items):
        channel.put(index, key=key)
    channel.close()


def send_main_class(address: ChannelAddress) -> None:
    channel = Channel.open(address)
    channel.put(Tag("outer", (Tag("inner"),)))
    channel.close()


def hold_mutex(address: ChannelAddress) -> None:
    channel = Channel.open(address)  # kept: the kernel looks for held mutexes in mapped memory
    native_of(channel)._lock_and_leave()
    ready()
    signal.pause()


def hold_reservation(address: ChannelAddress, num_bytes: int) -> None:
    channel = Channel.open(address)  # kept: who drops it leaves the channel, and is not missed
    native_of(channel)._reserve_and_leave(num_bytes)
    ready()
    signal.pause()


def hold_taken(address: ChannelAddress) -> None:
    items = Channel.open(address).take()
    ready()
    signal.pause()
    del items


def churn(address: ChannelAddress, results: ChannelAddress, seed: int) -> None:
    """Puts and takes at random until it is killed; each array is full of one number."""
    channel = Channel.open(address)
    random = np.random.default_rng(seed)
    ready()
    while True:
        number = int(random.integers(1 << 30))
        channel.put(np.full(int(random.integers(1, 4000)), number), key=seed)
        for item in channel.take(max_items=2):
            if len(set(item.value.tolist())) != 1:
                Channel.open(results).put(f"item {item.sequence} is torn")


def wait_for_item(address: ChannelAddress) -> None:
    channel = Channel.open(address)
    ready()
    channel.take()


def wait_for_room(address: ChannelAddress) -> None:
    channel = Channel.open(address)
    ready()
    channel.put(0)


def create_and_die(address: ChannelAddress) -> None:
    report = Channel.open(address)
    own = Channel.create("short-lived")
    own.put("left")
    report.put(own.address)
    os.kill(os.getpid(), signal.SIGKILL)


def publish(store_address: Any, plan: Any, src_rank: int, num_versions: int) -> None:
    """Version v of tensor "w" is full of v, of "b" full of -v."""
    import torch

    from rlinf_comm.weights import StoreSender, WeightStore

    sender = StoreSender(WeightStore.open(store_address), plan, src_rank)
    shapes = {name: buffer.shape for name, buffer in plan.src_buffers[src_rank].items()}
    ready()
    for version in range(num_versions):
        sender.publish({"w": torch.full(shapes["w"], version), "b": torch.full(shapes["b"], -version)}, version)


def publish_and_die(store_address: Any, plan: Any) -> None:
    publish(store_address, plan, 0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def publish_by_reference(store_address: Any, plan: Any, num_versions: int) -> None:
    """Version v of tensor "w", whose memory stays, is full of v. The last one is not settled."""
    import torch

    from rlinf_comm.weights import StoreSender, WeightStore

    sender = StoreSender(WeightStore.open(store_address), plan, 0)
    tensors = {"w": torch.zeros(plan.src_buffers[0]["w"].shape, dtype=torch.int64)}
    ready()
    for version in range(num_versions):
        sender.finish_reads()
        tensors["w"].fill_(version)
        sender.publish_by_reference(tensors, version)
    signal.pause()


if __name__ == "__main__":
    globals()[sys.argv[1]](*unpack(bytes.fromhex(sys.argv[2])))
