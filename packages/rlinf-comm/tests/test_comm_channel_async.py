"""The asynchronous forms of put and take: the same contract, without a thread for each call."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest
import torch

from rlinf_comm import Channel, ChannelAborted, ChannelStalled, ChannelTimeout, UnsupportedValueError

HANG_S = 60.0


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, HANG_S))


def doorbells() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "rlinf-comm doorbell"}


def test_tasks_of_one_loop_feed_each_other():
    channel = Channel.create("loop", capacity_items=2)

    async def produce():
        for index in range(200):
            await channel.aput((index, torch.full((10,), index)))
        channel.close()

    async def consume():
        return [(index, int(tensor[3])) async for index, tensor in channel]

    async def both():
        _, found = await asyncio.gather(produce(), consume())
        return found

    assert run(both()) == [(index, index) for index in range(200)]


def test_an_item_from_another_thread_wakes_the_task_that_waits_for_its_key():
    channel = Channel.create("keys")

    async def wait_for_both():
        waiting = [asyncio.create_task(channel.atake(keys=[key], timeout_s=HANG_S)) for key in (1, 2)]
        await asyncio.sleep(0.02)
        await asyncio.to_thread(lambda: [channel.put(f"for {key}", key=key) for key in (2, 1)])
        return [(await task)[0].value for task in waiting]

    assert run(wait_for_both()) == ["for 1", "for 2"]


def test_many_waiting_tasks_share_one_thread_that_ends_when_they_do(monkeypatch):
    monkeypatch.setattr("rlinf_comm._doorbell._NUM_IDLE_SLICES", 1)
    channel = Channel.create("threads")
    before = doorbells()  # those of earlier tests end when they like

    async def wait_in_many():
        tasks = [asyncio.create_task(channel.atake(timeout_s=HANG_S)) for _ in range(50)]
        await asyncio.sleep(0.05)
        assert len(doorbells() - before) == 1
        for index in range(50):
            channel.put(index)
        return sorted([(await task)[0].value for task in tasks])

    assert run(wait_in_many()) == list(range(50))
    deadline = time.monotonic() + HANG_S
    while doorbells() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not doorbells() - before


def test_cancelling_a_take_loses_no_item():
    channel = Channel.create("cancelled")

    async def cancel_many():
        for index in range(100):
            task = asyncio.create_task(channel.atake())
            await asyncio.sleep(0)
            await asyncio.to_thread(channel.put, index)
            task.cancel()
            try:
                (item,) = await task
            except asyncio.CancelledError:
                (item,) = await channel.atake(timeout_s=HANG_S)
            assert item.value == index

    run(cancel_many())


def test_waits_end_with_the_errors_of_the_blocking_forms():
    channel = Channel.create("errors", capacity_items=1)

    async def fail_in_every_way():
        with pytest.raises(ChannelTimeout, match=r"take of 1 items not done within timeout_s=0\.02"):
            await channel.atake(timeout_s=0.02)
        await channel.aput(0)
        with pytest.raises(ChannelTimeout, match=r"put of \d+ bytes with key 3 not done within timeout_s=0\.02"):
            await channel.aput(1, key=3, timeout_s=0.02)
        with pytest.raises(UnsupportedValueError, match="scorer: a function"):
            await channel.aput({"scorer": len})
        with pytest.raises(ValueError, match="max_items=0"):
            await channel.atake(max_items=0)
        blocked = asyncio.create_task(channel.aput(1))
        with pytest.raises(ChannelStalled):
            await channel.atake(max_items=2, min_items=2)
        await asyncio.to_thread(channel.abort, "enough")
        with pytest.raises(ChannelAborted, match="enough"):
            await blocked

    run(fail_in_every_way())


def test_the_loop_runs_on_while_a_task_waits():
    channel = Channel.create("free")

    async def count():
        task = asyncio.create_task(channel.atake())
        for _ in range(100):
            await asyncio.sleep(0)
        is_waiting = not task.done()
        channel.put(None)
        await task
        return is_waiting

    assert run(count())


@pytest.mark.parametrize(
    "wait", ["threading.Thread(target=channel.take, daemon=True).start()", "asyncio.run(cancelled())"]
)
def test_a_process_may_end_while_a_thread_waits(wait):
    """A daemon thread inside take(), and the one that waits on behalf of asyncio tasks."""
    program = (
        "import asyncio, threading, time\n"
        "from rlinf_comm import Channel\n"
        "channel = Channel.create('waited for')\n"
        "async def cancelled():\n"
        "    task = asyncio.create_task(channel.atake())\n"
        "    await asyncio.sleep(0.05)\n"
        "    task.cancel()\n"
        f"{wait}\n"
        "time.sleep(0.05)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
