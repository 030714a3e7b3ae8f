"""A channel between two hosts, over loopback TCP: `python -m benchmarks.comm.remote_channel`.

One process puts, another takes; in turn, and of the same bytes: through a door (rlinf_comm.remote), over a bare socket
with frames of the same size, by a gloo send, and through Ray's object store from an actor of one pretended node to an
actor of another. A sample is the time from the first put until the taking process has all items, and has read a byte of
each.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from benchmarks.harness import Step, compare, interleave, report

from rlinf_comm import Channel, ChannelAddress, ChannelServer, ServerAddress
from rlinf_comm.peers import job_secret

SPAWN = multiprocessing.get_context("spawn")
SIZES = {"1 MB": 1 << 20, "256 bytes": 256}
NUM_ITEMS = {"1 MB": 200, "256 bytes": 5000}
"""Items of a sample; a fiftieth of the small ones for Ray, whose items are a call each."""
CAPACITY_BYTES = 64 << 20
TIMEOUT_S = 300


class Side(Protocol):
    """One way to another process."""

    def send(self, item: np.ndarray, num_items: int) -> None:
        """Returns when the other process has all of them."""
        ...

    def close(self) -> None: ...


def _read(item: Any) -> int:
    return int(item[-1])


# --- a door -----------------------------------------------------------------------------------------------------------


def _behind_the_door(reports_address: ChannelAddress) -> None:
    torch.set_num_threads(1)
    channel = Channel.create("items", capacity_bytes=CAPACITY_BYTES, prefault=True, lost_peers="tolerate")
    reports = Channel.open(reports_address)
    with ChannelServer(channel) as server:
        reports.put(server.address)
        num_items, num_taken = channel.take()[0].value, 0
        while num_items:
            while num_taken < num_items:
                for item in channel.take(max_items=64):
                    _read(item.value)
                    num_taken += 1
            reports.put(num_taken)
            num_items, num_taken = channel.take()[0].value, 0


class ThroughServer:
    def __init__(self) -> None:
        self._told = Channel.create("told")
        self._process = SPAWN.Process(target=_behind_the_door, args=(self._told.address,))
        self._process.start()
        address: ServerAddress = self._told.take(timeout_s=TIMEOUT_S)[0].value
        self._channel = Channel.open(address)

    def send(self, item: np.ndarray, num_items: int) -> None:
        self._channel.put(num_items)
        for _ in range(num_items):
            self._channel.put(item)
        self._told.take(timeout_s=TIMEOUT_S)

    def close(self) -> None:
        self._channel.put(0)
        self._process.join(TIMEOUT_S)


# --- a bare socket ----------------------------------------------------------------------------------------------------


def _at_the_socket(port: int) -> None:
    connected = socket.create_connection(("127.0.0.1", port))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = bytearray(16)
    while connected.recv_into(head, 16, socket.MSG_WAITALL):
        num_items, num_bytes = np.frombuffer(head, np.int64)
        room = memoryview(bytearray(max(int(num_bytes), 1 << 20)))
        left = int(num_items * num_bytes)
        while left:
            num_read = connected.recv_into(room, min(left, len(room)))
            _read(room[:num_read])
            left -= num_read
        connected.sendall(b"1")


class OverSocket:
    """Frames without a structure, each sent by one call, read in as large pieces as there are."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._process = SPAWN.Process(target=_at_the_socket, args=(server.getsockname()[1],))
            self._process.start()
            self._socket, _ = server.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, item: np.ndarray, num_items: int) -> None:
        self._socket.sendall(np.array([num_items, item.nbytes], np.int64).data)
        for _ in range(num_items):
            self._socket.sendall(item.data)
        assert self._socket.recv(1) == b"1", "the receiver has ended"

    def close(self) -> None:
        self._socket.close()
        self._process.join(TIMEOUT_S)


# --- gloo -------------------------------------------------------------------------------------------------------------


def _join_gloo(folder: str, rank: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def _at_gloo(folder: str) -> None:
    torch.set_num_threads(1)
    _join_gloo(folder, 1)
    head = torch.zeros(2, dtype=torch.int64)
    while True:
        torch.distributed.recv(head, 0)
        num_items, num_bytes = head.tolist()
        if not num_items:
            return
        item = torch.empty(num_bytes, dtype=torch.uint8)
        for _ in range(num_items):
            torch.distributed.recv(item, 0)
            _read(item)
        torch.distributed.send(head, 0)


class OverGloo:
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._process = SPAWN.Process(target=_at_gloo, args=(self._folder.name,))
        self._process.start()
        _join_gloo(self._folder.name, 0)

    def send(self, item: np.ndarray, num_items: int) -> None:
        head, tensor = torch.tensor([num_items, item.nbytes]), torch.from_numpy(item)
        torch.distributed.send(head, 1)
        for _ in range(num_items):
            torch.distributed.send(tensor, 1)
        torch.distributed.recv(head, 1)

    def close(self) -> None:
        torch.distributed.send(torch.zeros(2, dtype=torch.int64), 1)
        self._process.join(TIMEOUT_S)
        torch.distributed.destroy_process_group()
        self._folder.cleanup()


# --- Ray --------------------------------------------------------------------------------------------------------------


class ThroughRay:
    """Two pretended nodes; the producing actor puts each item into its node's store, and the other actor gets it."""

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray
        from ray.cluster_utils import Cluster

        arguments = {"num_cpus": 1, "object_store_memory": 200_000_000, "include_dashboard": False}
        self._ray, self._cluster = ray, Cluster(initialize_head=True, head_node_args=arguments)
        self._cluster.add_node(num_cpus=1, object_store_memory=200_000_000, resources={"far": 1})
        ray.init(address=self._cluster.address)

        class Consumer:
            def take(self, item: np.ndarray) -> int:
                return int(item[-1])

        class Producer:
            def send(self, consumer: Any, item: np.ndarray, num_items: int) -> None:
                waiting: list[Any] = []
                for _ in range(num_items):
                    waiting.append(consumer.take.remote(ray.put(item)))
                    if len(waiting) > 32:  # as many on their way as the store has room for
                        ray.get(waiting.pop(0))
                ray.get(waiting)

        self._producer = ray.remote(num_cpus=1)(Producer).remote()
        self._consumer = ray.remote(num_cpus=1, resources={"far": 1})(Consumer).remote()

    def send(self, item: np.ndarray, num_items: int) -> None:
        self._ray.get(self._producer.send.remote(self._consumer, item, num_items))

    def close(self) -> None:
        self._ray.shutdown()
        self._cluster.shutdown()


def _step(side: Side, size: str, num_items: int) -> Step:
    item = np.ones(SIZES[size], np.uint8)

    def step(_: int) -> float:
        start_s = time.perf_counter()
        side.send(item, num_items)
        return (time.perf_counter() - start_s) / num_items

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scale", type=float, default=1.0, help="of the items of a sample, for a trial")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    job_secret()
    kinds: dict[str, Callable[[], Side]] = {"door": ThroughServer, "socket": OverSocket, "gloo": OverGloo}
    if importlib.util.find_spec("ray") is not None:
        kinds["Ray"] = ThroughRay
    samples_s: dict[str, list[float]] = {}
    with ExitStack() as stack:
        sides = {name: kind() for name, kind in kinds.items()}
        for side in sides.values():
            stack.callback(side.close)
        for size, count in NUM_ITEMS.items():
            number = max(1, int(count * arguments.scale))
            steps = {
                f"{name}, {size}": _step(
                    side, size, max(1, number // 50) if name == "Ray" and number > 1000 else number
                )
                for name, side in sides.items()
            }
            samples_s |= interleave(steps, num_warmup=2, num_rounds=arguments.rounds)
    report(
        "comm-remote-channel",
        settings={
            "sizes_bytes": SIZES,
            "num_items": NUM_ITEMS,
            "scale": arguments.scale,
            "threads": threading.active_count(),
        },
        samples_s=samples_s,
        comparisons=[
            compare(samples_s, f"{name}, {size}", f"door, {size}") for size in SIZES for name in kinds if name != "door"
        ],
        findings={"unit": "seconds for each item"},
        output=arguments.output,
    )


if __name__ == "__main__":
    main()
