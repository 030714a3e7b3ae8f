"""Weights from one host to another, over loopback TCP: `python -m benchmarks.comm.weights_between_hosts`.

Two trainer ranks hold a gigabyte in bfloat16 as FSDP2 does, and four engine ranks, which say that they are on another
host, hold two replicas of two ranks each. Every rank is a process with one thread. In turn: the sync that sends each
byte to the host once and spreads it there (`per_node`), the one that sends every rank its own (`streams`), and a bare
socket between two processes, with the bytes that an engine serves once. A sample is the time until every engine rank
has the version and has proven it. Versions differ in every byte and travel whole.

`crossing` is what the trainers sent to the other host, counted by them; the rest of the work is inside a host, on cores
that the two pretended hosts share.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.comm.remote_channel import OverSocket
from benchmarks.comm.weight_sync import DENSE
from benchmarks.harness import Step, compare, interleave, report

from rlinf_comm import codec
from rlinf_comm.weights import BufferSpec, Layout, reshard_plan
from rlinf_comm.weights.layouts import TransformerShape, merged_layout
from rlinf_comm.wire import address, this_host
from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.weight_sync.base import FinishReads, WeightPort

SPAWN = get_context("spawn")
TIMEOUT_S = 600.0
SMALL = replace(DENSE, num_layers=2, vocab=4096)
"""For a trial."""
WAYS = ("per_node", "streams")
NUM_TRAINERS, NUM_ENGINES = 2, 4
PIECE_BYTES = 64 << 20
"""What a bare socket is given at once."""


def layouts(shape: TransformerShape) -> tuple[Layout, Layout]:
    specs = shape.specs()
    return Layout.sharded(specs, NUM_TRAINERS), Layout(specs, merged_layout(shape, tp=2).ranks * (NUM_ENGINES // 2))


def _tensors(buffers: dict[str, BufferSpec]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in buffers.items()}


# --- ranks ------------------------------------------------------------------------------------------------------------


def train(pipe: Connection) -> None:
    """One trainer rank: publishes the versions that it is told to, and says what it has sent of those before."""
    torch.set_num_threads(1)
    port: WeightPort = codec.unpack(pipe.recv_bytes())
    tensors = _tensors(port.reshard.src_buffers[port.rank])
    sender, sent_bytes = WEIGHT_SYNCS.get(port.weight_sync).open_sender(port), [0]
    for way in sender._ways:
        way._sender.publish = _counted(way._sender.publish, sent_bytes)
    pipe.send("ready")
    finish_reads: FinishReads | None = None
    while (version := pipe.recv()) is not None:
        if finish_reads is not None:
            finish_reads()
        for tensor in tensors.values():
            tensor.fill_(version)
        pipe.send("changed")
        assert pipe.recv() == "publish"
        finish_reads = sender.publish(tensors, version)
        pipe.send((sent_bytes[0], {sender._peer.transport_to(way._name).name for way in sender._ways}))
    pipe.send("done")


def _counted(publish: Callable[..., Any], sent_bytes: list[int]) -> Callable[..., Any]:
    def counted(*arguments: Any, **named: Any) -> Any:
        reports = publish(*arguments, **named)
        sent_bytes[0] += sum(one.sent_bytes for one in reports)
        return reports

    return counted


def serve(pipe: Connection) -> None:
    """One engine rank, of another host: takes the versions that it is told to."""
    torch.set_num_threads(1)
    there = replace(this_host(), boot_id="there")
    address.this_host = lambda: there
    port: WeightPort = codec.unpack(pipe.recv_bytes())
    tensors = _tensors(port.reshard.dst_buffers[port.rank])
    receiver = WEIGHT_SYNCS.get(port.weight_sync).open_receiver(port)
    pipe.send("ready")
    while (version := pipe.recv()) is not None:
        check = receiver.receive(tensors, version, TIMEOUT_S)
        if check is not None:
            check()
        pipe.send({float(tensor.reshape(-1)[-1]) for tensor in tensors.values()})
    pipe.send("done")


class Edge:
    """A weight sync with its ranks."""

    def __init__(self, way: str, shape: TransformerShape) -> None:
        self.reshard = reshard_plan(*layouts(shape))
        nodes = {"nodes": [1] * NUM_ENGINES} if way == "per_node" else {}
        self._sync = WEIGHT_SYNCS.get(way)("edge", self.reshard, deltas=False, **nodes)
        self.crossing_bytes: list[int] = []
        port = WeightPort(
            edge="edge", side="send", rank=0, reshard=self.reshard, weight_sync=way, address=self._sync.address
        )
        self._trainers = [self._start(train, replace(port, rank=rank)) for rank in range(NUM_TRAINERS)]
        engines = [replace(port, side="receive", rank=rank) for rank in range(NUM_ENGINES)]
        self._engines = [self._start(serve, of_rank) for of_rank in engines]
        for pipe in (*self._trainers, *self._engines):
            assert pipe.recv() == "ready"

    def _start(self, main: Callable[[Connection], None], port: WeightPort) -> Connection:
        here, there = SPAWN.Pipe()
        SPAWN.Process(target=main, args=(there,), daemon=True).start()
        here.send_bytes(codec.pack(port))
        return here

    def sync(self, version: int) -> float:
        """Seconds until all engine ranks serve it."""
        for pipe in self._trainers:
            pipe.send(version)
        for pipe in self._trainers:
            assert pipe.recv() == "changed"
        start_s = time.perf_counter()
        for pipe in self._trainers:
            pipe.send("publish")
        for pipe in self._engines:
            pipe.send(version)
        served = [pipe.recv() for pipe in self._engines]
        seconds = time.perf_counter() - start_s
        assert served == [{float(version)}] * NUM_ENGINES, f"version {version}: the engines serve {served}"
        reports = [pipe.recv() for pipe in self._trainers]
        assert {name for _, names in reports for name in names} == {"tcp"}, "not all of it went over the network"
        self.crossing_bytes.append(sum(sent_bytes for sent_bytes, _ in reports))
        return seconds

    def crossing(self, num_warmup: int) -> int:
        """Bytes of a version: a trainer tells of those that were taken when it had published the next."""
        first, last = self.crossing_bytes[num_warmup - 1], self.crossing_bytes[-1]
        return (last - first) // (len(self.crossing_bytes) - num_warmup)

    def close(self) -> None:
        for pipe in (*self._trainers, *self._engines):
            pipe.send(None)
            assert pipe.recv() == "done"


# --- all --------------------------------------------------------------------------------------------------------------


def _over_socket(side: OverSocket, num_bytes: int) -> Step:
    piece = np.ones(PIECE_BYTES, np.uint8)
    whole, rest = divmod(num_bytes, PIECE_BYTES)

    def step(_: int) -> float:
        start_s = time.perf_counter()
        if whole:
            side.send(piece, whole)
        side.send(piece[:rest], 1)
        return time.perf_counter() - start_s

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="a model of some megabytes, for a trial")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape, num_warmup = SMALL if arguments.small else DENSE, 4
    num_bytes = sum(spec.num_bytes for spec in shape.specs().values())
    with ExitStack() as stack:
        edges = {way: Edge(way, shape) for way in WAYS}
        bare = OverSocket()
        for side in (*edges.values(), bare):
            stack.callback(side.close)
        steps = {way: edge.sync for way, edge in edges.items()} | {"socket": _over_socket(bare, num_bytes)}
        samples_s = interleave(steps, num_warmup=num_warmup, num_rounds=arguments.rounds)
        crossing = {way: edge.crossing(num_warmup) for way, edge in edges.items()}
    for way, sent_bytes in crossing.items():
        print(f"{way:<28} crossing {sent_bytes:,} bytes, {sent_bytes / num_bytes:.3f} of the model's {num_bytes:,}")
    report(
        "comm-weights-between-hosts",
        settings={"trainer_ranks": NUM_TRAINERS, "engine_ranks": NUM_ENGINES, "model_bytes": num_bytes},
        samples_s=samples_s,
        comparisons=[
            compare(samples_s, "socket", "per_node"),
            compare(samples_s, "socket", "streams"),
            compare(samples_s, "streams", "per_node"),
        ],
        findings={"crossing_bytes": crossing, "host": socket.gethostname()},
        output=arguments.output,
    )


if __name__ == "__main__":
    main()
