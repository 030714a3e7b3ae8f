"""Whose turn a bucket is, between two real processes; the device's events are a fake's, which notes order and flags."""

import multiprocessing
import os
import signal
import threading

import pytest

from rlinf_comm.errors import ChannelTimeout, IpcError, PeerLost
from rlinf_comm.ipc import BucketReader, BucketWriter
from rlinf_comm.testing.fake_driver import FakeDriver

SPAWN = multiprocessing.get_context("spawn")


def reader_process(connection, address, is_killed):
    driver = FakeDriver()
    reader = BucketReader(address, device=0, driver=driver)
    driver.words = reader._words
    connection.send("attached")
    for _ in range(2):
        reader.receive(0, stream=7, timeout_s=30)
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        reader.acknowledge(0, stream=8)
    connection.send((driver.calls, reader._ready, reader._consumed))
    connection.recv()


def start_reader(writer, is_killed=False):
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=reader_process, args=(there, writer.address, is_killed))
    child.start()
    there.close()
    assert here.recv() == "attached"
    return child, here


def test_events_are_recorded_before_the_flag_and_waited_for_after_it():
    """The fake notes the flags (published, acknowledged) at each call."""
    driver = FakeDriver()
    writer = BucketWriter(1, device=0, driver=driver)
    driver.words = writer._words
    child, pipe = start_reader(writer)
    for _ in range(2):
        assert writer.acquire(0, stream=3, timeout_s=30)
        writer.publish(0, stream=4)
    assert writer.acquire(0, stream=3, timeout_s=30)
    calls, ready, consumed = pipe.recv()
    pipe.send("done")
    child.join(30)
    assert driver.calls == [
        ("record_event", ready[0], 4, 0, 0),
        ("wait_for_event", consumed[0], 3, 1, 1),
        ("record_event", ready[0], 4, 1, 1),
        ("wait_for_event", consumed[0], 3, 2, 2),
    ]
    assert calls == [
        ("wait_for_event", ready[0], 7, 1, 0),
        ("record_event", consumed[0], 8, 1, 0),
        ("wait_for_event", ready[0], 7, 2, 1),
        ("record_event", consumed[0], 8, 2, 1),
    ]


def test_a_bucket_in_use_is_not_given_out_and_the_wait_ends():
    writer = BucketWriter(2, device=0, driver=FakeDriver())
    writer.publish(1, stream=0)
    with pytest.raises(
        ChannelTimeout, match=r"acknowledgement of bucket 1 by process \(none attached\).* within 0.1 s"
    ):
        writer.acquire(1, stream=0, timeout_s=0.1)
    with pytest.raises(ValueError, match="bucket 1 is published already"):
        writer.publish(1, stream=0)
    assert writer.acquire(0, stream=0, timeout_s=0.1)
    with pytest.raises(ValueError, match=r"bucket=2, the buckets are 0..1"):
        writer.publish(2, stream=0)
    with pytest.raises(IpcError, match="the writer is this process"):
        BucketReader(writer.address, device=0, driver=FakeDriver())


def test_a_dead_reader_s_bucket_is_reclaimed_and_its_event_not_waited_for():
    driver = FakeDriver()
    writer = BucketWriter(1, device=0, driver=driver)
    child, _ = start_reader(writer, is_killed=True)
    writer.publish(0, stream=0)
    child.join(30)
    assert writer.acquire(0, stream=0, timeout_s=30) is False
    writer.publish(0, stream=0)  # the bucket is free
    assert "wait_for_event" not in [call[0] for call in driver.calls]
    next_child, pipe = start_reader(writer)
    assert writer.acquire(0, stream=5, timeout_s=30) is True
    writer.publish(0, stream=0)
    pipe.recv()
    pipe.send("done")
    next_child.join(30)


def write_and_die(connection):
    writer = BucketWriter(1, device=0, driver=FakeDriver())
    connection.send(writer.address)
    connection.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_reader_is_told_of_a_dead_writer():
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=write_and_die, args=(there,))
    child.start()
    address = here.recv()
    reader = BucketReader(address, device=0, driver=FakeDriver())
    killer = threading.Timer(0.3, here.send, ("die",))
    killer.start()
    with pytest.raises(PeerLost, match=rf"process {child.pid} died before it published bucket 0"):
        reader.receive(0, stream=0, timeout_s=30)
    child.join(30)
    with pytest.raises(PeerLost, match="the leases of process"):
        BucketReader(address, device=0, driver=FakeDriver())
