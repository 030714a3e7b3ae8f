"""rlinf_comm.channel between processes, and what happens when one of them is killed."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from rlinf_comm import Channel, ChannelTimeout, PeerLost
from rlinf_comm.testing import assert_bitwise_equal

HANG_S = 60.0


def test_values_go_there_and_back(start_peer):
    there, back = Channel.create("there"), Channel.create("back")
    values = [1, "two", (3.0, None), {"t": torch.arange(100_000), "a": np.zeros((0, 3))}, [torch.ones(3).bfloat16()]]
    with start_peer("echo", there.address, back.address) as peer:
        for value in values:
            there.put(value)
        there.close()
        for value in values:
            assert_bitwise_equal(back.take(timeout_s=HANG_S)[0].value, value)
        assert back.take(timeout_s=HANG_S) == []
        peer.join()


def test_several_producers_and_consumers(start_peer):
    num_producers, num_items = 3, 60
    work = Channel.create("work", capacity_items=8, capacity_bytes=100_000, num_producers=num_producers)
    reports = Channel.create("found", num_producers=2)
    producers = [start_peer("produce", work.address, index, num_items, wait=False) for index in range(num_producers)]
    consumers = [start_peer("consume", work.address, reports.address, wait=False) for _ in range(2)]
    seen = []
    while items := reports.take(timeout_s=HANG_S):
        seen += [item.value for item in items]
    for peer in producers + consumers:
        with peer:
            peer.join()
    assert all(intact for _, _, intact, _ in seen)
    by_sequence = sorted(seen, key=lambda entry: entry[3])
    assert [sequence for *_, sequence in by_sequence] == list(range(num_producers * num_items))
    for producer in range(num_producers):
        assert [index for who, index, *_ in by_sequence if who == producer] == list(range(num_items))
    stats = work.stats()
    assert (stats.num_items, stats.num_held_items, stats.num_bytes) == (0, 0, 0)


def test_classes_of_another_main_script_are_refused(start_peer):
    """`__main__` means each process's own main script: here pytest's, which has no Tag."""
    channel = Channel.create("main")
    with start_peer("send_main_class", channel.address, wait=False) as peer:
        with pytest.raises(Exception, match=r"'main', item 0: no class is registered as '__main__:Tag'"):
            channel.take(timeout_s=HANG_S)
        peer.join()


def test_main_classes_cross_between_a_script_and_its_spawned_child(tmp_path):
    """multiprocessing's spawn knows the parent's main module as __mp_main__."""
    script = tmp_path / "script.py"
    script.write_text(
        "import dataclasses, multiprocessing\n"
        "from rlinf_comm import Channel, record\n"
        "@record\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Job:\n"
        "    number: int\n"
        "def work(jobs, results):\n"
        "    out = Channel.open(results)\n"
        "    for job in Channel.open(jobs):\n"
        "        assert type(job) is Job and Job.__module__ == '__mp_main__'\n"
        "        out.put(Job(job.number + 1))\n"
        "    out.close()\n"
        "if __name__ == '__main__':\n"
        "    jobs, results = Channel.create('jobs'), Channel.create('results')\n"
        "    child = multiprocessing.get_context('spawn').Process(target=work, args=(jobs.address, results.address))\n"
        "    child.start()\n"
        "    jobs.put(Job(1)); jobs.close()\n"
        "    assert list(results) == [Job(2)]\n"
        "    child.join()\n"
        "    assert child.exitcode == 0\n"
    )
    subprocess.run([sys.executable, str(script)], check=True, timeout=HANG_S)


# --- death ------------------------------------------------------------------------------------------------------------


def test_a_process_killed_with_the_mutex_hangs_nobody(start_peer):
    channel = Channel.create("mutex")
    for index in range(3):
        channel.put(np.full(1000, index), key=index)
    with start_peer("hold_mutex", channel.address) as peer:
        waiting = threading.Thread(target=channel.put, args=("from a thread",))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        peer.process.send_signal(signal.SIGKILL)
        waiting.join(HANG_S)
        assert not waiting.is_alive()
    items = channel.take(max_items=4, min_items=4, timeout_s=HANG_S)
    assert [item.sequence for item in items] == [0, 1, 2, 3]
    assert [item.key for item in items] == [0, 1, 2, 0]
    assert (items[2].value == 2).all()


@pytest.mark.parametrize("lost_peers", ["raise", "tolerate"])
def test_memory_of_a_producer_killed_inside_put_comes_back(start_peer, lost_peers):
    """Also before the put that needs it says that somebody died."""
    channel = Channel.create("reserved", capacity_bytes=100_000, lost_peers=lost_peers)
    with start_peer("hold_reservation", channel.address, 90_000):
        assert channel.stats().num_held_items == 1
        with pytest.raises(ChannelTimeout):
            channel.put(np.zeros(50_000, dtype=np.uint8), timeout_s=0.25)
    channel.put(np.zeros(50_000, dtype=np.uint8), timeout_s=HANG_S)
    assert channel.stats().num_held_items == 0


def test_a_close_does_not_wait_for_a_dead_producers_item(start_peer):
    channel = Channel.create("closed", num_producers=1, lost_peers="tolerate")
    with start_peer("hold_reservation", channel.address, 1000):
        channel.close()
        with pytest.raises(ChannelTimeout):  # the item may still come
            channel.take(timeout_s=0.01)
    assert channel.take(timeout_s=HANG_S) == []


def test_memory_of_a_killed_consumer_comes_back(start_peer):
    channel = Channel.create("taken", capacity_bytes=100_000, lost_peers="tolerate")
    channel.put(np.zeros(90_000, dtype=np.uint8))
    with start_peer("hold_taken", channel.address):
        assert channel.stats().num_held_bytes > 90_000
    channel.put(np.zeros(90_000, dtype=np.uint8))
    with pytest.raises(ChannelTimeout):
        channel.put(np.zeros(90_000, dtype=np.uint8), timeout_s=0.25)  # looks for the dead while it waits
    assert channel.stats().num_held_bytes == 0


def test_processes_killed_at_random_leave_the_channel_in_order(start_peer):
    channel = Channel.create("churn", capacity_items=16, capacity_bytes=200_000, lost_peers="tolerate")
    complaints = Channel.create("complaints")
    random = np.random.default_rng(1)
    survivors = [start_peer("churn", channel.address, complaints.address, seed) for seed in range(2)]
    for seed in range(2, 6):
        with start_peer("churn", channel.address, complaints.address, seed) as victim:
            time.sleep(float(random.uniform(0.0, 0.03)))
            victim.process.send_signal(signal.SIGKILL)
    for peer in survivors:
        assert peer.process.poll() is None, peer.process.stderr.read()
        with peer:
            pass
    drained = 0
    while channel.stats().num_items:
        for item in channel.take(max_items=16, timeout_s=HANG_S):
            assert len(set(item.value.tolist())) == 1
            drained += 1
        del item
    assert drained <= 16
    assert complaints.stats().num_items == 0
    gc.collect()
    # All of it can be filled and taken again: nothing is lost, nothing counted twice.
    for _ in range(3):
        for index in range(16):
            channel.put(np.full(1500, index), timeout_s=HANG_S)
        with pytest.raises(ChannelTimeout):
            channel.put(0, timeout_s=0.15)
        items = channel.take(max_items=16, min_items=16, timeout_s=HANG_S)
        assert [int(item.value[0]) for item in items] == list(range(16))
        del items
    assert channel.stats().num_held_items == 0


def test_nothing_is_left_of_a_channel_whose_processes_died(start_peer):
    report = Channel.create("report")
    with start_peer("create_and_die", report.address, wait=False) as peer:
        (item,) = report.take(timeout_s=HANG_S)
        peer.process.wait(HANG_S)
        with pytest.raises(PeerLost, match=f"process {item.value.creator_pid} that created"):
            Channel.open(item.value)
    assert not [name for name in os.listdir("/dev/shm") if "short-lived" in name]


def test_a_zombie_counts_as_dead(start_peer):
    report = Channel.create("report")
    with start_peer("create_and_die", report.address, wait=False):
        (item,) = report.take(timeout_s=HANG_S)
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:  # killed, but not yet waited for
            try:
                Channel.open(item.value)
            except PeerLost:
                break
        else:
            pytest.fail("the address of a dead process can still be opened")


# --- signals and forks ------------------------------------------------------------------------------------------------


def test_a_process_may_end_while_a_thread_of_it_waits():
    program = (
        "import threading, time\n"
        "from rlinf_comm import Channel\n"
        "channel = Channel.create('waited for')\n"
        "threading.Thread(target=channel.take, daemon=True).start()\n"
        "time.sleep(0.05)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("role", ["wait_for_item", "wait_for_room"])
def test_ctrl_c_ends_a_wait(role, start_peer):
    channel = Channel.create("interrupted", capacity_items=1)
    if role == "wait_for_room":
        channel.put(0)
    with start_peer(role, channel.address) as peer:
        time.sleep(0.1)
        peer.process.send_signal(signal.SIGINT)
        _, text = peer.process.communicate(timeout=HANG_S)
        assert "KeyboardInterrupt" in text
        assert peer.process.returncode != 0
    assert channel.stats().num_held_items == 0


def test_a_forked_child_uses_the_channel_and_frees_nothing_of_its_parent():
    channel = Channel.create("forked")
    channel.put(torch.ones(10_000))
    tensor = channel.take()[0].value
    pid = os.fork()
    if pid == 0:
        try:
            ok = bool(tensor.eq(1).all())
            del tensor
            gc.collect()
            channel.put(ok)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert channel.stats().num_held_items == 1
    assert channel.take(timeout_s=HANG_S)[0].value is True
    assert tensor.eq(1).all()
