"""rlinf_comm.SharedPool between processes: hand-over by reference, and what comes back from those that die."""

import gc
import itertools
import os
import random
import signal
import stat
import threading
import time

import pytest
import torch
from comm_peers import Tag
from comm_pool_forks import Fork, churn, die_between_take_and_decode, hold, hold_mutex, hold_own

from rlinf_comm import Channel, PeerLost, PoolFull, SharedPool

HANG_S = 60.0
CAPACITY = 1 << 20


@pytest.fixture
def start(start_peer):
    return lambda role, *arguments, **options: start_peer(role, *arguments, script="comm_pool_peers.py", **options)


@pytest.fixture
def channel():
    return Channel.create("carrier")


@pytest.fixture
def pool():
    return SharedPool.create("tested", capacity_bytes=CAPACITY)


def _mapped(name):
    with open("/proc/self/maps") as maps:
        return sum(f"rlinf:{name} " in line for line in maps)


def kill(peer):
    peer.process.send_signal(signal.SIGKILL)
    peer.process.wait(HANG_S)


def open_until_lost(address):
    """Creators of pools without a tensor here are looked at every 0.1 s."""
    deadline_s = time.monotonic() + HANG_S
    while time.monotonic() < deadline_s:
        SharedPool.open(address)
        time.sleep(0.01)


def assert_all_room_comes_back(pool):
    gc.collect()
    whole = pool.empty(CAPACITY, torch.uint8, timeout_s=HANG_S)
    assert whole.numel() == CAPACITY
    del whole
    assert pool.stats().num_holds == 0


def test_three_processes_see_the_same_memory(start, pool):
    """Here -> second -> third -> here: each adds one to all that it was given."""
    channels = [Channel.create(name) for name in ("first", "second", "third")]
    for source, target in itertools.pairwise(channels):
        start("add_one", source.address, target.address)
    whole = pool.empty((4, 6)).zero_()
    for view in (whole, whole[1:3].t(), whole[0, 0]):
        channels[0].put(view)
    channels[0].close()
    back = [item.value for item in channels[2].take(max_items=3, min_items=3, timeout_s=HANG_S)]
    expected = torch.full((4, 6), 2.0)
    expected[1:3] += 2
    expected[0, 0] += 2
    assert whole.equal(expected)
    assert back[1].equal(expected[1:3].t()) and back[1].data_ptr() == whole[1:3].data_ptr()
    del whole, view
    gc.collect()
    assert back[0].equal(expected)
    assert pool.stats().num_blocks == 1
    del back
    assert_all_room_comes_back(pool)


def test_a_block_goes_with_the_last_tensor_of_the_last_process(pool):
    channel = Channel.create("held")
    channel.put(pool.empty(CAPACITY, torch.uint8))
    gc.collect()
    peer = Fork(hold, channel)
    assert pool.stats().held_bytes == {peer.pid: CAPACITY}
    with pytest.raises(PoolFull, match=f"process {peer.pid} holds {CAPACITY} bytes"):
        pool.empty(1, timeout_s=0.25)
    peer.kill()
    assert_all_room_comes_back(pool)


def test_a_waiting_allocation_gets_what_a_killed_process_held(pool):
    peer = Fork(hold_own, pool, CAPACITY)
    killer = threading.Timer(0.3, peer.kill)
    killer.start()
    start_s = time.monotonic()
    assert pool.empty(CAPACITY, torch.uint8, timeout_s=HANG_S).numel() == CAPACITY
    assert time.monotonic() - start_s > 0.2
    killer.join()


def test_a_process_killed_with_the_mutex_hangs_nobody(pool):
    tensor = pool.empty(100).fill_(3)
    peer = Fork(hold_mutex, pool)
    peer.kill()
    assert pool.empty(10).numel() == 10
    assert pool.stats().num_blocks == 1 and tensor.eq(3).all()


def test_a_consumer_killed_between_take_and_decode_leaks_nothing(pool):
    channel = Channel.create("lost")
    peer = Fork(die_between_take_and_decode, channel)
    channel.put((Tag("a class, so that the header names one"), pool.empty(CAPACITY, torch.uint8)))
    assert peer.wait() == -signal.SIGKILL
    assert_all_room_comes_back(pool)


def test_what_a_process_has_put_before_its_end_arrives(start, pool):
    channel = Channel.create("posthumous")
    with start("put_one", pool.address, channel.address, wait=False) as peer:
        pid = peer.process.pid
        peer.join()
    with pytest.raises(PoolFull):  # looking for the dead does not take it for lost
        pool.empty(CAPACITY, torch.uint8, timeout_s=0.15)
    assert pool.stats().in_flight_bytes == {pid: 8000}
    assert channel.take(timeout_s=HANG_S)[0].value.tolist() == [pid] * 1000
    assert_all_room_comes_back(pool)


def test_a_pool_whose_creator_died_keeps_what_others_look_at(start):
    channel = Channel.create("orphans")
    with start("create_and_put", channel.address, 3) as peer:
        first = channel.take(timeout_s=HANG_S)[0].value
        kill(peer)
        assert first.eq(0).all()
        second = channel.take(timeout_s=HANG_S)[0].value  # this process has the pool mapped
        assert second.eq(1).all()
        del first, second
        gc.collect()
        address = channel.take(max_items=2, min_items=2, timeout_s=HANG_S)[1].value
        with pytest.raises(PeerLost, match=f"pool 'short-lived': the process {peer.process.pid}"):
            open_until_lost(address)
    assert _mapped("short-lived") == 0


def test_an_item_whose_pool_died_with_its_creator_is_a_lost_peer(start):
    channel = Channel.create("orphans")
    with start("create_and_put", channel.address, 1) as peer:
        kill(peer)
        with pytest.raises(
            PeerLost, match=rf"channel 'orphans', item 0: a tensor in the pool 'short-lived': .*{peer.process.pid}"
        ):
            channel.take(timeout_s=HANG_S)


def _descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def _resident_kb(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def test_ten_thousand_hand_overs_leave_everything_flat(start, pool):
    there, back = Channel.create("there"), Channel.create("back")
    with start("acknowledge", there.address, back.address) as peer:

        def hand_over(num_times):
            for index in range(num_times):
                tensor = pool.empty((16, 16)).fill_(index)
                there.put({0: tensor}.get(0))
                del tensor
                assert back.take(timeout_s=HANG_S)[0].value == [16, 16]
            gc.collect()
            pids = (os.getpid(), peer.process.pid)
            return [_descriptors(pid) for pid in pids], [_resident_kb(pid) for pid in pids]

        hand_over(250)
        for _ in range(100):  # the last acknowledgement may come before the peer's tensor has gone
            if pool.stats().num_holds == 0:
                break
            time.sleep(0.01)
        descriptors, resident_kb = hand_over(250)  # after stats(), which opens a pidfd of each holder
        later_descriptors, later_resident_kb = hand_over(10_000)
        # One for each peer whose life is watched may come after the first 500.
        assert all(after <= before + 2 for before, after in zip(descriptors, later_descriptors, strict=True))
        assert all(after - before < 1000 for before, after in zip(resident_kb, later_resident_kb, strict=True))
        assert_all_room_comes_back(pool)


def test_processes_allocate_and_hand_over_at_once(pool):
    there, back = Channel.create("there"), Channel.create("back")
    peers = [Fork(churn, pool, there, back, 1, 4000), Fork(churn, pool, back, there, 2, 4000)]
    assert [peer.wait() for peer in peers] == [0, 0]
    for channel in (there, back):
        while items := channel.take(timeout_s=HANG_S):
            tensor, number = items[0].value
            assert tensor.eq(number).all()
            del tensor, items
    assert_all_room_comes_back(pool)


@pytest.mark.parametrize("num_kills", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_processes_killed_at_random_leave_the_pool_in_order(num_kills, pool):
    there, back = Channel.create("there", num_producers=1 << 20), Channel.create("back", num_producers=1 << 20)
    survivor = Fork(churn, pool, there, back, -1, -1)
    numbers = random.Random(1)
    for seed in range(num_kills):
        victim = Fork(churn, pool, back, there, seed, -1)
        time.sleep(numbers.uniform(0.0, 0.02))
        victim.kill()
    time.sleep(0.1)
    assert survivor.is_running()
    survivor.kill()
    for channel in (there, back):
        while channel.stats().num_items:
            tensor, number = channel.take(timeout_s=HANG_S)[0].value
            assert tensor.eq(number).all()
            del tensor
    assert_all_room_comes_back(pool)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_memory_is_private_and_goes_with_its_last_user(channel):
    pool = SharedPool.create("mapped once", capacity_bytes=CAPACITY)
    fd = pool.address.fd
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    tensor = pool.empty(10).fill_(4)
    assert SharedPool.open(pool.address).empty(10).data_ptr() and _mapped("mapped once") == 1
    del pool
    gc.collect()
    assert _mapped("mapped once") == 1 and tensor.eq(4).all()
    channel.put(tensor)
    del tensor
    gc.collect()
    tensor = channel.take(timeout_s=HANG_S)[0].value  # the pool stayed for what was on its way
    assert tensor.eq(4).all()
    del tensor
    gc.collect()
    assert _mapped("mapped once") == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_prefault_takes_the_memory_at_once():
    def rss():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssShmem"))

    before = rss()
    pool = SharedPool.create("prefaulted", capacity_bytes=16 << 20, prefault=True)
    assert rss() - before >= 16 << 10
    before = rss()
    pool.empty(16 << 20, torch.uint8).fill_(1)
    assert rss() - before < 100


def test_a_forked_child_ends_no_hold_of_its_parent(pool, channel):
    tensor = pool.empty(1000).fill_(1)
    pid = os.fork()
    if pid == 0:
        try:
            channel.put(tensor)  # lives for as long as its parent's
            del tensor
            gc.collect()
            channel.put(pool.empty(10).fill_(2))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert pool.stats().num_blocks == 2
    assert channel.take(timeout_s=HANG_S)[0].value.data_ptr() == tensor.data_ptr()
    assert channel.take(timeout_s=HANG_S)[0].value.eq(2).all()  # its sender is gone, the item was not
    gc.collect()
    assert pool.stats().num_blocks == 1 and tensor.eq(1).all()
