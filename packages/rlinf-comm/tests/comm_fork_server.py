"""Light processes for tests that need many: `python comm_fork_server.py [torch]` forks one for each line of its input.

A line is "ROLE ARGUMENTS", a packed tuple in hexadecimal; the reply is the child's pid. The fork server itself opens no
channel, and imports torch only on request, so that a fork takes a millisecond. Children exit like those of
multiprocessing's fork: they leave their channels and skip the interpreter's shutdown.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from rlinf_comm import _C, Channel, ChannelAddress, CommError, unpack

LARGEST_ITEM = 1 << 20


def _until_lost(report: Channel, role: str, call: Callable[[], Any]) -> None:
    """Repeats the call until it raises; reports the first success, and what it raised when."""
    try:
        if call() is not None:
            report.put((role, "started", [], "", time.monotonic()))
        while call() is not None:
            pass
    except CommError as error:
        report.put((role, type(error).__name__, list(getattr(error, "pids", ())), str(error), time.monotonic()))


def traffic_producer(address: ChannelAddress, reports: ChannelAddress, seed: int) -> None:
    """Puts 1 B to 1 MB at random, each full of one byte."""
    channel, report = Channel.open(address), Channel.open(reports)
    random = np.random.default_rng(seed)
    sizes = np.exp(random.uniform(0.0, np.log(LARGEST_ITEM), size=64)).astype(int)
    arrays = [np.full(max(size, 1), index, dtype=np.uint8) for index, size in enumerate(sizes.tolist())]

    def put() -> bool:
        channel.put(arrays[int(random.integers(64))], timeout_s=60)
        return True

    _until_lost(report, "producer", put)


def traffic_consumer(address: ChannelAddress, reports: ChannelAddress, seed: int) -> None:
    """Takes one to four at a time, looks at both ends of each, and keeps some for a while."""
    channel, report = Channel.open(address), Channel.open(reports)
    random = np.random.default_rng(seed)

    def take() -> bool:
        for item in channel.take(max_items=int(random.integers(1, 5)), timeout_s=60):
            assert item.value[0] == item.value[-1], f"item {item.sequence} is torn"
        return True

    _until_lost(report, "consumer", take)


def echo(there: ChannelAddress, back: ChannelAddress) -> None:
    outgoing = Channel.open(back)
    for value in Channel.open(there):
        outgoing.put(value)
    outgoing.close()


def wait_for_item(address: ChannelAddress, reports: ChannelAddress) -> None:
    channel = Channel.open(address)
    _until_lost(Channel.open(reports), "consumer", channel.take)


def put_and_wait(address: ChannelAddress, value: Any, does_close: bool) -> None:
    """One put, perhaps a close; then nothing until it is killed."""
    channel = Channel.open(address)
    channel.put(value)
    if does_close:
        channel.close()
    signal.pause()


def put_by_two_handles(address: ChannelAddress, reports: ChannelAddress, num_dropped: int) -> None:
    handles = [Channel.open(address), Channel.open(address)]
    for handle in handles:
        handle.put(0)
    del handle, handles[:num_dropped]
    Channel.open(reports).put("dropped")
    signal.pause()


def take_and_wait(address: ChannelAddress) -> None:
    items = Channel.open(address).take()
    signal.pause()
    del items


def sleep() -> None:
    signal.pause()


def put_and_return(address: ChannelAddress, value: Any) -> None:
    global held_channel
    held_channel = Channel.open(address)  # lives to the end of the process
    held_channel.put(value)


def put_and_raise(address: ChannelAddress, value: Any) -> None:
    put_and_return(address, value)
    raise RuntimeError("a mistake in the producer")


def publish(store: Any, plan: Any, reports: ChannelAddress) -> None:
    import torch

    from rlinf_comm.weights import StoreSender, WeightStore

    sender = StoreSender(WeightStore.open(store), plan, 0)
    weights = {name: torch.ones(buffer.shape) for name, buffer in plan.src_buffers[0].items()}
    report = Channel.open(reports)
    version = 0

    def step() -> bool:
        nonlocal version
        sender.publish(weights, version)
        version += 1
        return True

    _until_lost(report, "sender", step)


def receive(store: Any, plan: Any, reports: ChannelAddress) -> None:
    import torch

    from rlinf_comm.weights import StoreReceiver, WeightStore

    receiver = StoreReceiver(WeightStore.open(store), plan, 0)
    weights = {name: torch.zeros(buffer.shape) for name, buffer in plan.dst_buffers[0].items()}
    report = Channel.open(reports)
    version = 0

    def step() -> bool:
        nonlocal version
        receiver.receive(weights, version)
        version += 1
        return True

    _until_lost(report, "receiver", step)


def _run(role: str, arguments: tuple[Any, ...]) -> None:
    try:
        globals()[role](*arguments)
        _C.Channel.leave_all()
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
        _C.Channel.stay_in_all()
        os._exit(1)
    os._exit(0)


def main() -> None:
    if "torch" in sys.argv:
        import torch

        import rlinf_comm.peers
        import rlinf_comm.weights  # noqa: F401

        torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody stays behind as a zombie
    for line in sys.stdin:
        role, arguments = line.split()
        pid = os.fork()
        if pid == 0:
            _run(role, unpack(bytes.fromhex(arguments)))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
