"""Resharding Megatron TP4 to SGLang TP2 within one process: a CopyProgram, a flat copy, the same plan in torch, cat.

    pytest benchmarks/comm/test_comm_copies_benchmark.py --benchmark-json=copies.json
    RLINF_BENCHMARK_GB=0.3 RLINF_BENCHMARK_ROUNDS=5 pytest benchmarks/comm/test_comm_copies_benchmark.py

The sides take turns, round by round. The limit of the machine is a flat copy past the caches of as many bytes (with a
cast: a flat cast): what is printed, and stands in `extra_info`, are GB of destination per second and the limit's share,
once of the medians and once the median of the ratios within a round.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.comm.reshard_case import ELEMENTS_PER_LAYER, Case, gather_and_cat, make_case, run_in_torch

from rlinf_comm.copies import (
    CopyProgram,
    CopyTable,
    DigestProgram,
    DigestTable,
    StridedBox,
    StridedCopy,
    addresses_of,
    code_of_dtype,
)

GIGABYTES = float(os.environ.get("RLINF_BENCHMARK_GB", "0.952"))
NUM_ROUNDS = int(os.environ.get("RLINF_BENCHMARK_ROUNDS", "7"))
NUM_LAYERS = max(1, round(GIGABYTES * 1e9 / (2 * ELEMENTS_PER_LAYER)))

Side = Callable[[], object]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measure(benchmark: Any, capsys: Any, sides: dict[str, Side], num_bytes: int, limit: str, subject: str) -> None:
    """Times the sides in turn; prints and records rates and shares of `limit`; pytest-benchmark times `subject`."""
    times_s: dict[str, list[float]] = {name: [] for name in sides}
    for round_index in range(1 + NUM_ROUNDS):
        for name, side in sides.items():
            start_s = time.perf_counter()
            side()
            if round_index:  # the first touches the pages
                times_s[name].append(time.perf_counter() - start_s)
    lines = [f"{benchmark.name}, {num_bytes / 1e9:.3f} GB, {NUM_ROUNDS} rounds, load {os.getloadavg()[0]:.1f}"]
    for name, times in times_s.items():
        rate = num_bytes / statistics.median(times) / 1e9
        best = num_bytes / min(times) / 1e9
        share = statistics.median(times_s[limit]) / statistics.median(times)
        by_round = statistics.median(a / b for a, b in zip(times_s[limit], times, strict=True))
        best_share = min(times_s[limit]) / min(times)
        record = {"gb_per_s": rate, "best_gb_per_s": best, "share": share, "share_by_round": by_round}
        record["share_of_best"] = best_share
        benchmark.extra_info[name] = {key: round(value, 3) for key, value in record.items()}
        lines.append(
            f"  {name:<28} {rate:6.2f} GB/s (best {best:6.2f})  of {limit}: {share:.2f}, by round {by_round:.2f}, "
            f"best to best {best_share:.2f}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    benchmark.pedantic(sides[subject], rounds=1)


def make_memory(case: Case, src: torch.dtype, dst: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    num_elements = sum(rows * columns for rows, columns in case.src_shapes)
    source = torch.empty(num_elements, dtype=src)
    for part in source.split(1 << 24):
        part.normal_()
    return source, torch.zeros(num_elements, dtype=dst)


def flat_program(source: torch.Tensor, target: torch.Tensor) -> CopyProgram:
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in (source, target)]
    return CopyProgram(
        CopyTable.of(
            [
                StridedCopy(
                    src_buffer=0,
                    dst_buffer=0,
                    shape=(source.numel(),),
                    src_strides=(source.element_size(),),
                    dst_strides=(target.element_size(),),
                    src_dtype=names[0],
                    dst_dtype=names[1],
                )
            ]
        )
    )


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("src_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32-to-bf16"])
def test_reshard(benchmark: Any, capsys: Any, src_dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    case = make_case(NUM_LAYERS)
    source, target = make_memory(case, src_dtype, torch.bfloat16)
    sources, targets = case.views(source, case.src_shapes), case.views(target, case.dst_shapes)
    program, flat = CopyProgram(case.table(src_dtype, torch.bfloat16)), flat_program(source, target)
    src, dst, flat_src, flat_dst = (addresses_of(side) for side in (sources, targets, [source], [target]))

    gather_and_cat(sources, targets)
    expected = target.clone()
    for run in (lambda: program.run(src, dst, num_threads), lambda: run_in_torch(case, sources, targets)):
        target.zero_()
        run()
        assert torch.equal(target.view(torch.int16), expected.view(torch.int16))
    del expected

    sides: dict[str, Side] = {
        "flat": lambda: flat.run(flat_src, flat_dst, num_threads),
        "program": lambda: program.run(src, dst, num_threads),
        "torch, same plan": lambda: run_in_torch(case, sources, targets),
        "torch, gather and cat": lambda: gather_and_cat(sources, targets),
        "torch, flat copy_": lambda: target.copy_(source),
    }
    measure(benchmark, capsys, sides, target.nbytes, "flat", "program")


def digest_table(case: Case, dtype: torch.dtype, as_dtype: torch.dtype) -> DigestTable:
    """A digest for each destination tensor, from what the copies read."""
    table = case.table(dtype, as_dtype)
    widths = np.array(case.dst_shapes)[table.dst_buffer, 1]
    return DigestTable(
        buffer=table.src_buffer,
        offset=table.src_offset,
        lengths=table.lengths,
        strides=table.src_strides,
        dtype=table.src_dtype,
        as_dtype=table.dst_dtype,
        digest=table.dst_buffer,
        first_index=table.dst_offset // as_dtype.itemsize,
        index_strides=np.stack([widths, np.ones_like(widths)], axis=1),
        num_digests=len(case.dst_shapes),
    )


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("src_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32-to-bf16"])
def test_digest(benchmark: Any, capsys: Any, src_dtype: torch.dtype, num_threads: int) -> None:
    """Digests of the served tensors, read from the trainer's, alone and in the pass of the copy."""
    torch.set_num_threads(num_threads)
    case = make_case(NUM_LAYERS)
    source, target = make_memory(case, src_dtype, torch.bfloat16)
    src = addresses_of(case.views(source, case.src_shapes))
    targets = case.views(target, case.dst_shapes)
    dst = addresses_of(targets)
    table = digest_table(case, src_dtype, torch.bfloat16)
    sent, copy = DigestProgram(table), CopyProgram(case.table(src_dtype, torch.bfloat16), table)
    plain = CopyProgram(case.table(src_dtype, torch.bfloat16))
    served = DigestProgram(
        DigestTable.of(
            [
                StridedBox(
                    buffer=index,
                    shape=(tensor.numel(),),
                    strides=(2,),
                    dtype="bfloat16",
                    digest=index,
                    first_index=0,
                    index_strides=(1,),
                )
                for index, tensor in enumerate(targets)
            ]
        )
    )
    assert copy.run_with_digests(src, dst) == sent.run(src) == served.run(dst)
    assert code_of_dtype(src_dtype) == table.dtype[0]

    words = source.view(torch.int64)

    def copy_then_digest() -> None:
        plain.run(src, dst, num_threads)
        sent.run(src, num_threads)

    sides: dict[str, Side] = {
        "read (torch sum)": lambda: words.sum(),
        "digest of what is sent": lambda: sent.run(src, num_threads),
        "digest of what is served": lambda: served.run(dst, num_threads),
        "copy": lambda: plain.run(src, dst, num_threads),
        "copy, then digest": copy_then_digest,
        "copy with digest": lambda: copy.run_with_digests(src, dst, num_threads),
    }
    measure(benchmark, capsys, sides, target.nbytes, "read (torch sum)", "copy with digest")
