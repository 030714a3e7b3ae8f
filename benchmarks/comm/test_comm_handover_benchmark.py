"""Hand-over of a value to another process and an acknowledgement back, by size and by transport.

    pytest benchmarks/comm/test_comm_handover_benchmark.py --benchmark-json=handover.json

Each side does several hand-overs in a row before it is the next one's turn; the first of them, which wakes the receiver
up, is kept apart. Ray takes part where it is installed. Beside the transports stands a memcpy of the same bytes,
glibc's, numpy's, one past the caches and copy_into, which chooses: what the machine can do. A transport that moves
nothing is faster than that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.comm.measuring import Side, measure
from benchmarks.comm.transports import (
    ByReference,
    CopiedIn,
    CopiedOut,
    ThroughChannel,
    ThroughGloo,
    ThroughPipe,
    ThroughRay,
    ThroughTorchQueue,
    Transport,
)

from rlinf_comm import _C, copy_into

SIZES = {
    "1 KB": (1 << 10, 50, 15),
    "4 KB": (4 << 10, 50, 15),
    "64 KB": (64 << 10, 50, 15),
    "1 MB": (1 << 20, 20, 11),
    "16 MB": (16 << 20, 6, 7),
    "128 MB": (128 << 20, 6, 5),
    "512 MB": (512 << 20, 4, 3),
}
"""Name: (bytes, hand-overs in a row, rounds)."""
STRUCTURES: dict[str, Any] = {
    "20 scalars": {f"s{index}": index * 0.5 for index in range(20)},
    "10 tensors of 4 KB": {f"t{index}": torch.ones(1024) for index in range(10)},
}
TARGETS = {"4 KB": "channel: at most 15 us; torch queue: at least 20 times that"} | dict.fromkeys(
    ("1 MB", "16 MB", "512 MB"), "pool, by reference: at most 25 us"
)
TARGETS["128 MB"] = "pool, by reference: at most 25 us; copied out: at least 0.85 of the copy past the caches"


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tensors() -> list[torch.Tensor]:
    return [torch.ones(num_bytes // 4) for num_bytes, *_ in SIZES.values()]


@pytest.fixture(scope="module")
def transports(tensors: list[torch.Tensor]) -> Iterator[list[Transport]]:
    kinds = [ThroughChannel, ByReference, CopiedIn, CopiedOut, ThroughPipe, ThroughTorchQueue, ThroughGloo]
    if ThroughRay.is_there():
        kinds.append(ThroughRay)
    instances = [kind(tensors) for kind in kinds]
    yield instances
    for transport in instances:
        transport.stop()


@pytest.mark.parametrize("size", SIZES)
def test_tensor(benchmark: Any, tensors: list[torch.Tensor], transports: list[Transport], size: str) -> None:
    index = list(SIZES).index(size)
    source, (num_bytes, burst, num_rounds) = tensors[index], SIZES[size]
    target = torch.zeros_like(source)
    pointers = target.data_ptr(), source.data_ptr(), num_bytes
    sides: dict[str, Side] = {
        transport.name: lambda transport=transport: transport.hand_over(index) for transport in transports
    }
    sides["memcpy, glibc"] = lambda: ctypes.memmove(*pointers)
    sides["numpy, copyto"] = lambda: np.copyto(target.numpy(), source.numpy())
    sides["memcpy past the caches"] = lambda: _C.copy_bytes(*pointers, "streaming")
    sides["copy_into"] = lambda: copy_into(target, source)
    measure(
        benchmark,
        sides,
        subject="channel",
        limit="memcpy past the caches",
        num_rounds=num_rounds,
        num_warmup=2,
        num_bytes=num_bytes,
        burst=burst,
        target=TARGETS.get(size, ""),
    )


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structure(benchmark: Any, structure: str) -> None:
    transports: list[Transport] = [
        kind([STRUCTURES[structure]]) for kind in (ThroughChannel, ThroughPipe, ThroughTorchQueue)
    ]
    sides: dict[str, Side] = {
        transport.name: lambda transport=transport: transport.hand_over(0) for transport in transports
    }
    measure(benchmark, sides, subject="channel", num_rounds=15, num_warmup=2, burst=50)
    for transport in transports:
        transport.stop()
