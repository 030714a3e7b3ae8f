"""rlinf_comm.peers between processes: what a killed, a closed and a returned peer look like from the other side."""

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rlinf_comm import PeerLost, PeerTimeout, pack
from rlinf_comm.peers import Peer
from rlinf_comm.testing import assert_bitwise_equal

SCRIPT = pathlib.Path(__file__).with_name("comm_named_peers.py")
HANG_S = 60.0
IN_TIME_S = 10.0
"""Two seconds are promised; the machine of a test may be busy."""


class ForkServer:
    """Starts processes that have a peer."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        assert self.process.stdout.readline() == "ready\n"
        self.pids: list[int] = []

    def start(self, role: str, *arguments: object) -> int:
        assert self.process.stdout is not None and self.process.stdin is not None
        self.process.stdin.write(f"{role} {pack(arguments).hex()}\n")
        self.pids.append(int(self.process.stdout.readline()))
        return self.pids[-1]


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it had ended


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    new_fork_server = ForkServer()
    yield new_fork_server
    for pid in new_fork_server.pids:
        kill(pid)
    new_fork_server.process.communicate(timeout=HANG_S)


@pytest.fixture
def me() -> Iterator[Peer]:
    with Peer.listen("parent") as peer:
        yield peer


def visit(fork_server: ForkServer, me: Peer, transport: str, name: str) -> None:
    fork_server.start("connect_and_go", name, me.address, transport)
    while True:
        try:
            assert me.receive(name, timeout_s=HANG_S) == name
            return
        except PeerLost:
            continue  # of the visitor before


def settled_descriptors(fork_server: ForkServer, me: Peer, transport: str) -> int:
    """Each new link sweeps those of peers that have ended."""
    counts = []
    for _ in range(4):
        visit(fork_server, me, transport, "last visitor")
        time.sleep(0.05)
        counts.append(len(os.listdir("/proc/self/fd")))
    return min(counts)


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_values_go_there_and_back(fork_server, me, transport):
    fork_server.start("echo", "echo", me.address, transport)
    values = [0, {"w": np.arange(40.0).reshape(5, 8).T}, np.zeros((0, 3)), [np.arange(5_000_000)], "text"]
    for value in values:
        me.send("echo", value, timeout_s=HANG_S)
        assert_bitwise_equal(me.receive("echo", timeout_s=HANG_S), value)
    assert me.transport_to("echo").name == transport


def test_the_fastest_transport_is_taken_and_the_others_are_named(fork_server, me):
    fork_server.start("echo", "near", me.address, "shared")
    me.wait_for("near", timeout_s=HANG_S)
    chosen = me.transport_to("near", timeout_s=HANG_S)
    assert chosen.name == "shared"
    assert chosen.refused == ()
    fork_server.start("echo", "far", me.address, "tcp")
    me.wait_for("far", timeout_s=HANG_S)
    chosen = me.transport_to("far", timeout_s=HANG_S)
    assert chosen.name == "tcp"
    assert chosen.refused == (("shared", "'far' allows tcp only"),)


# --- death ------------------------------------------------------------------------------------------------------------


def meet_and_kill(fork_server: ForkServer, me: Peer, name: str, transport: str, random: np.random.Generator) -> float:
    """Seconds from the kill to the last of the two errors."""
    pid = fork_server.start("traffic", name, me.address, transport)
    kill_at_s = None
    index = 0
    killed_s = 0.0
    while True:
        try:
            number, array = me.receive(name, timeout_s=HANG_S)
        except PeerLost:
            break
        assert number == index, "a value is missing"
        assert_bitwise_equal(array, expected(index))
        index += 1
        if kill_at_s is None:
            kill_at_s = time.monotonic() + float(random.uniform(0.0, 0.1))
        if not killed_s and time.monotonic() >= kill_at_s:
            kill(pid)
            killed_s = time.monotonic()
        if not killed_s and random.random() < 0.5:
            me.send(name, expected(index), timeout_s=HANG_S)
    assert killed_s, "the peer was lost before it was killed"
    with pytest.raises(PeerLost, match=name):
        [me.send(name, b"", timeout_s=HANG_S) for _ in range(100_000)]
    return time.monotonic() - killed_s


def expected(index: int) -> np.ndarray:
    num_bytes = (index * 7919) % 30_000 + (1_500_000 if index % 20 == 19 else 0)
    return np.full(num_bytes, index % 251, dtype=np.uint8)


def kill_many(fork_server: ForkServer, me: Peer, transport: str, num_kills: int) -> None:
    random = np.random.default_rng(num_kills)
    meet_and_kill(fork_server, me, "victim", transport, random)  # whatever is made once is made
    before = settled_descriptors(fork_server, me, transport)
    slowest_s = max(meet_and_kill(fork_server, me, "victim", transport, random) for _ in range(num_kills))
    print(f"{transport}: {num_kills} kills, the slowest noticed after {slowest_s:.2f} s")
    assert slowest_s < IN_TIME_S
    pid = fork_server.start("echo", "victim", me.address, transport)
    me.wait_for("victim", timeout_s=HANG_S)
    me.send("victim", np.arange(1000), timeout_s=HANG_S)
    assert_bitwise_equal(me.receive("victim", timeout_s=HANG_S), np.arange(1000))
    kill(pid)
    with pytest.raises(PeerLost):
        me.receive("victim", timeout_s=HANG_S)
    with pytest.raises(PeerLost):
        [me.send("victim", 0, timeout_s=HANG_S) for _ in range(100_000)]
    assert settled_descriptors(fork_server, me, transport) <= before + 3


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_peer_killed_at_random_is_noticed_and_its_name_works_again(fork_server, me, transport):
    kill_many(fork_server, me, transport, 6)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_hundred_random_kills(fork_server, me, transport):
    kill_many(fork_server, me, transport, 100)


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_stopped_peer_is_slow_and_not_lost(fork_server, me, transport):
    pid = fork_server.start("echo", "stopped", me.address, transport)
    me.wait_for("stopped", timeout_s=HANG_S)
    me.send("stopped", 1, timeout_s=HANG_S)
    assert me.receive("stopped", timeout_s=HANG_S) == 1
    os.kill(pid, signal.SIGSTOP)
    me.send("stopped", 2, timeout_s=HANG_S)
    with pytest.raises(PeerTimeout, match=rf"receive from 'stopped' .*timeout_s=0.4.*process {pid} on this host"):
        me.receive("stopped", timeout_s=0.4)
    os.kill(pid, signal.SIGCONT)
    assert me.receive("stopped", timeout_s=HANG_S) == 2


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_forked_child_does_not_hide_the_death_of_its_parent(fork_server, me, transport):
    pid = fork_server.start("fork_and_wait", "forker", me.address, transport)
    child = me.receive("forker", timeout_s=HANG_S)
    kill(pid)
    killed_s = time.monotonic()
    with pytest.raises(PeerLost, match="forker"):
        me.receive("forker", timeout_s=HANG_S)
    assert time.monotonic() - killed_s < IN_TIME_S
    kill(child)


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_many_connections_leave_no_descriptor(fork_server, me, transport):
    before = settled_descriptors(fork_server, me, transport)
    for index in range(30):
        visit(fork_server, me, transport, f"visitor {index}")
    assert settled_descriptors(fork_server, me, transport) <= before + 3


def test_a_tensor_in_a_pool_crosses_by_reference(fork_server, me):
    """Also when it is much larger than the link's capacity. What is in no pool is copied."""
    import torch

    from rlinf_comm import SharedPool

    fork_server.start("halve", "halver", me.address, "shared")
    pool = SharedPool.create("values", capacity_bytes=512 << 20)
    tensor = pool.empty((128, 1 << 20))
    tensor[5, ::1000] = 3.0
    for view in (tensor, tensor[4:6].T):
        me.send("halver", {"w": view}, timeout_s=HANG_S)
        (back,) = me.receive("halver", timeout_s=HANG_S)
        assert back.data_ptr() == view.data_ptr() and back.stride() == view.stride()
    assert tensor[5, ::1000].eq(0.75).all() and tensor[:5, 0].eq(0).all()
    large, strided = torch.ones(20 << 20), torch.arange(40.0).reshape(5, 8).T
    me.send("halver", {"w": large, "strided": strided, "scalar": torch.ones(())}, timeout_s=HANG_S)
    halves = me.receive("halver", timeout_s=HANG_S)
    assert halves[0].eq(0.5).all() and large.eq(1).all()
    assert_bitwise_equal(halves[1:], [strided * 0.5, torch.tensor(0.5)])
