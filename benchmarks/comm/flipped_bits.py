"""What a flipped bit does on each way that values and weights take: 1,000 bits a way, one at a time.

Each way sends something, has one bit of it flipped where it travels or lies, and says what came of it: caught (an error
instead of the value), or delivered.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf_comm import Channel, CommError, Peer, SharedPool
from rlinf_comm.weights import (
    Layout,
    StoreReceiver,
    StoreSender,
    TensorSpec,
    WeightStore,
    WeightStreamReceiver,
    WeightStreamSender,
    reshard_plan,
)
from rlinf_comm.weights.stream.choice import DeltaChoice
from rlinf_comm.weights.stream.wire import Content

NUM_FLIPS = 1000
TIMEOUT_S = 30.0
NUM_ELEMENTS = 2000

Flip = Callable[[np.random.Generator], bool]
"""Sends something with one bit flipped; whether that was caught."""


def count_caught() -> dict[str, dict[str, int]]:
    """way -> flips and those that were caught."""
    counts = {}
    for name, way in WAYS.items():
        random = np.random.default_rng(0)
        with way() as flip:
            counts[name] = {"flips": NUM_FLIPS, "caught": sum(flip(random) for _ in range(NUM_FLIPS))}
        print(name, counts[name], flush=True)
    return counts


def is_refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except CommError:
        return True
    return False


def flip_in(array: np.ndarray, random: np.random.Generator) -> Callable[[], None]:
    """Flips one bit, and gives what flips it back."""
    raw = array.reshape(-1).view(np.uint8)
    bit = int(random.integers(8 * raw.nbytes))

    def flip() -> None:
        raw[bit // 8] ^= 1 << bit % 8

    flip()
    return flip


# --- values -----------------------------------------------------------------------------------------------------------


class _Flipping:
    """The sender's socket, with a bit to flip among the next bytes."""

    def __init__(self, real: Any, random: np.random.Generator) -> None:
        self._real = real
        self._random = random
        self._is_due = True

    def sendmsg(self, pieces: list[memoryview]) -> int:
        data = bytearray(b"".join(pieces))
        if self._is_due:
            flip_in(np.frombuffer(data, np.uint8), self._random)
            self._is_due = False
        return self._real.sendmsg([data])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextmanager
def peers_over_tcp() -> Iterator[Flip]:
    """A value between two peers, header and all."""
    value = {"tokens": np.arange(NUM_ELEMENTS), "step": 7}
    with Peer.listen("a", transports=("tcp",)) as a, Peer.listen("b", transports=("tcp",)) as b:

        def flip(random: np.random.Generator) -> bool:
            a.connect(b.address, timeout_s=TIMEOUT_S)
            link: Any = a._links.get("b")
            link.outgoing._socket = _Flipping(link.outgoing._socket, random)
            a.send("b", value, timeout_s=TIMEOUT_S)
            is_caught = is_refused(lambda: b.receive("a", timeout_s=TIMEOUT_S))
            a._links.drop("b", link)
            return is_caught

        yield flip


def _memory_of(label: str) -> np.ndarray:
    """The segment that /proc shows under this name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    (line,) = [line for line in lines if f"memfd:rlinf:{label} " in line]
    start, end = (int(number, 16) for number in line.split()[0].split("-"))
    return np.frombuffer(memoryview((ctypes.c_uint8 * (end - start)).from_address(start)), np.uint8)


@contextmanager
def checked_channel() -> Iterator[Flip]:
    array = np.random.default_rng(1).random(NUM_ELEMENTS)
    channel = Channel.create("flipped", checked=True, capacity_bytes=1 << 16)
    memory = _memory_of("flipped")

    def flip(random: np.random.Generator) -> bool:
        channel.put({"w": array, "step": 1})
        start = memory.tobytes().index(array.tobytes())
        flip_back = flip_in(memory[start : start + array.nbytes], random)
        is_caught = is_refused(lambda: channel.take(timeout_s=TIMEOUT_S))
        flip_back()
        return is_caught

    yield flip


@contextmanager
def checked_pool() -> Iterator[Flip]:
    pool = SharedPool.create("flips", capacity_bytes=1 << 20)
    tensor = pool.copy_of(torch.randn(NUM_ELEMENTS))
    channel = Channel.create("samples", checked=True)

    def flip(random: np.random.Generator) -> bool:
        channel.put(tensor)
        flip_back = flip_in(tensor.numpy(), random)
        is_caught = is_refused(lambda: channel.take(timeout_s=TIMEOUT_S))
        flip_back()
        return is_caught

    yield flip


# --- weights ----------------------------------------------------------------------------------------------------------

SPECS = {"a": TensorSpec((NUM_ELEMENTS,), "bfloat16"), "b": TensorSpec((NUM_ELEMENTS // 4,), "float32")}
LAYOUT = Layout.replicated(SPECS, 1)


def weights() -> dict[str, torch.Tensor]:
    return {name: torch.randn(spec.shape).to(getattr(torch, spec.dtype)) for name, spec in SPECS.items()}


@contextmanager
def store(in_use: bool) -> Iterator[Flip]:
    """In the store's memory or, with `in_use`, in the served tensors, which are checked after they were used."""
    reshard = reshard_plan(LAYOUT, LAYOUT)
    weight_store = WeightStore.create(reshard, name="flipped weights")
    sender, receiver = StoreSender(weight_store, reshard, 0), StoreReceiver(weight_store, reshard, 0)
    memory = _memory_of("flipped weights")
    published, served, version = weights(), weights(), -1

    def flip(random: np.random.Generator) -> bool:
        nonlocal version
        version += 1
        for tensor in published.values():
            tensor.neg_()
        sender.publish(published, version, timeout_s=TIMEOUT_S)
        if in_use:
            check = receiver.take(served, version, timeout_s=TIMEOUT_S)
            served["b"].sum()
            flip_in(served[str(random.choice(list(served)))].view(torch.uint8).numpy(), random)
            is_caught = is_refused(check)
        else:
            content = published["a"].view(torch.int16).numpy().tobytes()
            start = memory.tobytes().index(content)
            flip_in(memory[start : start + len(content)], random)
            is_caught = is_refused(lambda: receiver.receive(served, version, timeout_s=TIMEOUT_S))
        version += 1
        sender.publish(published, version, timeout_s=TIMEOUT_S)
        receiver.receive(served, version, timeout_s=TIMEOUT_S)
        return is_caught

    yield flip


class _FlippingLink:
    """A peer that flips a bit of the next content that it sends."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.random: np.random.Generator | None = None

    def send(self, to: str, value: Any, *, timeout_s: float) -> None:
        if isinstance(value, Content) and self.random is not None:
            data = np.array(value.data)
            flip_in(data, self.random)
            value = dataclasses.replace(value, data=data)
            self.random = None
        self._peer.send(to, value, timeout_s=timeout_s)

    def receive(self, from_: str, *, timeout_s: float) -> Any:
        return self._peer.receive(from_, timeout_s=timeout_s)


def _deltas_always() -> DeltaChoice:
    choice = DeltaChoice(clock=lambda: 0.0)
    choice.applied = choice.sent = lambda *_: None  # type: ignore[method-assign]
    return choice


@contextmanager
def stream(deltas: bool) -> Iterator[Flip]:
    """A stream between peers of one process, so that only the stream's own digests can find the flip."""
    reshard = reshard_plan(LAYOUT, LAYOUT)
    with Peer.listen("trainer") as trainer, Peer.listen("engine") as engine:
        trainer.connect(engine.address)
        link = _FlippingLink(trainer)
        sender = WeightStreamSender(reshard, 0, link, ["engine"], deltas=deltas, new_choice=_deltas_always)
        receiver = WeightStreamReceiver(reshard, 0, engine, ["trainer"])
        published, served, version = weights(), weights(), -1

        def sync() -> tuple[bool, list[Any]]:
            """(whether the receiver refused it, the sender's reports)"""
            nonlocal version
            version += 1
            published["a"][version % NUM_ELEMENTS] += 1.0
            published["b"][version % (NUM_ELEMENTS // 4)] += 1.0
            reports: list[Any] = []
            publish = threading.Thread(
                target=lambda: is_refused(lambda: reports.extend(sender.publish(published, version)))
            )
            publish.start()
            refused = is_refused(lambda: receiver.receive(served, version, timeout_s=TIMEOUT_S))
            publish.join()
            return refused, reports

        def flip(random: np.random.Generator) -> bool:
            assert not sync()[0], "a version without a flip"
            link.random = random
            return sync()[0]

        yield flip


WAYS: dict[str, Callable[[], Any]] = {
    "peers over TCP": peers_over_tcp,
    "channel (checked=True)": checked_channel,
    "pool (checked=True)": checked_pool,
    "weight store": lambda: store(in_use=False),
    "weight store, checked while it is used": lambda: store(in_use=True),
    "weight stream, dense": lambda: stream(deltas=False),
    "weight stream, delta": lambda: stream(deltas=True),
}
