"""What forked processes do in the pool's tests; they start in milliseconds, where a new one has to import torch."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import torch

from rlinf_comm import _C, Channel, SharedPool, codec


class Fork:
    """A child that runs `role`, which calls its first argument when it is ready and does not return."""

    def __init__(self, role: Callable[..., None], *arguments: Any) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                role(lambda: os.write(writing, b"r"), *arguments)
            finally:
                os._exit(1)
        os.close(writing)
        assert os.read(reading, 1) == b"r", f"{role.__name__} ended before it was ready"
        os.close(reading)

    def is_running(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG) == (0, 0)

    def wait(self) -> int:
        """Its exit status; minus the signal that killed it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()


def hold(ready: Callable[[], Any], source: Channel) -> None:
    items = source.take()
    ready()
    signal.pause()
    del items


def hold_own(ready: Callable[[], Any], pool: SharedPool, num_bytes: int) -> None:
    tensor = pool.empty(num_bytes, torch.uint8)
    ready()
    signal.pause()
    del tensor


def hold_mutex(ready: Callable[[], Any], pool: SharedPool) -> None:
    pool._native._lock_and_leave()
    ready()
    signal.pause()


def die_between_take_and_decode(ready: Callable[[], Any], source: Channel) -> None:
    """A header names its classes before it holds tensors."""

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    names = "refused describe_class describe_tensor describe_array find_class lift build_tensor ndarray find_dtype"
    names += " torch_bridge decode_error describe_view build_view peer_lost"
    hooks: dict[str, Any] = dict.fromkeys(names.split(" "), die)
    codec.NATIVE = _C.Codec(**hooks)
    ready()
    source.take()


def churn(
    ready: Callable[[], Any], pool: SharedPool, outgoing: Channel, incoming: Channel, seed: int, rounds: int
) -> None:
    """Allocates, checks, sends and drops at random; tensors are full of one number. rounds < 0: until it is killed."""
    numbers = random.Random(seed)
    tensors: list[tuple[torch.Tensor, int]] = []
    ready()
    while rounds:
        rounds -= 1
        number = numbers.randrange(1 << 30)
        tensors.append((pool.empty(numbers.randrange(1, 3000), torch.int64, timeout_s=60.0).fill_(number), number))
        if numbers.random() < 0.5 and outgoing.stats().num_items < 8:
            outgoing.put(tensors[-1])
        if incoming.stats().num_items and numbers.random() < 0.5:
            tensors += [tuple(item.value) for item in incoming.take(max_items=2)]
        while len(tensors) > 6:
            tensor, number = tensors.pop(numbers.randrange(len(tensors)))
            assert bool((tensor == number).all()), f"a tensor of {number} holds {tensor.unique()}"
            del tensor
    outgoing.close()
    os._exit(0)
