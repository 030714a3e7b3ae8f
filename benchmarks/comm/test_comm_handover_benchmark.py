"""Hand-over of a value to another process: rlinf_comm.Channel, a pipe with pickle 5, and torch.multiprocessing's queue.

    pytest benchmarks/comm --benchmark-json=handover.json

Time from the sender's call to the receiver's acknowledgement. The three are measured in turn within one run, round by
round, so that a busy machine is busy for all of them; what counts are the ratios, in `extra_info` of the JSON. The
limit of the machine is one warm copy of the same bytes: `copy_over_channel` is the fraction of it that is reached.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing

from rlinf_comm import Channel

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # spawned children inherit it, and import the peers from there
import handover_peers

_NUM_WARMUP = 5

PAYLOADS: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "20 scalars": (lambda: {f"s{index}": index * 0.5 for index in range(20)}, 300),
    "1 tensor of 4 KB": (lambda: {"t": torch.ones(1024)}, 300),
    "10 tensors of 4 KB": (lambda: {f"t{index}": torch.ones(1024) for index in range(10)}, 200),
    "1 tensor of 16 MB": (lambda: {"t": torch.ones(4 << 20)}, 30),
    "1 tensor of 128 MB": (lambda: {"t": torch.ones(32 << 20)}, 10),
}
"""Name: (value, rounds)."""

HandOver = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def hand_overs() -> Iterator[dict[str, HandOver]]:
    """Each transport with its receiving process."""
    context = torch.multiprocessing.get_context("spawn")

    values, acks = Channel.create("values", capacity_bytes=512 << 20), Channel.create("acks")
    near, far = context.Pipe()
    torch_values, torch_acks = context.Queue(), context.Queue()
    processes = [
        context.Process(target=handover_peers.receive_from_channel, args=(values.address, acks.address)),
        context.Process(target=handover_peers.receive_from_pipe, args=(far,)),
        context.Process(target=handover_peers.receive_from_torch_queue, args=(torch_values, torch_acks)),
    ]
    for process in processes:
        process.start()

    def through_channel(value: dict[str, Any]) -> None:
        values.put(value)
        assert acks.take(timeout_s=60)[0].value == len(value)

    def through_pipe(value: dict[str, Any]) -> None:
        arrays = {key: item.numpy() if isinstance(item, torch.Tensor) else item for key, item in value.items()}
        handover_peers.send_pickled(near, arrays)
        assert near.recv() == len(value)

    def through_torch_queue(value: dict[str, Any]) -> None:
        # Fresh tensors: the queue moves a tensor's own memory into shared memory, and a second send would be free.
        torch_values.put({key: item.clone() if isinstance(item, torch.Tensor) else item for key, item in value.items()})
        assert torch_acks.get(timeout=60) == len(value)

    yield {"channel": through_channel, "pipe_pickle5": through_pipe, "torch_queue": through_torch_queue}
    values.close()
    handover_peers.send_pickled(near, None)
    torch_values.put(None)
    for process in processes:
        process.join(60)


def _seconds(function: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


@pytest.mark.parametrize("name", PAYLOADS)
def test_hand_over(benchmark: Any, hand_overs: dict[str, HandOver], name: str) -> None:
    make_value, num_rounds = PAYLOADS[name]
    value = make_value()
    times_s: dict[str, list[float]] = {transport: [] for transport in hand_overs}
    for round_index in range(_NUM_WARMUP + num_rounds):
        for transport, hand_over in hand_overs.items():
            spent_s = _seconds(lambda hand_over=hand_over: hand_over(value))
            if round_index >= _NUM_WARMUP:
                times_s[transport].append(spent_s)
    medians_s = {transport: statistics.median(times) for transport, times in times_s.items()}
    for transport, median_s in medians_s.items():
        benchmark.extra_info[f"{transport}_median_us"] = round(median_s * 1e6, 1)
        benchmark.extra_info[f"{transport}_over_channel"] = round(median_s / medians_s["channel"], 2)
    num_bytes = sum(item.nbytes for item in value.values() if isinstance(item, torch.Tensor))
    if num_bytes:
        benchmark.extra_info["copy_over_channel"] = round(_copy_seconds(num_bytes) / medians_s["channel"], 3)
    benchmark.pedantic(hand_overs["channel"], args=(value,), rounds=num_rounds, warmup_rounds=_NUM_WARMUP)


def _copy_seconds(num_bytes: int) -> float:
    """Median time of one warm memcpy."""
    source, target = np.ones(num_bytes, dtype=np.uint8), np.ones(num_bytes, dtype=np.uint8)
    return statistics.median(_seconds(lambda: np.copyto(target, source)) for _ in range(20))
