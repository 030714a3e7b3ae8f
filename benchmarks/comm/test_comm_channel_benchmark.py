"""Items per second through one channel, two producing and two consuming processes, and the round trip of 4 KB.

    pytest benchmarks/comm/test_comm_channel_benchmark.py --benchmark-json=channel.json

Items of 1 KB. The channel, multiprocessing.Queue and torch.multiprocessing's queue are measured in turn within one run,
round by round, so that a busy machine is busy for all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from typing import Any

import pytest
import torch
import torch.multiprocessing
from benchmarks.comm import channel_peers

from rlinf_comm import Channel

NUM_SIDES = 2
NUM_ITEMS = {"channel": 60_000, "multiprocessing": 10_000, "torch": 1_000}
"""Side -> items that each producer sends, which takes about a second."""
NUM_ROUNDS = 3
NUM_ROUND_TRIPS = 2000


def items_per_second(transport: str, kind: str, max_items: int) -> float:
    """One measurement with fresh processes; they start the clock together."""
    context = torch.multiprocessing.get_context("spawn")
    num_items = NUM_ITEMS[transport]
    start, times = context.Barrier(2 * NUM_SIDES), context.SimpleQueue()
    if transport == "channel":
        channel = Channel.create("items", num_producers=NUM_SIDES)
        producer = (channel_peers.produce, (channel.address, kind, num_items, start, times))
        consumer = (channel_peers.consume, (channel.address, max_items, start, times))
    else:
        queue = (context if transport == "torch" else multiprocessing.get_context("spawn")).Queue(4096)
        plain = "array" if transport == "multiprocessing" and kind == "tensor" else kind
        producer = (channel_peers.produce_into_queue, (queue, plain, num_items, start, times))
        consumer = (channel_peers.consume_from_queue, (queue, num_items, start, times))
    producers = [context.Process(target=producer[0], args=producer[1]) for _ in range(NUM_SIDES)]
    consumers = [context.Process(target=consumer[0], args=consumer[1]) for _ in range(NUM_SIDES)]
    for process in producers + consumers:
        process.start()
    intervals = [times.get() for _ in producers + consumers]
    for process in producers + consumers:
        process.join()
    assert all(process.exitcode == 0 for process in producers + consumers)
    return NUM_SIDES * num_items / (max(end_s for _, end_s in intervals) - min(start_s for start_s, _ in intervals))


def measure_throughput(kind: str, max_items: int, num_rounds: int = NUM_ROUNDS) -> dict[str, list[float]]:
    """Items per second of each transport, one figure for each round."""
    rates: dict[str, list[float]] = {transport: [] for transport in NUM_ITEMS}
    for _ in range(num_rounds):
        for transport in NUM_ITEMS:
            rates[transport].append(items_per_second(transport, kind, max_items))
    return rates


def measure_round_trips(num_rounds: int = NUM_ROUND_TRIPS) -> dict[str, list[float]]:
    """Microseconds there and back with a 4 KB tensor, in turn through a channel and torch's queue."""
    context = torch.multiprocessing.get_context("spawn")
    there, back = Channel.create("there"), Channel.create("back")
    queues = context.Queue(), context.Queue()
    processes = [
        context.Process(target=channel_peers.echo, args=(there.address, back.address)),
        context.Process(target=channel_peers.echo_queue, args=queues),
    ]
    for process in processes:
        process.start()
    value = {"t": torch.ones(1024)}
    round_trips_us: dict[str, list[float]] = {"channel": [], "torch": []}
    for index in range(num_rounds + 200):
        start_s = time.perf_counter()
        there.put(value)
        back.take()
        round_trips_us["channel"].append((time.perf_counter() - start_s) * 1e6)
        if index % 10 == 0:
            fresh = {"t": torch.ones(1024)}  # a tensor that was sent once stays shared, and goes for free
            start_s = time.perf_counter()
            queues[0].put(fresh)
            queues[1].get()
            round_trips_us["torch"].append((time.perf_counter() - start_s) * 1e6)
    there.close()
    queues[0].put(None)
    for process in processes:
        process.join()
    return {"channel": round_trips_us["channel"][200:], "torch": round_trips_us["torch"][20:]}


@pytest.mark.parametrize("max_items", [64, 1])
@pytest.mark.parametrize("kind", ["tensor", "bytes"])
def test_items_per_second(benchmark: Any, kind: str, max_items: int) -> None:
    throughputs = measure_throughput(kind, max_items)
    medians = {transport: statistics.median(rates) for transport, rates in throughputs.items()}
    for transport, rates in throughputs.items():
        benchmark.extra_info[f"{transport}_items_per_s"] = round(medians[transport])
        benchmark.extra_info[f"{transport}_best_items_per_s"] = round(max(rates))
        benchmark.extra_info[f"channel_over_{transport}"] = round(medians["channel"] / medians[transport], 1)
    benchmark.pedantic(items_per_second, args=("channel", kind, max_items), rounds=1)


@pytest.mark.parametrize("num_cores", [2, 1])
def test_round_trip_of_4_kb(benchmark: Any, num_cores: int) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:num_cores]))  # children inherit it
    try:
        round_trips_us = measure_round_trips()
    finally:
        os.sched_setaffinity(0, before)
    for transport, times_us in round_trips_us.items():
        benchmark.extra_info[f"{transport}_median_us"] = round(statistics.median(times_us), 1)
        benchmark.extra_info[f"{transport}_best_us"] = round(min(times_us), 1)
    ratio = statistics.median(round_trips_us["torch"]) / statistics.median(round_trips_us["channel"])
    benchmark.extra_info["torch_over_channel"] = round(ratio, 1)
    benchmark.pedantic(lambda: None, rounds=1)
