"""Those who wait on a channel are told of a process that died without leaving it, and of no other."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from comm_fork_servers import HANG_S, ForkServer, is_running, kill, wait_until

from rlinf_comm import _C, Channel, ChannelTimeout, PeerLost, pack


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


def _take_all(channel: Channel, num_items: int) -> None:
    for _ in range(num_items):
        channel.take(timeout_s=HANG_S)


def _take_in_moments(channel: Channel) -> None:
    """Each is shorter than the time between two looks."""
    for _ in range(10_000):
        with contextlib.suppress(ChannelTimeout):
            channel.take(timeout_s=0.005)


WAITS: dict[str, Callable[[Channel], object]] = {
    "take": lambda channel: channel.take(timeout_s=HANG_S),
    "take_without_limit": lambda channel: channel.take(),
    "short_takes": _take_in_moments,
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_waiting_take_is_told_of_a_dead_producer(fork_server, wait):
    channel = Channel.create("told")
    pid = fork_server.start("put_and_wait", channel.address, 1, False)
    _take_all(channel, 1)
    killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(
        PeerLost, match=rf"'told': take of 1 items.*process {pid} \(producer\) died.*drop_lost_peers"
    ) as lost:
        wait(channel)
    assert lost.value.pids == (pid,)


def test_a_waiting_put_is_told_of_a_dead_consumer(fork_server):
    channel, reports = Channel.create("told", capacity_items=1), Channel.create("reports", lost_peers="tolerate")
    pid = fork_server.start("wait_for_item", channel.address, reports.address)
    channel.put(0, timeout_s=HANG_S)
    wait_until(lambda: channel.stats().num_taken == 1)
    kill(pid)
    channel.put(2, timeout_s=HANG_S)  # need not wait
    with pytest.raises(PeerLost, match=rf"put of \d+ bytes.*process {pid} \(consumer\)"):
        channel.put(3, timeout_s=HANG_S)


def test_what_need_not_wait_goes_on_after_a_loss(fork_server):
    channel = Channel.create("rest")
    kill(_with_one_put(fork_server, channel))
    channel.put("mine")
    assert [item.value for item in channel.take(max_items=9)] == [1, "mine"]
    with pytest.raises(PeerLost):
        channel.take(timeout_s=HANG_S)


def _with_one_put(fork_server: ForkServer, channel: Channel, does_close: bool = False) -> int:
    before = channel.stats().num_put
    pid = fork_server.start("put_and_wait", channel.address, 1, does_close)
    wait_until(lambda: channel.stats().num_put > before and channel.stats().num_closed >= does_close)
    return pid


def test_dropping_the_lost_goes_on_with_the_rest(fork_server):
    channel = Channel.create("dropped", num_producers=2)
    lost = [_with_one_put(fork_server, channel) for _ in range(2)]
    alive = _with_one_put(fork_server, channel)
    for pid in lost:
        kill(pid)
    _take_all(channel, 3)
    with pytest.raises(PeerLost) as error:
        channel.take(timeout_s=HANG_S)
    assert sorted(error.value.pids) == sorted(lost)
    assert sorted(channel.drop_lost_peers()) == sorted(lost)
    assert channel.drop_lost_peers() == []
    with pytest.raises(ChannelTimeout):
        channel.take(timeout_s=0.25)
    kill(alive)
    with pytest.raises(PeerLost, match=str(alive)):
        channel.take(timeout_s=HANG_S)


def test_dropping_the_lost_gives_their_memory_back(fork_server):
    channel = Channel.create("memory", capacity_bytes=100_000)
    pid = fork_server.start("take_and_wait", channel.address)
    channel.put(np.zeros(90_000, dtype=np.uint8))
    wait_until(lambda: channel.stats().num_held_items == 1 and channel.stats().num_taken == 1)
    kill(pid)
    assert channel.drop_lost_peers() == [pid]
    assert channel.stats().num_held_items == 0


def test_tolerating_waits_on(fork_server):
    channel = Channel.create("tolerated", lost_peers="tolerate")
    kill(_with_one_put(fork_server, channel))
    _take_all(channel, 1)
    with pytest.raises(ChannelTimeout):
        channel.take(timeout_s=0.3)
    assert channel.drop_lost_peers() == []


def test_another_policy_is_refused():
    with pytest.raises(ValueError, match="lost_peers='ignore'; 'raise' or 'tolerate'"):
        Channel.create("refused", lost_peers="ignore")  # type: ignore[arg-type]


# --- who has left -----------------------------------------------------------------------------------------------------


def test_a_producer_that_closed_may_die(fork_server):
    channel = Channel.create("closed", num_producers=2)
    kill(_with_one_put(fork_server, channel, does_close=True))
    _take_all(channel, 1)
    with pytest.raises(ChannelTimeout):
        channel.take(timeout_s=0.3)


def test_a_process_that_ended_regularly_has_left(fork_server):
    channel = Channel.create("ended")
    pid = fork_server.start("put_and_return", channel.address, 1)
    _take_all(channel, 1)
    wait_until(lambda: not is_running(pid))
    with pytest.raises(ChannelTimeout):
        channel.take(timeout_s=0.3)


CHILD = """
import multiprocessing, os, sys
from rlinf_comm import Channel, unpack
channel = Channel.open(unpack(bytes.fromhex(sys.argv[1])))  # in a global, which nobody collects before the end
def work():
    channel.put(1)
    {ending}
if __name__ == "__main__":
    if {method!r} == "none":
        work()
    else:
        child = multiprocessing.get_context({method!r}).Process(target=work)
        child.start()
        child.join()
"""
ENDINGS = {
    "returns": ("pass", False),
    "exits": ("sys.exit(0)", False),
    "raises": ("raise RuntimeError('a mistake')", True),
    "leaves": ("channel.leave(); os._exit(0)", False),
    "_exit": ("os._exit(0)", True),
}


@pytest.mark.parametrize("method", ["none", "fork", "spawn"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_how_a_process_ends_tells_whether_it_is_missed(tmp_path, method, ending):
    channel = Channel.create("end")
    statement, is_missed = ENDINGS[ending]
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(ending=statement, method=method))
    command = [sys.executable, str(script), pack(channel.address).hex()]
    subprocess.run(command, timeout=HANG_S, capture_output=True, check=False)
    _take_all(channel, 1)
    with pytest.raises(PeerLost if is_missed else ChannelTimeout):
        channel.take(timeout_s=0.3)


@pytest.mark.parametrize("num_dropped", [1, 2])
def test_a_process_leaves_with_its_last_channel_object(fork_server, num_dropped):
    channel, reports = Channel.create("handles"), Channel.create("reports")
    pid = fork_server.start("put_by_two_handles", channel.address, reports.address, num_dropped)
    _take_all(channel, 2)
    _take_all(reports, 1)
    kill(pid)
    with pytest.raises(PeerLost if num_dropped < 2 else ChannelTimeout):
        channel.take(timeout_s=0.3)


# --- looking whether a process is alive -------------------------------------------------------------------------------


def test_looking_at_processes_that_come_and_go_keeps_no_descriptors(fork_server):
    pids = []
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        pid = fork_server.start("sleep")
        start_ticks = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        for _ in range(100):
            assert _C.is_alive(pid, start_ticks)
        assert not _C.is_alive(pid, start_ticks + 1)
        pids.append((pid, start_ticks))
        os.kill(pid, signal.SIGKILL)
    for pid, start_ticks in pids:
        wait_until(lambda pid=pid: not is_running(pid))
        assert not _C.is_alive(pid, start_ticks)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
