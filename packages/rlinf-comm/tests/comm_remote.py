"""The other process of the tests of doors: `python comm_remote.py ROLE ARGUMENTS`, a packed tuple in hexadecimal."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

import numpy as np

from rlinf_comm import Channel, ChannelAddress, ChannelServer, ChannelTimeout, ServerAddress, record, unpack


@record
@dataclass(frozen=True)
class OnlyHere:
    """Known to this process alone."""

    text: str


def ready() -> None:
    print("ready", flush=True)


def produce(address: ServerAddress, producer: int, num_items: int) -> None:
    """Arrays whose every element tells producer and index."""
    channel = Channel.open(address)
    for index in range(num_items):
        num_elements = (producer * 7919 + index * 104729) % 3000
        channel.put((producer, index, np.full(num_elements, producer * 1_000_000 + index)), key=producer)
    channel.close()


def put_and_stay(address: ServerAddress, num_items: int) -> None:
    channel = Channel.open(address)
    channel.put(0)
    for index in range(1, num_items):
        channel.put(index)
    ready()
    signal.pause()


def put_without_end(address: ServerAddress, num_elements: int) -> None:
    channel = Channel.open(address)
    ready()
    index = 0
    while True:
        channel.put(np.full(num_elements, index))
        index += 1


def put_and_end(address: ServerAddress, how: str) -> None:
    """Ends without close(): regularly, or by an exception."""
    channel = Channel.open(address)
    channel.put(how)
    if how == "exception":
        raise RuntimeError("an end that somebody misses")


def put_own_class(address: ServerAddress) -> None:
    Channel.open(address).put(OnlyHere("carried"))


def serve(reply_address: ChannelAddress) -> None:
    """A door that nobody closes, and a channel with one item of one."""
    channel = Channel.create("served", capacity_items=1)
    with ChannelServer(channel) as server:
        Channel.open(reply_address).put((server.address, channel.address))
        ready()
        signal.pause()


def take_one_at_a_time(address: ServerAddress, report_address: ChannelAddress) -> None:
    channel, reports = Channel.open(address), Channel.open(report_address)
    while True:
        try:
            items = channel.take(max_items=3, timeout_s=0.05)
        except ChannelTimeout:
            continue
        if not items:
            break
        for item in items:
            producer, index, array = item.value
            reports.put((producer, index, bool((array == producer * 1_000_000 + index).all()), item.sequence))
    reports.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*unpack(bytes.fromhex(sys.argv[2])))
