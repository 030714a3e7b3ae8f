"""One rank of a trainer or an engine as a process of its own, for weight_sync.py."""

from __future__ import annotations

import ctypes
import re
import time
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf_comm import unpack
from rlinf_comm.copies import CopyProgram, CopyTable, StridedCopy, addresses_of
from rlinf_comm.weights import Layout, RankLayout, StoreReceiver, StoreSender, WeightStore

TIMEOUT_S = 120.0
STORE = "weight-sync"
"""Name of the store, which shows in a process's mappings."""


class _NoDigests:
    """Stands for a program and looks at nothing: the copies are the same."""

    def __init__(self, program: Any, num_digests: int) -> None:
        self._program, self._num_digests = program, num_digests

    def run_with_digests(self, *addresses: np.ndarray) -> list[int]:
        self._program.run(*addresses)
        return [0] * self._num_digests

    def run(self, *_: np.ndarray) -> list[int]:
        return []


class Sender(StoreSender):
    """Publishes with digests or without."""

    attests = True

    def _transfer(self, tensors: Any) -> Any:
        transfer = super()._transfer(tensors)
        if self.attests:
            return transfer
        return type("Plain", (), {"publish": _NoDigests(transfer.publish, len(self._own))})


class Receiver(StoreReceiver):
    """Checks what it has copied, or not."""

    attests = True

    def _transfer(self, tensors: Any) -> Any:
        transfer = super()._transfer(tensors)
        if self.attests:
            return transfer
        return type("Plain", (), {"receive": transfer.receive, "attest": _NoDigests(None, 0)})

    def _verify(self, digests: list[int], slots: dict[int, int], policy_version: int) -> None:
        if self.attests:
            super()._verify(digests, slots, policy_version)


def buffers_of(rank: RankLayout) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(a rank's buffers, the flat memory that they lie in)"""
    sizes = {name: spec.num_elements * getattr(torch, spec.dtype).itemsize for name, spec in rank.buffers.items()}
    memory = torch.zeros(sum(-(-size // 64) * 64 for size in sizes.values()), dtype=torch.uint8)
    buffers, at = {}, 0
    for name, spec in rank.buffers.items():
        buffers[name] = memory[at : at + sizes[name]].view(getattr(torch, spec.dtype)).view(spec.shape)
        at += -(-sizes[name] // 64) * 64
    return buffers, memory


def contents(layout: Layout, rank: int, dtype: torch.dtype) -> Any:
    """For each block of a rank: its buffer's name, size, strides and offset, and what belongs there. An element's value
    depends on its tensor's name and its place there, and on nothing else; it is a float32, rounded for bfloat16."""
    for block in layout.ranks[rank].blocks:
        shape = layout.specs[block.name].shape
        index = torch.zeros((1,) * len(shape), dtype=torch.int64)
        for dim, (start, length) in enumerate(zip(block.box.start, block.box.shape, strict=True)):
            stride = int(np.prod(shape[dim + 1 :], dtype=np.int64))
            along = (start + torch.arange(length)) * stride
            index = index + along.view([-1 if other == dim else 1 for other in range(len(shape))])
        mixed = (index * 2654435761 + zlib.crc32(block.name.encode())).bitwise_and_((1 << 24) - 1)
        yield block, (mixed.float() / (1 << 24) - 0.5).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def view_of(block: Any, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    tensor = buffers[block.buffer]
    return tensor.as_strided(block.box.shape, block.strides, tensor.storage_offset() + block.offset)


def memory_bytes() -> dict[str, int]:
    """What this process has in memory, and at most had since `reset_peak`."""
    text = Path("/proc/self/status").read_text()
    return {name: int(number) << 10 for name, number in re.findall(r"(\w+):\s+(\d+) kB", text)}


def store_pages() -> int:
    """Bytes of the store that this process has touched."""
    sizes_kb = re.findall(rf"{STORE}.*\n(?:\w+:.*\n)*?Rss:\s+(\d+) kB", Path("/proc/self/smaps").read_text())
    return sum(int(number) << 10 for number in sizes_kb)


def reset_peak() -> None:
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


class Rank:
    """Does what it is told by name; the answer is what the method returns."""

    def __init__(self, side: str, layout: Layout, rank: int) -> None:
        self.side, self.layout, self.rank = side, layout, rank
        self.buffers, self.memory = buffers_of(layout.ranks[rank])
        if side == "send":  # each parameter has memory of its own, as in a model
            self.buffers = {name: tensor.clone() for name, tensor in self.buffers.items()}
            del self.memory
            self._fill()
        self.check_taken: Callable[[], object]
        reset_peak()
        self.before = memory_bytes()

    def _fill(self) -> None:
        for block, values in contents(self.layout, self.rank, next(iter(self.buffers.values())).dtype):
            view_of(block, self.buffers).copy_(values)

    def open(self, plan: bytes, address: Any) -> None:
        reshard, store = unpack(plan), WeightStore.open(address)
        end = Sender if self.side == "send" else Receiver
        self.end: Any = end(store, reshard, self.rank)
        if self.side == "receive":
            num_words = min(self.memory.nbytes, self.end._slot_bytes) // 16
            self.slot = np.array([self.end._slot_address(0)], np.int64)
            copy = StridedCopy(
                src_buffer=0, dst_buffer=0, shape=(num_words,), src_strides=(16,), dst_strides=(16,),
                src_dtype="bytes16", dst_dtype="bytes16",
            )  # fmt: skip
            self.flat = CopyProgram(CopyTable.of([copy]))

    def publish(self, version: int, attests: bool) -> float:
        """Into the store."""
        self.end.attests = attests
        return seconds(lambda: self.end.publish(self.buffers, version, TIMEOUT_S))

    def publish_by_reference(self, version: int) -> float:
        return seconds(lambda: self.end.publish_by_reference(self.buffers, version, TIMEOUT_S))

    def finish_reads(self) -> float:
        return seconds(self.end.finish_reads)

    def take(self, version: int, attests: bool) -> float:
        self.end.attests = attests

        def take() -> None:
            self.check_taken = self.end.take(self.buffers, version, TIMEOUT_S)

        return seconds(take)

    def check(self) -> float:
        return seconds(self.check_taken)

    def flat_copy(self) -> float:
        """As many bytes as this rank serves, from the store's memory to its own."""
        return seconds(lambda: self.flat.run(self.slot, addresses_of([self.memory])))

    def num_wrong(self) -> int:
        """Elements that differ from what the tensors' names and places say, of the sender's dtype as served."""
        return sum(
            int((view_of(block, self.buffers) != values.to(torch.bfloat16)).sum())
            for block, values in contents(self.layout, self.rank, torch.float32)
        )

    def extra_bytes(self) -> int:
        """The most that this process has had beside its buffers since this was asked for the last time, without the
        pages that belong to others: the store's and, for an engine, the trainer's."""
        now = memory_bytes()
        of_others = store_pages() if self.side == "send" else now["RssShmem"] - self.before["RssShmem"]
        reset_peak()
        return now["VmHWM"] - self.before["VmRSS"] - of_others


def seconds(do: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    do()
    return time.perf_counter() - start_s


def serve(side: str, layout: Layout, rank: int, orders: Connection) -> None:
    torch.set_num_threads(1)
    server = Rank(side, layout, rank)
    orders.send("ready")
    while (order := orders.recv()) is not None:
        name, *arguments = order
        orders.send(getattr(server, name)(*arguments))
