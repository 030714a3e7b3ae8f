"""Resharding and digests within one process, against a flat copy of as many bytes.

    pytest benchmarks/comm/test_comm_copies_benchmark.py --benchmark-json=copies.json
    RLINF_BENCHMARK_GB=0.3 RLINF_BENCHMARK_ROUNDS=5 pytest benchmarks/comm/test_comm_copies_benchmark.py

The limit is a flat copy past the caches of what the destination stores (with a cast: a flat cast), or one read of it.
Beside it stand the flat copy with the stores that rlinf_comm chooses by measuring, memcpy, and numpy's and torch's
copies.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.comm.measuring import measure
from benchmarks.comm.reshard_cases import CASES, Case, fill, gather_then_cut, num_bytes_of, plan_in_torch, views_of

from rlinf_comm.copies import (
    CopyProgram,
    CopyTable,
    DigestProgram,
    DigestTable,
    StridedBox,
    StridedCopy,
    addresses_of,
)

NUM_ROUNDS = int(os.environ.get("RLINF_BENCHMARK_ROUNDS", "7"))
NUM_TRIALS = 8
"""Runs in which a copy tries both ways to store before it keeps to one (store_choice.h)."""


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Memory:
    """Both sides' tensors of a case, and the copies between them as one program for all engine ranks."""

    def __init__(self, case: Case) -> None:
        self.source = torch.empty(num_bytes_of(case.trainer), dtype=torch.uint8)
        self.target = torch.zeros(num_bytes_of(case.engine), dtype=torch.uint8)
        self.sources, self.targets = views_of(case.trainer, self.source), views_of(case.engine, self.target)
        fill(case.trainer, self.sources)
        self.programs = [CopyProgram(case.plan.copies(dst_rank=rank)) for rank in range(case.engine.num_ranks)]
        self.src_pointers = addresses_of(tensor for rank in self.sources for _, tensor in sorted(rank.items()))
        self.dst_pointers = [addresses_of(tensor for _, tensor in sorted(rank.items())) for rank in self.targets]

    def reshard(self, num_threads: int) -> None:
        for program, pointers in zip(self.programs, self.dst_pointers, strict=True):
            program.run(self.src_pointers, pointers, num_threads)


def flat_program(num_elements: int, src_dtype: str, dst_dtype: str) -> CopyProgram:
    sizes = [getattr(torch, dtype).itemsize for dtype in (src_dtype, dst_dtype)]
    copy = StridedCopy(
        src_buffer=0,
        dst_buffer=0,
        shape=(num_elements,),
        src_strides=(sizes[0],),
        dst_strides=(sizes[1],),
        src_dtype=src_dtype,
        dst_dtype=dst_dtype,
    )
    return CopyProgram(CopyTable.of([copy]))


@pytest.mark.parametrize("name", CASES)
def test_reshard(benchmark: Any, name: str, num_threads: int) -> None:
    case = CASES[name]
    memory = Memory(case)
    gather_then_cut(case.trainer, case.engine, memory.sources, memory.targets)
    expected = memory.target.clone()
    for run in (lambda: memory.reshard(num_threads), lambda: plan_in_torch(case, memory.sources, memory.targets)):
        memory.target.zero_()
        run()
        assert torch.equal(memory.target, expected)
    del expected

    flat_target = memory.target.view(torch.bfloat16)
    flat_source = memory.source.view(getattr(torch, case.trainer_dtype))[: flat_target.numel()]
    flat = flat_program(len(flat_source), case.trainer_dtype, "bfloat16")
    flat_pointers = addresses_of([flat_source]), addresses_of([flat_target])
    for _ in range(NUM_TRIALS):
        flat.run(*flat_pointers, num_threads)
        memory.reshard(num_threads)
    sides = {
        "flat copy past the caches": lambda: flat._native.run(*flat_pointers, num_threads, False, None, "streaming"),
        "flat copy, stores by measurement": lambda: flat.run(*flat_pointers, num_threads),
        "program": lambda: memory.reshard(num_threads),
        "torch, same plan": lambda: plan_in_torch(case, memory.sources, memory.targets),
        "torch, gather and cut": lambda: gather_then_cut(case.trainer, case.engine, memory.sources, memory.targets),
        "torch, flat copy_": lambda: flat_target[: len(flat_source)].copy_(flat_source),
    }
    if case.trainer_dtype == "bfloat16":  # memcpy and numpy have no cast
        arrays = [tensor.view(torch.uint8).numpy() for tensor in (flat_target[: len(flat_source)], flat_source)]
        sides["memcpy"] = lambda: ctypes.memmove(arrays[0].ctypes.data, arrays[1].ctypes.data, arrays[0].nbytes)
        sides["numpy, flat copy"] = lambda: np.copyto(arrays[0], arrays[1])
    measure(
        benchmark,
        sides,
        subject="program",
        limit="flat copy past the caches",
        num_rounds=NUM_ROUNDS,
        num_bytes=memory.target.nbytes,
        target="at least 0.90",
    )


@pytest.mark.parametrize("name", ["Qwen2.5-1.5B, TP4 to TP2", "Qwen2.5-1.5B, fp32 TP4 to bf16 TP2"])
def test_digest(benchmark: Any, name: str, num_threads: int) -> None:
    """Times the digest of what an engine rank stores: of its own memory, of the trainer's, and during the copy."""
    case = CASES[name]
    memory = Memory(case)
    table = case.plan.copies(dst_rank=0)
    digests = _digests_of_sources(table, memory)
    sent, copy, plain = DigestProgram(digests), CopyProgram(table, digests), CopyProgram(table)
    tensors = [tensor for _, tensor in sorted(memory.targets[0].items())]
    served = DigestProgram(DigestTable.of([_whole(index, tensor) for index, tensor in enumerate(tensors)]))
    src, dst = memory.src_pointers, memory.dst_pointers[0]
    memory.target.zero_()
    read = src[: int(digests.buffer.max()) + 1]
    assert copy.run_with_digests(src, dst) == sent.run(read)
    words = memory.target[: sum(tensor.nbytes for tensor in tensors) // 8 * 8].view(torch.int64)

    def copy_then_digest() -> None:
        plain.run(src, dst, num_threads)
        served.run(dst, num_threads)

    sides = {
        "read (torch sum)": lambda: words.sum(),
        "digest of what is served": lambda: served.run(dst, num_threads),
        "digest of what is sent": lambda: sent.run(read, num_threads),
        "copy": lambda: plain.run(src, dst, num_threads),
        "copy, then digest": copy_then_digest,
        "copy with digest": lambda: copy.run_with_digests(src, dst, num_threads),
    }
    measure(
        benchmark,
        sides,
        subject="digest of what is served",
        limit="read (torch sum)",
        num_rounds=NUM_ROUNDS,
        num_bytes=words.nbytes,
    )


def _digests_of_sources(table: CopyTable, memory: Memory) -> DigestTable:
    """One for each buffer of engine rank 0, from what the copies read."""
    tensors = [tensor for _, tensor in sorted(memory.targets[0].items())]
    widths = np.array([tensor.shape[-1] for tensor in tensors])[table.dst_buffer]
    itemsize = 2
    return DigestTable(
        buffer=table.src_buffer,
        offset=table.src_offset,
        lengths=table.lengths,
        strides=table.src_strides,
        dtype=table.src_dtype,
        as_dtype=table.dst_dtype,
        digest=table.dst_buffer,
        first_index=table.dst_offset // itemsize,
        index_strides=np.where(table.lengths == 1, widths[:, None], table.dst_strides // itemsize),
        num_digests=len(tensors),
    )


def _whole(index: int, tensor: torch.Tensor) -> StridedBox:
    return StridedBox(
        buffer=index,
        shape=(tensor.numel(),),
        strides=(2,),
        dtype="bfloat16",
        digest=index,
        first_index=0,
        index_strides=(1,),
    )
