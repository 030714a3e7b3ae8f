"""Thousands of callers that talk nonsense: whatever listens serves the others as before, and nothing grows.

Streams of weights go over the links of peers, so what listens for them is a peer.
"""

import logging
import os
import random
import socket
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
import torch  # noqa: F401 - it grows by 120 MB where a changed value says that it is a tensor
from comm_callers import Called, disturb, nothing_grows
from comm_mutations import mutated

from rlinf_comm import Channel, ChannelServer, CommError, DecodeError, PeerLost, codec
from rlinf_comm.channel import native_of
from rlinf_comm.errors import TornStream
from rlinf_comm.peers import Peer
from rlinf_comm.peers.name_server import NameServer, ServedNames, _key, _Request
from rlinf_comm.peers.negotiation import ChosenMessage
from rlinf_comm.peers.transports.base import TransportOffer
from rlinf_comm.remote import server
from rlinf_comm.remote.messages import Flush, Put, Room, Stats, Take, compose
from rlinf_comm.wire import listener
from rlinf_comm.wire.deadline import Deadline
from rlinf_comm.wire.handshake import Hello, encode_hello
from rlinf_comm.wire.secret import key_for
from rlinf_comm.wire.values import Outbox

HANG_S = 60.0
FEW, MANY = 1000, 50_000
WARM_UP = 500
num_calls = pytest.mark.parametrize("num_calls", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])


def pack(*messages: msgspec.Struct) -> list[bytes]:
    return [msgspec.msgpack.encode(message) for message in messages]


def torn(values: list[codec.Encoded], numbers: random.Random) -> bytes:
    """What a member's stream may hold instead of a value: anything, a value whose bytes were changed, or, with check
    sums that are right, one that says something else."""
    value = numbers.choice(values)
    kind = numbers.randrange(3)
    if kind == 0:
        return numbers.randbytes(numbers.choice((1, 30, 60, 2000)))
    if kind == 1:
        return mutated(written(value), numbers)
    return written(codec.Encoded(mutated(value.header, numbers), value.buffers))


def written(encoded: codec.Encoded) -> bytes:
    """The bytes of a value's stream."""
    near, far = socket.socketpair()
    with near, far:
        outbox, data = Outbox(encoded), b""
        while outbox:
            outbox.write(near)
            data += far.recv(1 << 20)
    return data


class Counting(logging.Handler):
    """Counts lines and keeps none, so that what is measured is the listener."""

    num_lines = num_tracebacks = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_lines += 1
        self.num_tracebacks += record.exc_info is not None or "Traceback" in record.getMessage()


@pytest.fixture
def log(monkeypatch):
    """What listeners log; it goes nowhere else, since pytest would keep every line with all that it refers to."""
    counting, logger = Counting(), logging.Logger("listeners")
    logger.addHandler(counting)
    for module in (listener, server):
        monkeypatch.setattr(module, "_LOG", logger)
    yield counting
    assert not counting.num_tracebacks


@pytest.fixture(autouse=True)
def no_thread_fails(monkeypatch):
    failed = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: failed.append(repr(arguments.exc_value)))
    yield
    assert not failed, (len(failed), failed[:5])


@num_calls
def test_a_directory_bears_them(num_calls, log):
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = free.getsockname()
    served = NameServer(endpoint)
    rightful = _Request("swap", "engine/0", b"", b"claim"), _Request("get", "x"), _Request("list")
    called = Called(endpoint=endpoint, key=_key(), messages=pack(*rightful))
    disturb(called, WARM_UP, seed=10**6)
    with nothing_grows():
        counts = disturb(called, num_calls, seed=0)
    assert len(counts) == 6
    names = ServedNames.at(endpoint, Deadline(HANG_S))
    assert names.swap("a new name", b"", b"its claim") == b"its claim"
    names.close()
    served.close()
    assert log.num_lines, "somebody was turned away"


@num_calls
def test_a_peer_bears_them(num_calls, log):
    with (
        Peer.listen("trainer", transports=("tcp",)) as trainer,
        Peer.listen("engine", transports=("tcp",)) as engine,
        Peer.listen("rude", transports=("tcp",)) as rude,
    ):
        names = ("trainer", "somebody else")
        hellos = [encode_hello(Hello(service="peer", name=name, caller=rude.address)) for name in names]
        rightful = hellos + pack(
            TransportOffer("tcp", bytes(16)), TransportOffer("shared", bytes(16)), ChosenMessage("tcp")
        )
        key = key_for("peer", trainer.address.incarnation)
        called = Called(endpoint=trainer.address.endpoint, key=key, messages=rightful)
        disturb(called, WARM_UP, seed=10**6)
        with nothing_grows():
            disturb(called, num_calls, seed=0)
        engine.connect(trainer.address)
        engine.send("trainer", "weights", timeout_s=HANG_S)
        assert trainer.receive("engine", timeout_s=HANG_S) == "weights"
    assert log.num_lines, "somebody was turned away"


@num_calls
def test_a_link_between_peers_bears_torn_streams(num_calls, log):
    """A member that was met rightly and sends anything: its receiver is told, and takes the next one's values."""
    values = [codec.encode(value) for value in ({"a": [1, "text"]}, [np.arange(40.0), np.zeros(7)])]
    with Peer.listen("trainer", transports=("tcp",)) as trainer:

        def tear(seed: int) -> None:
            numbers = random.Random(seed)
            with Peer.listen("rude", transports=("tcp",)) as rude:
                rude.connect(trainer.address)
                outgoing: Any = rude._links.to("trainer", Deadline(HANG_S)).outgoing
                outgoing._socket.setblocking(True)
                outgoing._socket.sendall(torn(values, numbers) + written(values[0]))
            while True:
                try:
                    trainer.receive("rude", timeout_s=HANG_S)
                except (PeerLost, TornStream):
                    return  # the link has ended
                except DecodeError:
                    pass  # no value; there may be others

        for seed in range(30):
            tear(10**6 + seed)
        with nothing_grows():
            for seed in range(num_calls // 20):  # each takes as long as twenty calls
                tear(seed)
        with Peer.listen("engine", transports=("tcp",)) as engine:
            engine.connect(trainer.address)
            engine.send("trainer", "weights", timeout_s=HANG_S)
            assert trainer.receive("engine", timeout_s=HANG_S) == "weights"


@num_calls
def test_a_door_bears_them(num_calls, log):
    channel = Channel.create("items", lost_peers="tolerate")
    with ChannelServer(channel) as served, Peer.listen("rude") as rude:
        address = served.address.server
        callers = {"items": rude.address, "other": address}
        hellos = [Hello(service="channel", name=name, caller=caller) for name, caller in callers.items()]
        rightful = [encode_hello(hello) for hello in hellos]
        key = key_for("peer", address.incarnation)
        called = Called(endpoint=address.endpoint, key=key, messages=rightful)
        disturb(called, WARM_UP, seed=10**6)
        with nothing_grows():
            disturb(called, num_calls, seed=0)
        far = Channel.open(served.address)
        far.put("an item")
        assert channel.take(timeout_s=HANG_S)[0].value == "an item"
        far.close()
    assert log.num_lines, "somebody was turned away"


@num_calls
def test_a_door_bears_requests_that_are_none(num_calls, log):
    """Of members that have come in rightly. Those that end the channel are not among what is changed."""
    value = codec.encode({"a": [1, "text"], "b": np.arange(9.0)})
    requests = (Room(100), Flush(True), Stats(), Take(1, 1, 0.0, None, None, 0.0))
    messages = [compose(request) for request in requests]
    messages += [compose(Put(0, 1.0, -1, 0.0, answers), value) for answers in (True, False)]
    channel = Channel.create("items", capacity_items=4, lost_peers="tolerate")
    with ChannelServer(channel) as served:

        def ask(seed: int) -> None:
            numbers = random.Random(seed)
            far = Channel.open(served.address, timeout_s=HANG_S)
            back_end: Any = far._back_end
            line = back_end._put_exchange._lifeline._socket
            line.settimeout(HANG_S)
            line.sendall(torn(messages, numbers))
            line.shutdown(socket.SHUT_WR)
            try:
                while line.recv(1 << 16):
                    pass
            except ConnectionError:
                pass
            back_end._put_exchange.shut(farewell=False)
            while channel.stats().num_items:
                try:
                    channel.take(timeout_s=0.0)
                except CommError:
                    pass  # it was no value

        for seed in range(100):
            ask(10**6 + seed)
        with nothing_grows():
            for seed in range(num_calls):
                ask(seed)
        far = Channel.open(served.address)
        far.put("an item")
        assert channel.take(timeout_s=HANG_S)[0].value == "an item"
        far.close()


@num_calls
def test_the_server_of_segments_bears_them(num_calls):
    """The socket at which processes of this user get a channel's memory; what is asked there is 16 bytes."""
    channel = Channel.create("private")
    pid = os.getpid()
    with open("/proc/net/unix") as sockets:
        name = next(line.split()[-1] for line in sockets if f"@rlinf-comm/{pid}-" in line)
    _, _, fd, nonce = native_of(channel).address()
    rightful = fd.to_bytes(8, "little") + nonce.to_bytes(8, "little")

    def ask(seed: int) -> None:
        numbers = random.Random(seed)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(HANG_S)
            line.connect("\0" + name[1:])
            message = numbers.choice((numbers.randbytes(numbers.randrange(100)), mutated(rightful, numbers)))
            if message[8:16] == rightful[8:]:
                return  # who knows the nonce is given the segment
            try:
                if message:
                    line.send(message)
                line.shutdown(socket.SHUT_WR)
                _, fds, *_ = socket.recv_fds(line, 100, 4)
            except ConnectionError:
                return
            assert not fds, f"seed {seed}: a segment for {message!r}"

    for seed in range(WARM_UP):
        ask(10**6 + seed)
    with nothing_grows():
        for seed in range(num_calls):
            ask(seed)
    assert Channel.open(channel.address).name == "private"
