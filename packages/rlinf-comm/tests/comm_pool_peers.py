"""The other process of the pool's tests; see comm_peers.py."""

from __future__ import annotations

import os
import signal
import sys

import torch
from comm_peers import ready

from rlinf_comm import Channel, ChannelAddress, PoolAddress, SharedPool, unpack


def add_one(source: ChannelAddress, target: ChannelAddress) -> None:
    """Changes each tensor in place and hands it on."""
    outgoing = Channel.open(target)
    ready()
    for tensor in Channel.open(source):
        tensor += 1
        outgoing.put(tensor)
        del tensor
    outgoing.close()


def acknowledge(source: ChannelAddress, target: ChannelAddress) -> None:
    """Drops each tensor and says so."""
    outgoing, incoming = Channel.open(target), Channel.open(source)
    ready()
    while items := incoming.take():
        shape = list(items[0].value.shape)
        del items
        outgoing.put(shape)


def put_one(pool: PoolAddress, target: ChannelAddress) -> None:
    """Puts a tensor full of its pid, and ends."""
    Channel.open(target).put(SharedPool.open(pool).empty(1000, torch.int64).fill_(os.getpid()))


def create_and_put(target: ChannelAddress, num_items: int) -> None:
    """A pool of its own, for as long as it lives."""
    pool = SharedPool.create("short-lived", capacity_bytes=1 << 20)
    channel = Channel.open(target)
    for index in range(num_items):
        channel.put(pool.empty(1000).fill_(index))
    channel.put(pool.address)
    ready()
    signal.pause()


if __name__ == "__main__":
    globals()[sys.argv[1]](*unpack(bytes.fromhex(sys.argv[2])))
