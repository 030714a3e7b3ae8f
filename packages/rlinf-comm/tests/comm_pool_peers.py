"""The other process of the pool's tests; see comm_peers.py."""

from __future__ import annotations

import os
import random
import signal
import sys
from typing import Any

import torch
from comm_peers import ready

from rlinf_comm import _C, Channel, ChannelAddress, PoolAddress, SharedPool, codec, unpack


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


def hold(source: ChannelAddress) -> None:
    kept = Channel.open(source).take()
    ready()
    signal.pause()
    del kept


def hold_own(pool: PoolAddress, num_bytes: int) -> None:
    kept = SharedPool.open(pool).empty(num_bytes, torch.uint8)
    ready()
    signal.pause()
    del kept


def hold_mutex(pool: PoolAddress) -> None:
    opened = SharedPool.open(pool)
    opened._native._lock_and_leave()
    ready()
    signal.pause()


def die_between_take_and_decode(source: ChannelAddress) -> None:
    """A header names its classes before it holds tensors."""
    channel = Channel.open(source)

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    names = "refused describe_class describe_tensor describe_array find_class lift build_tensor ndarray find_dtype"
    names += " torch_bridge decode_error describe_view build_view peer_lost"
    hooks: dict[str, Any] = dict.fromkeys(names.split(" "), die)
    codec.NATIVE = _C.Codec(**hooks)
    ready()
    channel.take()


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


def churn(pool_address: PoolAddress, target: ChannelAddress, source: ChannelAddress, seed: int, rounds: int) -> None:
    """Allocates, checks, sends and drops at random; tensors are full of one number. rounds < 0: until it is killed."""
    pool, outgoing, incoming = SharedPool.open(pool_address), Channel.open(target), Channel.open(source)
    numbers = random.Random(seed)
    kept: list[tuple[torch.Tensor, int]] = []
    while rounds:
        rounds -= 1
        number = numbers.randrange(1 << 30)
        kept.append((pool.empty(numbers.randrange(1, 3000), torch.int64, timeout_s=60.0).fill_(number), number))
        if numbers.random() < 0.5 and outgoing.stats().num_items < 8:
            outgoing.put(kept[-1])
        if incoming.stats().num_items and numbers.random() < 0.5:
            kept += [tuple(item.value) for item in incoming.take(max_items=2)]
        while len(kept) > 6:
            tensor, number = kept.pop(numbers.randrange(len(kept)))
            assert bool((tensor == number).all()), f"a tensor of {number} holds {tensor.unique()}"
            del tensor
    outgoing.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*unpack(bytes.fromhex(sys.argv[2])))
