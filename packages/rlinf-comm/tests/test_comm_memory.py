"""copy_into, memory taken ahead, and that neither memory nor descriptors grow."""

import gc
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from rlinf_comm import Channel, copy_into

HANG_S = 60.0


@pytest.mark.parametrize("num_elements", [0, 1, 1000, (1 << 20) + 3, (3 << 20) + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.complex64])
def test_copy_into_copies_every_byte_and_nothing_else(num_elements, dtype):
    source = torch.randint(0, 100, (num_elements + 5,)).to(dtype)[5:]
    memory = torch.full((num_elements + 2,), 7).to(dtype)
    copy_into(memory[1:-1], source)
    assert memory[1:-1].equal(source)
    assert memory[0] == memory[-1] == 7


def test_the_environment_decides_how_large_copies_are_stored():
    program = (
        "import torch; from rlinf_comm import copy_into; source = torch.randint(0, 99, (3 << 20,))\n"
        "for _ in range(9): copy_into(found := torch.zeros_like(source), source); assert found.equal(source)"
    )
    for word, code, text in (
        ("cached", 0, ""),
        ("streaming", 0, ""),
        ("fast", 1, "allowed: measured, cached, streaming"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"RLINF_COMM_STORES": word},
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_S,
        )
        assert done.returncode == code and text in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("destination", "source", "message"),
    [
        (torch.zeros(3), torch.zeros(4), "they must agree"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int32), "they must agree"),
        (torch.zeros(3, 2).T, torch.zeros(2, 3), "destination must be a contiguous"),
        (torch.zeros(2, 3), torch.zeros(3, 2).T, "source must be a contiguous"),
        (torch.zeros(3), torch.zeros(3, device="meta"), "source must be a contiguous CPU tensor.*meta"),
        (torch.zeros(3, requires_grad=True) * 2, torch.zeros(3), "differentiated"),
    ],
)
def test_copy_into_refuses_what_it_would_get_wrong(destination, source, message):
    with pytest.raises(ValueError, match=message):
        copy_into(destination, source)


def test_copy_into_refuses_overlap():
    memory = torch.arange(10)
    with pytest.raises(ValueError, match="share memory"):
        copy_into(memory[1:9], memory[:8])
    copy_into(memory[5:], memory[:5])
    assert memory.tolist() == [0, 1, 2, 3, 4] * 2


def resident_bytes(name: str) -> int:
    total = 0
    with open("/proc/self/smaps") as lines:
        inside = False
        for line in lines:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                inside = f"rlinf:{name}" in line
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def test_memory_can_be_taken_ahead():
    lazy = Channel.create("on demand", capacity_bytes=8 << 20)
    eager = Channel.create("ahead", capacity_bytes=8 << 20, prefault=True)
    assert resident_bytes("on demand") < 1 << 20
    assert 8 << 20 <= resident_bytes("ahead") < 10 << 20
    del lazy, eager


def own_memory_bytes() -> int:
    with open("/proc/self/statm") as text:
        return int(text.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_ten_thousand_hand_overs_leave_memory_and_descriptors_flat(start_peer):
    there, back = Channel.create("there", capacity_bytes=1 << 20), Channel.create("back", capacity_bytes=1 << 20)
    values = [None, torch.zeros(10), torch.zeros(4000), {"a": np.zeros(3000), "t": (torch.ones(2, 3), "text")}]

    def hand_over(count):
        for index in range(count):
            there.put(values[index % len(values)])
            back.take(timeout_s=HANG_S)
        gc.collect()
        return len(os.listdir("/proc/self/fd")), own_memory_bytes()

    with start_peer("echo", there.address, back.address):
        hand_over(2000)
        before = hand_over(2000)
        after = hand_over(10_000)
    assert after[0] == before[0]
    assert after[1] - before[1] < 4 << 20
    assert back.stats().num_held_items == 0


def test_a_peer_killed_at_a_random_point_leaves_no_descriptor_and_its_memory_comes_back(start_peer):
    random = np.random.default_rng(3)
    channel = Channel.create("victims", capacity_items=8, capacity_bytes=1 << 20)
    reports = Channel.create("found")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(6):
        victim = start_peer("churn", channel.address, reports.address, int(random.integers(100)))
        time.sleep(float(random.uniform(0.0, 0.02)))
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait(HANG_S)
        victim.process.stdout.close()
        victim.process.stderr.close()
        while channel.stats().num_items:
            channel.take(max_items=8, timeout_s=HANG_S)
        for index in range(8):  # the whole capacity, though the victim may have held any part of it
            channel.put(np.full(16_000, index), timeout_s=2.0)
        items = channel.take(max_items=8, min_items=8, timeout_s=2.0)
        assert [int(item.value[-1]) for item in items] == list(range(8))
        del items
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert reports.stats().num_items == 0
