"""Segments and how peers get them: from their creator's server, of the same user, and not after its end."""

import array
import gc
import os
import socket
import stat
import struct
import subprocess
import sys
import threading

import pytest

from rlinf_comm import _C, Channel, PeerLost, pack

HANG_S = 60.0


def server_name(pid: int, start_ticks: int, nonce: int) -> str:
    return f"\0rlinf-comm/{pid}-{start_ticks}-{nonce >> 32:08x}"


def ask(address: tuple[int, int, int, int]) -> tuple[int, list[int]]:
    """The protocol, written down a second time: (answer, descriptors)."""
    pid, start_ticks, fd, nonce = address
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(HANG_S)
        client.connect(server_name(pid, start_ticks, nonce))
        client.send(struct.pack("=ixxxxQ", fd, nonce))
        message, descriptors, *_ = socket.recv_fds(client, 4, 1)
    return struct.unpack("=i", message)[0], descriptors


def test_a_segment_is_private_to_its_user_and_cannot_change_its_size():
    segment = _C.Segment.create("private", 10_000)
    answer, (fd,) = ask(segment.address())
    assert answer == 0
    status = os.fstat(fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    for num_bytes in (0, status.st_size + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, num_bytes)
    os.close(fd)


def test_requests_for_what_is_not_there_get_no_descriptor():
    segment = _C.Segment.create("asked", 100)
    pid, start_ticks, fd, nonce = segment.address()
    assert ask((pid, start_ticks, 999_999, nonce)) == (1, [])
    assert ask((pid, start_ticks, fd, nonce ^ 1)) == (2, [])
    del segment
    gc.collect()
    assert ask((pid, start_ticks, fd, nonce)) == (1, [])


def test_rude_clients_do_not_keep_others_waiting():
    segment = _C.Segment.create("rude", 100)
    pid, start_ticks, _, nonce = segment.address()
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for client, request in zip(silent, (b"short", b"x" * 1000), strict=True):
        client.connect(server_name(pid, start_ticks, nonce))
        client.send(request)
        client.close()
    assert _C.Segment.open(segment.address()).num_bytes == 100


def test_many_processes_and_threads_open_at_once():
    channel = Channel.create("crowd", num_producers=4)
    program = (
        "import sys\n"
        "from rlinf_comm import Channel, unpack\n"
        "channel = Channel.open(unpack(bytes.fromhex(sys.argv[1])))\n"
        "channel.put('here')\n"
        "channel.close()\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, pack(channel.address).hex()]) for _ in range(4)]
    opened: list[Channel] = []
    threads = [threading.Thread(target=lambda: opened.append(Channel.open(channel.address))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert len(opened) == 20
    assert list(channel) == ["here"] * 4
    assert [process.wait(HANG_S) for process in processes] == [0] * 4


def test_a_forked_child_serves_its_own_segments_under_its_own_name():
    parent = Channel.create("parent")
    pid = os.fork()
    if pid == 0:
        try:
            own = Channel.create("child")
            own.put("from the child")
            assert Channel.open(own.address).take()[0].value == "from the child"
            Channel.open(parent.address).put(own.address)
            parent.take(keys=[1])
        finally:
            os._exit(0)
    (item,) = parent.take(timeout_s=HANG_S)
    assert item.value.creator_pid == pid
    child = Channel.open(item.value)
    parent.put("seen", key=1)
    os.waitpid(pid, 0)
    assert child.stats().num_put == 1
    with pytest.raises(PeerLost, match=f"process {pid} that created"):
        Channel.open(item.value)


def test_opening_and_closing_leaves_no_descriptor():
    segment = _C.Segment.create("flat", 100)
    _C.Segment.open(segment.address())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        _C.Segment.open(segment.address())
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the server may be closing the last connection
    assert array.array("B", memoryview(segment)).tobytes() == bytes(100)
