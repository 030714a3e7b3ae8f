"""Resharding across processes: a trainer's shards into the parameters of an engine in another process.

    pytest benchmarks/comm/test_comm_reshard_benchmark.py --benchmark-json=reshard.json

This process holds the shards of all trainer ranks, its child the parameters of all engine ranks; a side is over when
the child has said so. All sides run with one thread. The limit is a flat copy past the caches, out of the same shared
memory into the child's own, of as many bytes as the engine stores (with a cast: a flat cast).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.comm.measuring import measure
from benchmarks.comm.reshard_cases import (
    CASES,
    Buffers,
    Case,
    fill,
    gather_then_cut,
    num_bytes_of,
    plan_in_torch,
    views_of,
)
from benchmarks.comm.test_comm_copies_benchmark import flat_program
from benchmarks.comm.transports import SPAWN, TIMEOUT_S

from rlinf_comm import Channel, ChannelAddress, SharedPool
from rlinf_comm.copies import addresses_of
from rlinf_comm.weights import ReshardExecutor, StoreReceiver, StoreSender, WeightStore

NUM_ROUNDS = int(os.environ.get("RLINF_BENCHMARK_ROUNDS", "7"))
NAMES = [name for name in CASES if "PP2" not in name]
"""All of a case lies three times in memory, and the store holds it twice more."""


class Engine:
    """The receiving process: does what it is told by name, with what comes with it."""

    def __init__(self, name: str, store: Any, gloo: str) -> None:
        self.case: Case = CASES[name]
        self.memory = torch.zeros(num_bytes_of(self.case.engine), dtype=torch.uint8)
        self.parameters = views_of(self.case.engine, self.memory)
        self.executors = [ReshardExecutor(self.case.plan, rank) for rank in range(self.case.engine.num_ranks)]
        opened = WeightStore.open(store)
        self.receivers = [StoreReceiver(opened, self.case.plan, rank) for rank in range(self.case.engine.num_ranks)]
        self.received = torch.zeros(num_bytes_of(self.case.trainer), dtype=torch.uint8)
        self.version = 0
        dst = self.memory.view(torch.bfloat16)
        self.num_flat = min(len(dst), self.received.nbytes // getattr(torch, self.case.trainer_dtype).itemsize)
        self.flat = flat_program(self.num_flat, self.case.trainer_dtype, "bfloat16")
        dist.init_process_group("gloo", init_method=f"file://{gloo}", rank=1, world_size=2)

    def flat_copy(self, shared: list[Buffers], flat: torch.Tensor) -> None:
        self.flat.run(addresses_of([flat]), addresses_of([self.memory]))

    def pull(self, shared: list[Buffers], flat: torch.Tensor) -> None:
        for rank, executor in enumerate(self.executors):
            executor.run(shared, self.parameters[rank])

    def receive_published(self, shared: list[Buffers], flat: torch.Tensor) -> None:
        self.version += 1
        for rank, receiver in enumerate(self.receivers):
            receiver.receive(self.parameters[rank], self.version, timeout_s=TIMEOUT_S)

    def merge_shared(self, shared: list[Buffers], flat: torch.Tensor) -> None:
        gather_then_cut(self.case.trainer, self.case.engine, shared, self.parameters)

    def plan_in_torch(self, shared: list[Buffers], flat: torch.Tensor) -> None:
        plan_in_torch(self.case, shared, self.parameters)

    def receive_gloo(self, shared: list[Buffers], flat: torch.Tensor) -> None:
        ranks = views_of(self.case.trainer, self.received)
        for buffers in ranks:
            for tensor in buffers.values():
                dist.recv(tensor.view(-1).view(torch.uint8), 0)
        gather_then_cut(self.case.trainer, self.case.engine, ranks, self.parameters)

    def checksum(self, shared: list[Buffers], flat: torch.Tensor) -> int:
        total = int(self.memory.view(torch.int16).long().sum())
        self.memory.zero_()
        return total


def run_engine(name: str, orders: ChannelAddress, answers: ChannelAddress, store: Any, gloo: str) -> None:
    torch.set_num_threads(1)
    engine, outgoing = Engine(name, store, gloo), Channel.open(answers)
    for order, shared, flat in Channel.open(orders):
        outgoing.put(getattr(engine, order)(shared, flat))
    dist.destroy_process_group()
    outgoing.close()


class Trainer:
    """This process' side."""

    def __init__(self, name: str) -> None:
        self.case = case = CASES[name]
        num_bytes = num_bytes_of(case.trainer)
        self._pool = SharedPool.create("shards", capacity_bytes=num_bytes + (1 << 20), prefault=True)
        self.flat = self._pool.empty((num_bytes,), torch.uint8)
        self.shards = views_of(case.trainer, self.flat)
        fill(case.trainer, self.shards)
        self._store = WeightStore.create(case.plan, name="benchmark")
        self._senders = [StoreSender(self._store, case.plan, rank) for rank in range(case.trainer.num_ranks)]
        self._version = 0
        self._orders, self._answers = Channel.create("orders"), Channel.create("answers")
        gloo = os.path.join(tempfile.mkdtemp(), "gloo")
        arguments = name, self._orders.address, self._answers.address, self._store.address, gloo
        self._process = SPAWN.Process(target=run_engine, args=arguments)
        self._process.start()
        dist.init_process_group("gloo", init_method=f"file://{gloo}", rank=0, world_size=2)

    def order(self, name: str, meanwhile: Callable[[], None] = lambda: None) -> Any:
        self._orders.put((name, self.shards, self.flat))
        meanwhile()
        return self._answers.take(timeout_s=TIMEOUT_S)[0].value

    def publish(self) -> None:
        self._version += 1
        for sender, buffers in zip(self._senders, self.shards, strict=True):
            sender.publish(buffers, self._version)

    def send_gloo(self) -> None:
        for buffers in self.shards:
            for tensor in buffers.values():
                dist.send(tensor.view(-1).view(torch.uint8), 1)

    def stop(self) -> None:
        self._orders.close()
        dist.destroy_process_group()
        self._process.join(TIMEOUT_S)


@pytest.fixture(params=NAMES)
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    side = Trainer(request.param)
    yield side
    side.stop()
    torch.set_num_threads(before)


def test_reshard_across_processes(benchmark: Any, trainer: Trainer) -> None:
    sides: dict[str, Callable[[], object]] = {
        "flat copy past the caches": lambda: trainer.order("flat_copy"),
        "pulled from the pool": lambda: trainer.order("pull"),
        "store, attested": lambda: trainer.order("receive_published", trainer.publish),
        "torch, same plan, shared views": lambda: trainer.order("plan_in_torch"),
        "torch, gather and cut, shared views": lambda: trainer.order("merge_shared"),
        "gloo, gather and cut": lambda: trainer.order("receive_gloo", trainer.send_gloo),
    }
    trainer.order("checksum")
    checksums = {}
    for name in list(sides)[1:]:
        sides[name]()
        checksums[name] = trainer.order("checksum")
    assert len(set(checksums.values())) == 1, checksums
    measure(
        benchmark,
        sides,
        subject="pulled from the pool",
        limit="flat copy past the caches",
        num_rounds=NUM_ROUNDS,
        num_bytes=num_bytes_of(trainer.case.engine),
        target="pulled: at least 0.90; ten times gloo, gather and cut",
    )
