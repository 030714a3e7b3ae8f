"""The ways to hand a tensor to another process that the benchmark compares, each with its receiving process.

`hand_over()` returns when the receiver has acknowledged. `arrives` says what the receiver then has: a view of shared
memory, a private object that the transport made, or its own memory that was there before.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from rlinf_comm import Channel, ChannelAddress, SharedPool, copy_into

SPAWN = torch.multiprocessing.get_context("spawn")
TIMEOUT_S = 120


class Transport:
    """Sends any of `values` (by number) to a process of its own."""

    name = ""
    arrives = ""
    """What the receiver gets: "view", "object" or "own memory"."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self._processes: list[Any] = []

    def start(self, target: Callable[..., None], *args: object) -> None:
        process = SPAWN.Process(target=target, args=args)
        process.start()
        self._processes.append(process)

    def hand_over(self, index: int) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Tells the receiver to end."""

    def stop(self) -> None:
        self.finish()
        for process in self._processes:
            process.join(TIMEOUT_S)


# --- this package -----------------------------------------------------------------------------------------------------


def _acknowledge(values: ChannelAddress, acks: ChannelAddress, own: dict[int, torch.Tensor] | None = None) -> None:
    """Receives; with `own`, copies each tensor into memory of the receiver's, made at the first of its size."""
    outgoing = Channel.open(acks)
    for value in Channel.open(values):
        if own is not None:
            if value.nbytes not in own:
                own[value.nbytes] = torch.zeros_like(value)
            copy_into(own[value.nbytes], value)
        del value
        outgoing.put(1)
    outgoing.close()


class ThroughChannel(Transport):
    name, arrives = "channel", "view"

    def __init__(self, values: list[Any], own: dict[int, torch.Tensor] | None = None, **options: Any) -> None:
        super().__init__(values)
        self._out = Channel.create("values", **{"capacity_bytes": 640 << 20, "prefault": True} | options)
        self._acks = Channel.create("acks")
        self.start(_acknowledge, self._out.address, self._acks.address, own)

    def hand_over(self, index: int) -> None:
        self._out.put(self.values[index])
        self._acks.take(timeout_s=TIMEOUT_S)

    def finish(self) -> None:
        self._out.close()


class ByReference(ThroughChannel):
    """The values stand in a SharedPool from the start, as parameters or a replay buffer would."""

    name = "pool, by reference"

    def __init__(self, values: list[Any], own: dict[int, torch.Tensor] | None = None) -> None:
        num_bytes = sum(value.nbytes for value in values)
        self.pool = SharedPool.create("values", capacity_bytes=num_bytes + (1 << 20), prefault=True)
        super().__init__([self.pool.copy_of(value) for value in values], own, capacity_bytes=1 << 20)


class CopiedIn(ByReference):
    """The sender's memory is private: one copy into the pool."""

    name = "pool, copied in"

    def __init__(self, values: list[Any]) -> None:
        super().__init__(values)
        self._private = [value.clone() for value in values]

    def hand_over(self, index: int) -> None:
        copy_into(self.values[index], self._private[index])
        super().hand_over(index)


class CopiedOut(ByReference):
    """The receiver copies into memory of its own."""

    name, arrives = "pool, copied out", "own memory"

    def __init__(self, values: list[Any]) -> None:
        super().__init__(values, {})


# --- others -----------------------------------------------------------------------------------------------------------


def _from_pipe(connection: Any) -> None:
    while (value := receive_pickled(connection)) is not None:
        connection.send_bytes(b"1")
        del value


def send_pickled(connection: Any, value: Any) -> None:
    """Protocol 5 with arrays out of band: the best that a plain pipe can do."""
    buffers: list[pickle.PickleBuffer] = []
    connection.send_bytes(pickle.dumps(value, protocol=5, buffer_callback=buffers.append))
    connection.send_bytes(len(buffers).to_bytes(4, "little"))
    for buffer in buffers:
        connection.send_bytes(buffer.raw())


def receive_pickled(connection: Any) -> Any:
    header = connection.recv_bytes()
    num_buffers = int.from_bytes(connection.recv_bytes(), "little")
    return pickle.loads(header, buffers=[connection.recv_bytes() for _ in range(num_buffers)])  # noqa: S301 - measured


class ThroughPipe(Transport):
    name, arrives = "pipe, pickle 5", "object"

    def __init__(self, values: list[Any]) -> None:
        super().__init__([_as_arrays(value) for value in values])
        self._near, far = SPAWN.Pipe()
        self.start(_from_pipe, far)

    def hand_over(self, index: int) -> None:
        send_pickled(self._near, self.values[index])
        self._near.recv_bytes()

    def finish(self) -> None:
        send_pickled(self._near, None)


def _as_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    return {key: _as_arrays(item) for key, item in value.items()} if isinstance(value, dict) else value


def _from_queue(values: Any, acks: Any) -> None:
    while (value := values.get()) is not None:
        del value
        acks.put(1)


class ThroughTorchQueue(Transport):
    """Fresh tensors: the queue moves a tensor's own memory into shared memory, where a second send of it is free."""

    name, arrives = "torch queue", "view"

    def __init__(self, values: list[Any]) -> None:
        super().__init__(values)
        self._out, self._acks = SPAWN.Queue(), SPAWN.Queue()
        self.start(_from_queue, self._out, self._acks)

    def hand_over(self, index: int) -> None:
        self._out.put(_cloned(self.values[index]))
        self._acks.get(timeout=TIMEOUT_S)

    def finish(self) -> None:
        self._out.put(None)


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {key: _cloned(item) for key, item in value.items()} if isinstance(value, dict) else value


def _join_gloo(store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def _from_gloo(store: str, sizes: list[int]) -> None:
    _join_gloo(store, 1)
    own = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    index, ack = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    while True:
        dist.recv(index, 0)
        if index.item() < 0:
            break
        dist.recv(own[int(index.item())], 0)
        dist.send(ack, 0)
    dist.destroy_process_group()


class ThroughGloo(Transport):
    """The receiver knows the sizes beforehand; a number says which one comes."""

    name, arrives = "gloo", "own memory"

    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__([value.view(torch.uint8).view(-1) for value in values])
        store = os.path.join(tempfile.mkdtemp(), "gloo")
        self.start(_from_gloo, store, [value.numel() for value in self.values])
        _join_gloo(store, 0)
        self._ack = torch.zeros(1, dtype=torch.int64)

    def hand_over(self, index: int) -> None:
        dist.send(torch.tensor([index]), 1)
        dist.send(self.values[index], 1)
        dist.recv(self._ack, 1)

    def finish(self) -> None:
        dist.send(torch.tensor([-1]), 1)
        dist.destroy_process_group()


class ThroughRay(Transport):
    """numpy, which Ray's object store hands out without a copy."""

    name, arrives = "Ray object store", "view"

    @staticmethod
    def is_there() -> bool:
        return importlib.util.find_spec("ray") is not None

    def __init__(self, values: list[torch.Tensor]) -> None:
        import ray  # pyright: ignore[reportMissingImports] - only where it is installed

        super().__init__([value.numpy() for value in values])
        self._ray = ray
        # Room for an object or two, or every object would lie on fresh pages.
        store_bytes = max(512 << 20, 3 * max(value.nbytes for value in values))
        ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, object_store_memory=store_bytes)

        class Receiver:
            def size(self, value: Any) -> int:
                return value.nbytes

        self._receiver = ray.remote(Receiver).remote()

    def hand_over(self, index: int) -> None:
        self._ray.get(self._receiver.size.remote(self._ray.put(self.values[index])))

    def finish(self) -> None:
        self._ray.shutdown()
