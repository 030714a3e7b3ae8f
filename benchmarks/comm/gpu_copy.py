"""GPU: the batched strided copy beside cudaMemcpy's device-to-device copy, the digest beside the bandwidth it reads.

Prints one JSON object. Gigabytes per second of payload: a copy reads and writes each byte once. Medians of `REPEATS`
runs timed by events, the methods taking turns. Megatron TP4 -> TP1: column-parallel rows, and row-parallel columns.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from rlinf_comm import cuda
from rlinf_comm.copies import DigestTable, StridedBox

REPEATS = 15
NUM_TIMES = 8
WANTED_BYTES = 15_000_000_000
TP = 4
COLUMNS = 4096


def median_s(calls: dict[str, Any]) -> dict[str, float]:
    """Seconds of each call, on the current stream."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(REPEATS + 3):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if repeat >= 3:  # the first runs warm up
                seconds[name].append(start.elapsed_time(end) / 1e3)
    return {name: statistics.median(values) for name, values in seconds.items()}


class Table:
    """A copy table for 2-D bfloat16 blocks: (source buffer, destination offset, rows, columns)."""

    def __init__(self, blocks: Sequence[Sequence[int]], dtypes: tuple[int, int], itemsizes: tuple[int, int]):
        count = len(blocks)
        self.src_buffer = [block[0] for block in blocks]
        self.dst_buffer = [0] * count
        self.src_offset = [0] * count
        self.dst_offset = [block[1] * itemsizes[1] for block in blocks]
        self.lengths = [[block[2], block[3]] for block in blocks]
        self.src_strides = [[block[3] * itemsizes[0], itemsizes[0]] for block in blocks]
        self.dst_strides = [[COLUMNS * itemsizes[1], itemsizes[1]]] * count
        self.src_dtype, self.dst_dtype = [dtypes[0]] * count, [dtypes[1]] * count


def reshard(kind: str, num_bytes: int, source_dtype: torch.dtype) -> dict[str, float]:
    """GB/s of destination bytes, and of a flat copy of the same bytes."""
    rows = num_bytes // 2 // COLUMNS // TP * TP
    whole = torch.empty(rows, COLUMNS, dtype=torch.bfloat16, device="cuda")
    by_rows = kind == "column_parallel"
    shape = (rows // TP, COLUMNS) if by_rows else (rows, COLUMNS // TP)
    shards = [torch.empty(shape, dtype=source_dtype, device="cuda").normal_() for _ in range(TP)]
    starts = [rank * (rows // TP * COLUMNS if by_rows else COLUMNS // TP) for rank in range(TP)]
    blocks = [(rank, start, shape[0], shape[1]) for rank, start in enumerate(starts)]
    codes = (0 if source_dtype == torch.float32 else 1, 1)
    program = cuda.CudaCopyProgram(Table(blocks, codes, (source_dtype.itemsize, 2)))
    stream = torch.cuda.current_stream()
    pointers = [shard.data_ptr() for shard in shards], [whole.data_ptr()]
    flat = torch.empty(rows * COLUMNS, dtype=torch.bfloat16, device="cuda")
    calls: dict[str, Any] = {"memcpy": lambda out=flat: out.copy_(whole.view(-1))}
    for max_ctas in (16, 132, 1056):
        calls[f"max_ctas_{max_ctas}"] = lambda ctas=max_ctas: program.run(*pointers, stream=stream, max_ctas=ctas)
    seconds = median_s(calls)
    del flat, calls  # or the comparison has no room
    parts = whole.chunk(TP, 0 if by_rows else 1)
    assert all(torch.equal(part, shard.bfloat16()) for part, shard in zip(parts, shards, strict=True))
    return {name: whole.nbytes / value / 1e9 for name, value in seconds.items()} | {"bytes": float(whole.nbytes)}


def digest(num_bytes: int) -> dict[str, float]:
    """GB/s read, by thread blocks, with the wait for the sums. `kernel` is without it: what more boxes of the same
    program take."""
    tensor = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device="cuda").normal_()
    stream = torch.cuda.current_stream()
    other = torch.empty_like(tensor)
    pointers = [tensor.data_ptr()]
    one, many = digest_program(len(tensor), 1), digest_program(len(tensor), NUM_TIMES + 1)
    calls: dict[str, Any] = {
        "memcpy": lambda: other.copy_(tensor),
        "maximum": lambda: tensor.view(torch.int32).max(),
        "many": lambda: many.run(pointers, stream=stream, max_ctas=1056),
    }
    for max_ctas in (132, 528, 1056):
        calls[f"program_{max_ctas}"] = lambda ctas=max_ctas: one.run(pointers, stream=stream, max_ctas=ctas)
    seconds = median_s(calls)
    assert many.run(pointers, stream=stream) == one.run(pointers, stream=stream) * (NUM_TIMES + 1)
    seconds["kernel"] = (seconds.pop("many") - seconds["program_1056"]) / NUM_TIMES
    return {name: tensor.nbytes / value / 1e9 for name, value in seconds.items()} | {"bytes": float(tensor.nbytes)}


def digest_program(num_elements: int, num_digests: int) -> cuda.CudaDigestProgram:
    """Digests a bfloat16 tensor so many times."""
    boxes = [
        StridedBox(
            buffer=0, shape=(num_elements,), strides=(2,), dtype="bfloat16", digest=digest, first_index=0,
            index_strides=(1,),
        )
        for digest in range(num_digests)
    ]  # fmt: skip
    return cuda.CudaDigestProgram(DigestTable.of(boxes))


def targets(results: dict[str, Any]) -> dict[str, Any]:
    """Reached over wanted: a copy beside a flat one, a digest beside the bandwidth of reading.

    A flat copy reads and writes, so that its traffic, twice its payload, is one measure of that bandwidth; a maximum
    over the tensor is the other. The faster one counts.
    """
    ratios = {}
    for name in ("column_parallel_bfloat16", "row_parallel_bfloat16"):
        rates = results[name]
        best = max(value for key, value in rates.items() if key.startswith("max_ctas"))
        ratios[f"copy_{name}"] = {"of_memcpy": best / rates["memcpy"], "wanted": 0.9}
    rates = results["digest"]
    bandwidth = max(2 * rates["memcpy"], rates["maximum"])
    ratios["digest"] = {"of_read_bandwidth": rates["program_1056"] / bandwidth, "wanted": 0.9}
    return ratios


def main(only_digests: bool = False) -> None:
    cuda.check_device()
    free, _ = torch.cuda.mem_get_info()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "unit": "GB/s of payload, median"}
    results["digest"] = digest(min(4_000_000_000, free // 8))
    results["digest_64_mb"], results["digest_1_mb"] = digest(64_000_000), digest(1_000_000)
    if only_digests:
        print(json.dumps(results))
        return
    for kind in ("column_parallel", "row_parallel"):
        for dtype in (torch.bfloat16, torch.float32):
            torch.cuda.empty_cache()
            results[f"{kind}_{str(dtype)[6:]}"] = reshard(kind, min(WANTED_BYTES, free // 7), dtype)
    results["targets"] = targets(results)
    print(json.dumps(results))


if __name__ == "__main__":
    main(only_digests="--only-digests" in sys.argv)
