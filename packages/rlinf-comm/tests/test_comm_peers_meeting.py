"""How peers of rlinf_comm.peers meet: who is let in, which transport is taken, and what a broken stream looks like."""

import dataclasses
import os
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlinf_comm import (
    DecodeError,
    NoTransport,
    PeerLeft,
    PeerLost,
    PeerNameTaken,
    PeerTimeout,
    pack,
    unpack,
)
from rlinf_comm.peers import HostIdentity, Peer
from rlinf_comm.wire.deadline import SLICE_S
from rlinf_comm.wire.handshake import GREETING, MAGIC, VERSION

HANG_S = 20.0


@pytest.fixture
def pair():
    """make(transports) -> two peers that know each other"""
    peers = []

    def make(*transports, **options):
        a, b = (Peer.listen(name, transports=transports or None, **options) for name in "ab")
        peers.extend((a, b))
        a.connect(b.address, timeout_s=HANG_S)
        return a, b

    yield make
    for peer in peers:
        peer.close()


# --- who is let in ----------------------------------------------------------------------------------------------------


def test_a_caller_without_the_key_is_turned_away(pair):
    a, b = pair("tcp")
    with pytest.raises(PeerLost, match=r"is gone, or of another job: .*proven"):
        a.connect(dataclasses.replace(b.address, name="b2", incarnation=bytes(16)), timeout_s=HANG_S)
    with socket.create_connection(b.address.endpoint) as stranger:
        stranger.sendall(GREETING.pack(MAGIC, VERSION, bytes(16)) + bytes(32))
        received = b""
        while more := stranger.recv(1000):
            received += more
    assert len(received) == GREETING.size, "the peer said more than a greeting to somebody who has proven nothing"
    a.send("b", "still here", timeout_s=HANG_S)
    assert b.receive("a", timeout_s=HANG_S) == "still here"


def answer_once(greeting: bytes, after: bytes) -> tuple[str, int]:
    """The endpoint of a server that answers one call so."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connected, _ = server.accept()
        with server, connected:
            connected.sendall(greeting)
            connected.recv(GREETING.size, socket.MSG_WAITALL)
            connected.recv(32, socket.MSG_WAITALL)
            connected.sendall(after)

    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()[:2]


@pytest.mark.parametrize(
    ("greeting", "after", "expected", "text"),
    [
        (GREETING.pack(MAGIC, VERSION + 1, bytes(16)), b"", DecodeError, f"version {VERSION + 1} .* version {VERSION}"),
        (
            GREETING.pack(MAGIC, VERSION, bytes(16)),
            bytes(32),
            PeerLost,
            "'c' .* is gone, or of .*: it does not know the secret",
        ),
        (b"HTTP/1.1 400 Bad Request", b"", PeerLost, "something else is there, which starts with b'HTTP/1'"),
    ],
    ids=["version", "secret", "http"],
)
def test_another_version_and_another_process_on_the_port_are_named(pair, greeting, after, expected, text):
    a, b = pair("tcp")
    endpoint = answer_once(greeting, after)
    with pytest.raises(expected, match=text):
        a.connect(dataclasses.replace(b.address, name="c", endpoint=endpoint), timeout_s=HANG_S)


def test_one_that_accepts_and_says_nothing_is_slow(pair):
    a, b = pair("tcp")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = dataclasses.replace(b.address, name="silent", endpoint=silent.getsockname()[:2])
        with pytest.raises(PeerTimeout, match=r"'silent' .* has sent nothing for 0.3 s"):
            a.connect(address, timeout_s=0.3)


def test_a_living_name_is_refused_and_a_dead_one_is_free(pair):
    a, b = pair("tcp")
    b.send("a", 1, timeout_s=HANG_S)
    with Peer.listen("b", transports=("tcp",)) as second, pytest.raises(PeerNameTaken, match=f"process {os.getpid()}"):
        second.connect(a.address, timeout_s=HANG_S)
    with Peer.listen("a", transports=("tcp",)) as same, pytest.raises(PeerNameTaken, match="'a' refuses 'a'"):
        same.connect(a.address, timeout_s=HANG_S)
    b._end(farewell=False)
    with Peer.listen("b", transports=("tcp",)) as third:
        third.connect(a.address, timeout_s=HANG_S)
        third.send("a", 2, timeout_s=HANG_S)
        assert a.receive("b", timeout_s=HANG_S) == 1
        with pytest.raises(PeerLost):
            a.receive("b", timeout_s=HANG_S)
        assert a.receive("b", timeout_s=HANG_S) == 2


def test_a_receive_after_the_end_was_told_waits_for_the_next_of_that_name(pair):
    """Also when that one takes longer than the looks at the old address are apart."""
    a, b = pair("tcp")
    b.send("a", 1, timeout_s=HANG_S)
    assert a.receive("b", timeout_s=HANG_S) == 1
    b._end(farewell=False)
    with pytest.raises(PeerLost):
        a.receive("b", timeout_s=HANG_S)
    with pytest.raises(PeerTimeout, match=r"'b' \(.*\) has ended, and no other has come"):
        a.receive("b", timeout_s=3 * SLICE_S)
    with Peer.listen("b", transports=("tcp",)) as late:
        late.connect(a.address, timeout_s=HANG_S)
        late.send("a", 2)
        assert a.receive("b", timeout_s=HANG_S) == 2


def test_all_receives_that_wait_are_told_of_an_end(pair):
    a, b = pair("tcp")
    b.send("a", 1, timeout_s=HANG_S)
    assert a.receive("b", timeout_s=HANG_S) == 1
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(a.receive, "b", timeout_s=HANG_S) for _ in range(3)]
        time.sleep(SLICE_S)  # for all of them to wait
        b._end(farewell=False)
        assert [type(each.exception(HANG_S)) for each in waiting] == [PeerLost] * 3


def test_the_end_of_a_link_that_is_polled_is_seen_at_once(pair):
    a, b = pair("tcp")
    a.send("b", 1, timeout_s=HANG_S)
    assert b.receive("a", timeout_s=HANG_S) == 1
    time.sleep(2 * SLICE_S)  # b reads ahead by now
    b._inboxes["a"].close(farewell=False)
    with pytest.raises(PeerLost, match="without a farewell"):
        a._links.get("b").outgoing.check()


def test_an_address_crosses_and_a_peer_does_not(pair):
    a, b = pair()
    assert unpack(pack(b.address)) == b.address
    with pytest.raises(TypeError, match=r"peer\.address"):
        pickle.dumps(a)


def test_a_peer_does_not_work_in_a_forked_child(pair):
    a, b = pair("tcp")
    a.send("b", 1, timeout_s=HANG_S)
    pid = os.fork()
    if pid == 0:
        try:
            a.send("b", "from the child", timeout_s=1.0)
        except ValueError as error:
            os._exit(0 if f"belongs to process {os.getppid()}" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    a.send("b", 2, timeout_s=HANG_S)
    assert [b.receive("a", timeout_s=HANG_S) for _ in range(2)] == [1, 2]


# --- which transport --------------------------------------------------------------------------------------------------


def test_transports_of_both_sides_are_respected(monkeypatch):
    with Peer.listen("a") as a, Peer.listen("b", transports=("tcp",)) as b:
        chosen = a.connect(b.address, timeout_s=HANG_S)
        assert chosen.name == "tcp"
        assert "not shared: 'b' allows tcp only" in str(chosen)
        with Peer.listen("c", transports=("shared",)) as c, pytest.raises(NoTransport, match="shared: 'b' allows tcp"):
            c.connect(b.address, timeout_s=HANG_S)
        monkeypatch.setenv("RLINF_COMM_TRANSPORTS", "tcp")
        with Peer.listen("d") as d:
            assert d.connect(a.address, timeout_s=HANG_S).name == "tcp"
        with pytest.raises(ValueError, match="no transport is left"):
            Peer.listen("e", transports=("shared",))
        monkeypatch.setenv("RLINF_COMM_TRANSPORTS", "shm")
        with pytest.raises(ValueError, match="RLINF_COMM_TRANSPORTS=shm: no transport 'shm'; allowed: shared, tcp"):
            Peer.listen("e")
    with pytest.raises(ValueError, match=r"transports=\('tcp',\)"):
        Peer.listen("f", transports="tcp")


def test_other_hosts_and_network_namespaces_do_not_share_memory():
    here = HostIdentity(boot_id="aaaaaaaa-1", network_namespace=1, pid_namespace=1)
    assert here.difference_to(dataclasses.replace(here, pid_namespace=2)) is None
    assert "another network namespace (2, here 1)" in str(
        dataclasses.replace(here).difference_to(dataclasses.replace(here, network_namespace=2))
    )
    assert "another host (boot id bbbbbbbb, here aaaaaaaa)" in str(
        here.difference_to(dataclasses.replace(here, boot_id="bbbbbbbb-1"))
    )


def test_a_shared_memory_probe_that_fails_falls_back_to_tcp(monkeypatch):
    from rlinf_comm import Channel

    def refuse(address):
        raise PeerLost("the segment server does not answer")

    with Peer.listen("a", transports=("shared", "tcp")) as a, Peer.listen("b", transports=("shared", "tcp")) as b:
        monkeypatch.setattr(Channel, "open", refuse)
        chosen = a.connect(b.address, timeout_s=HANG_S)
        assert chosen.name == "tcp"
        assert "cannot be opened: the segment server does not answer" in chosen.refused[0][1]
        a.send("b", 1, timeout_s=HANG_S)
        assert b.receive("a", timeout_s=HANG_S) == 1


def test_ipv6():
    try:
        a = Peer.listen("a", host="::1", transports=("tcp",))
    except OSError:
        pytest.skip("no IPv6 here")
    with a, Peer.listen("b", transports=("tcp",)) as b:
        assert b.connect(a.address, timeout_s=HANG_S).name == "tcp"


# --- broken streams ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flipped", [0, 9, 25, 40])
def test_a_torn_tcp_stream_is_an_error_and_the_next_link_works(pair, flipped, monkeypatch):
    a, b = pair("tcp")
    a.send("b", 1, timeout_s=HANG_S)
    link = a._links.get("b").outgoing
    real = link._socket

    class Flipping:
        def sendmsg(self, pieces):
            data = bytearray(b"".join(pieces))
            data[min(flipped, len(data) - 1)] ^= 4
            return real.sendmsg([data])

    monkeypatch.setattr(link, "_socket", Flipping())
    a.send("b", {"x": np.arange(100)}, timeout_s=HANG_S)
    assert b.receive("a", timeout_s=HANG_S) == 1
    with pytest.raises(DecodeError, match="from 'a': the stream of values is torn"):
        b.receive("a", timeout_s=HANG_S)
    with pytest.raises(PeerLost, match="'b'"):
        [a.send("b", 2, timeout_s=HANG_S) for _ in range(100_000)]
    a.send("b", 3, timeout_s=HANG_S)
    assert b.receive("a", timeout_s=HANG_S) == 3


def test_a_torn_sequence_of_parts_is_an_error_and_the_next_link_works(pair):
    a, b = pair("shared")
    channel = a._links.get("b").outgoing._channel
    channel.put([np.zeros(4, np.uint8)], key=2)  # a part of nothing
    with pytest.raises(DecodeError, match="out of turn"):
        b.receive("a", timeout_s=HANG_S)
    with pytest.raises(PeerLost):
        [a.send("b", 2, timeout_s=HANG_S) for _ in range(100_000)]
    a.send("b", 3, timeout_s=HANG_S)
    assert b.receive("a", timeout_s=HANG_S) == 3
    channel = a._links.get("b").outgoing._channel
    channel.put([5], key=1)
    channel.put([np.zeros(6, np.uint8)], key=2)  # more than announced
    with pytest.raises(DecodeError, match="a part of 6 bytes where 5 are left"):
        b.receive("a", timeout_s=HANG_S)


# --- new addresses, the end --------------------------------------------------------------------------------------


def test_connecting_to_a_new_address_of_a_name_goes_there(pair):
    a, b = pair("tcp")
    b._end(farewell=False)
    with Peer.listen("b", transports=("tcp",)) as new:
        a.connect(new.address, timeout_s=HANG_S)
        a.send("b", 1, timeout_s=HANG_S)
        assert new.receive("a", timeout_s=HANG_S) == 1


def test_a_closed_peer_says_so(pair):
    a, b = pair("shared")
    a.send("b", 1, timeout_s=HANG_S)
    a.close()
    with pytest.raises(PeerLeft, match="peer 'a' has been closed by this process"):
        a.send("b", 2, timeout_s=HANG_S)
    with pytest.raises(PeerLeft, match="peer 'a' has been closed"):
        a.receive("b", timeout_s=HANG_S)
    assert b.receive("a", timeout_s=HANG_S) == 1


def test_wrong_arguments_are_named(pair):
    a, _ = pair()
    for call, text in (
        (lambda: a.send("b", 1, timeout_s=-1.0), "timeout_s=-1.0"),
        (lambda: Peer.listen(""), "name=''"),
        (lambda: Peer.listen("x", host="0.0.0.0"), "no address that others can call"),
        (lambda: Peer.listen("x", capacity_bytes=10), "capacity_bytes=10; at least 65536"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
