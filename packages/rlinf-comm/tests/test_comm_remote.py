"""Channels through a door: what a channel of this host promises, over TCP. The loopback stands for two hosts."""

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from comm_channel_checks import CHANNEL_CHECKS
from comm_properties import holds_for
from hypothesis import strategies as st

from rlinf_comm import (
    Channel,
    ChannelAborted,
    ChannelClosed,
    ChannelServer,
    ChannelTimeout,
    CommError,
    DecodeError,
    NotTrusted,
    PeerLeft,
    PeerLost,
    SharedPool,
    decode,
    encode,
)
from rlinf_comm._carried import Carried, carried
from rlinf_comm.remote.messages import Put, Take, compose
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_comm.wire import handshake, secret
from rlinf_comm.wire.connection import Connection
from rlinf_comm.wire.deadline import Deadline
from rlinf_comm.wire.secret import SECRET_VARIABLE
from rlinf_comm.wire.values import Outbox

HANG_S = 60.0
SCRIPT = "comm_remote.py"


def client(channel: Channel) -> Any:
    """What a channel of another host is here, with its connections."""
    return channel._back_end


@contextmanager
def linked(name: str = "samples", **options: Any) -> Iterator[tuple[Channel, ChannelServer, Channel]]:
    channel = Channel.create(name, **options)
    with ChannelServer(channel) as server:
        far = Channel.open(server.address)
        try:
            yield channel, server, far
        finally:
            far.leave()


# --- the same channel -------------------------------------------------------------------------------------------------


class _Ends:
    """A channel of which some calls go through its door."""

    def __init__(self, near: Channel, far: Channel, puts: str, takes: str) -> None:
        ends = {"near": near, "far": far}
        self._far = far
        self._flushes = (puts, takes) == ("far", "near")
        self._put, self.close = ends[puts].put, ends[puts].close
        self.take = ends[takes].take
        self.abort, self.stats = far.abort, far.stats
        self.reopen = ends[puts].reopen

    def put(self, value: Any, **labels: Any) -> None:
        self._put(value, **labels)
        if self._flushes:
            self._far.flush()


@pytest.mark.parametrize(("puts", "takes"), [("far", "near"), ("near", "far"), ("far", "far")])
@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
def test_a_door_changes_nothing_of_what_a_channel_promises(check, puts, takes):
    with ExitStack() as stack:

        def make(name: str, **options: Any) -> _Ends:
            near, _, far = stack.enter_context(linked(name, **options))
            return _Ends(near, far, puts, takes)

        check(make)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.sampled_from([0, 1, "a"]),
            st.sampled_from([0.5, 1.0, 4.0]),
            st.sampled_from([10, 20_000, 45_000, 70_000]),
        ),
        st.tuples(
            st.just("take"),
            st.integers(1, 4),
            st.integers(1, 3),
            st.sampled_from([None, 1.0, 5.0]),
            st.sampled_from([None, [0], ["a", 1]]),
        ),
        st.tuples(st.sampled_from(["close", "abort"])),
    ),
    max_size=25,
)


def outcome(do: Callable[[], Any]) -> Any:
    try:
        return do()
    except (CommError, ValueError) as error:
        return type(error)


def play(channel: Any, operations: list[Any]) -> list[Any]:
    """What came of each operation; none waits."""
    outcomes = []
    for number, (kind, *arguments) in enumerate(operations):
        if kind == "put":
            key, weight, num_bytes = arguments
            value = np.full(num_bytes, number % 256, dtype=np.uint8)
            labels = {"key": key, "weight": weight, "policy_version": number, "timeout_s": 0.0}
            outcomes.append(outcome(lambda value=value, labels=labels: channel.put(value, **labels)))
        elif kind == "take":
            max_items, min_items, max_weight, keys = arguments
            request = {"max_items": max_items, "min_items": min_items, "max_weight": max_weight, "keys": keys}
            taken = outcome(lambda request=request: channel.take(**request, timeout_s=0.0))
            if isinstance(taken, list):
                taken = [(i.value.tolist(), i.key, i.weight, i.policy_version, i.sequence) for i in taken]
            outcomes.append(taken)
        else:
            outcomes.append(outcome(channel.close if kind == "close" else lambda: channel.abort("enough")))
    return outcomes


def test_a_put_after_ones_own_abort_is_refused():
    with linked("far") as (_, _, far):
        far.put(1)
        far.abort("enough")
        with pytest.raises(ChannelAborted, match="enough"):
            far.put(2)


@holds_for(OPERATIONS, st.sampled_from([1, 2]), st.sampled_from([1, 3]), num=25, num_slow=300)
def test_the_same_calls_have_the_same_outcomes(operations, num_keys, num_producers):
    options = {"capacity_items": 4, "capacity_bytes": 100_000, "num_keys": num_keys, "num_producers": num_producers}
    expected = play(Channel.create("near", **options), operations)
    with linked("far", **options) as (_, _, far):
        assert play(far, operations) == expected


def test_tensors_come_as_they_were_put_and_lie_in_the_channel():
    values = {"bf16": torch.randn(300, 7).bfloat16(), "empty": torch.empty(0, 3), "bool": torch.tensor([True, False])}
    with linked() as (near, _, far):
        far.put(values)
        taken = near.take()[0].value
        for name, value in values.items():
            assert_bitwise_equal(taken[name], value)
        assert near.stats().num_held_bytes >= values["bf16"].nbytes
        near.put(values)
        for name, value in far.take()[0].value.items():
            assert_bitwise_equal(value, values[name])


def test_tensors_of_a_pool_cross_as_their_bytes():
    pool = SharedPool.create("pool", capacity_bytes=1 << 20)
    tensor = pool.copy_of(torch.arange(100))
    with linked() as (near, _, far):
        far.put(tensor)
        near.put(tensor)
        for item in (*near.take(), *far.take()):
            assert_bitwise_equal(item.value, torch.arange(100))
            assert item.value.data_ptr() != tensor.data_ptr()


def test_what_no_channel_takes_is_refused_before_it_is_sent():
    with linked(capacity_bytes=100_000, num_keys=2) as (_, server, far):
        wrong_labels: list[dict[str, Any]] = [
            {"key": 1.5},
            {"key": ""},
            {"key": 1 << 63},
            {"weight": math.nan},
            {"timeout_s": -1.0},
        ]
        for labels in wrong_labels:
            with pytest.raises(ValueError):
                far.put(1, **labels)
        with pytest.raises(ValueError, match="each of num_keys=2 keys has 50000"):
            far.put(bytes(60_000))
        with pytest.raises(TypeError):
            far.put(lambda: None)
        wrong_requests: list[dict[str, Any]] = [{"keys": "ab"}, {"keys": []}, {"max_items": 0}, {"min_weight": -1.0}]
        for request in wrong_requests:
            with pytest.raises(ValueError):
                far.take(**request)
        assert server.traffic.num_put == 0
        far.put(True, key=True)
        assert far.take()[0].key == 1


# --- backpressure -----------------------------------------------------------------------------------------------------


def test_what_finds_no_room_is_not_sent_and_what_waits_is_sent_once():
    with linked(capacity_items=2) as (near, server, far):
        content = np.zeros(50_000, dtype=np.uint8)
        far.put(content)
        far.put(content)
        sent = server.traffic.put_bytes
        for _ in range(3):
            with pytest.raises(ChannelTimeout, match=r"capacity_items=2"):
                far.put(content, timeout_s=0.0)
        assert (server.traffic.num_put, server.traffic.put_bytes) == (2, sent)
        waiting = threading.Thread(target=far.put, args=(content,))
        waiting.start()
        while near.stats().num_blocked_puts < 1:
            time.sleep(0.001)
        near.take()
        waiting.join(HANG_S)
        assert server.traffic.num_put == 3
        assert 3 * content.nbytes < server.traffic.put_bytes < 3 * content.nbytes + 1000


def test_a_put_that_waits_in_vain_was_not_put():
    with linked(capacity_items=1) as (near, _, far):
        far.put(0)
        with pytest.raises(ChannelTimeout):
            far.put(1, timeout_s=0.05)
        assert near.take()[0].value == 0
        far.put(2, timeout_s=0.0)
        assert [item.value for item in near.take(max_items=9)] == [2]


def test_far_producers_fill_no_more_than_they_were_granted():
    """Half of the room at most is granted, to all of them together."""
    with linked(capacity_items=64) as (_, server, far):
        others = [Channel.open(server.address) for _ in range(3)]
        for channel in (far, *others):
            channel.put("first")
        for channel in (far, *others):
            channel.put("second")
            assert client(channel)._granted.num_items <= 32
        granted = sum(client(channel)._granted.num_items for channel in others)
        assert 0 < granted <= 32
        for channel in others:
            channel.leave()


@pytest.mark.parametrize("ends", ["leaves", "dies"])
def test_what_found_its_room_taken_waits_at_the_door_and_survives_its_producer(ends):
    with linked(capacity_items=8, lost_peers="tolerate") as (near, server, _):
        producer = Channel.open(server.address)
        producer.put(0)
        for index in range(7):
            near.put(index)
        producer.put("waits")
        producer.put("too")
        assert client(producer)._num_unanswered == 2, "there was room when it was granted"
        if ends == "leaves":
            producer.leave()
        else:
            client(producer)._put_exchange._lifeline._socket.close()
        assert len(near.take(max_items=8, min_items=8)) == 8
        assert [near.take(timeout_s=HANG_S)[0].value for _ in range(2)] == ["waits", "too"]


def test_a_take_that_is_given_up_by_leaving_is_no_loss():
    with linked() as (near, server, _):
        other = Channel.open(server.address)
        waiting = threading.Thread(target=lambda: outcome(other.take), daemon=True)
        waiting.start()
        while len(server._connections) < 3:
            time.sleep(0.001)
        other.leave()
        while len(server._connections) > 1:
            time.sleep(0.001)
        with pytest.raises(ChannelTimeout):
            near.take(timeout_s=0.15)


def test_a_farewell_that_is_read_together_with_the_take_before_it_is_no_loss():
    with linked() as (near, server, far):
        wire = client(far)._another_exchange(Deadline(HANG_S))
        take = compose(Take(1, 1, 0.0, None, None, None))
        wire._lifeline._socket.sendall(b"".join(piece for message in (take, None) for piece in Outbox(message)._pieces))
        wire.shut(farewell=False)
        (guest,) = server._clients.values()
        while not guest.has_taken or guest.num_connections > 1:
            time.sleep(0.001)
        with pytest.raises(ChannelTimeout):
            near.take(timeout_s=0.15)


def test_a_put_of_another_thread_waits_its_turn_no_longer_than_it_wants():
    with linked(capacity_items=1) as (near, _, far):
        far.put(0)
        waiting = threading.Thread(target=far.put, args=(1,))
        waiting.start()
        while near.stats().num_blocked_puts < 1:
            time.sleep(0.001)
        with pytest.raises(ChannelTimeout, match="another put of this process"):
            far.put(2, timeout_s=0.05)
        assert far.stats().num_items == 1  # other calls do not wait behind it
        assert [item.value for item in (*far.take(), *far.take(timeout_s=HANG_S))] == [0, 1]
        waiting.join(HANG_S)


def test_a_key_with_a_share_of_its_own_does_not_wait_behind_another():
    with linked(capacity_items=2, num_keys=2) as (near, _, far):
        far.put(0, key="full")
        waiting = threading.Thread(target=far.put, args=(1,), kwargs={"key": "full"})
        waiting.start()
        while near.stats().num_blocked_puts < 1:
            time.sleep(0.001)
        far.put(2, key="free", timeout_s=0.0)
        assert near.take(keys=["free"], timeout_s=0.0)[0].value == 2
        assert [near.take(keys=["full"], timeout_s=HANG_S)[0].value for _ in range(2)] == [0, 1]
        waiting.join(HANG_S)


def granted_puts(far: Channel) -> None:
    """Puts until one goes without an answer."""
    while not client(far)._granted.num_items:
        far.put("answered")


def test_an_abort_reaches_a_producer_that_did_not_wait():
    with linked() as (near, _, far):
        granted_puts(far)
        near.abort("rollout 3 ran out of memory")
        far.put("on its way")
        with pytest.raises(ChannelAborted, match="rollout 3 ran out of memory"):
            far.close()


def test_a_put_after_the_end_is_refused_at_the_next_call_at_the_latest():
    with linked() as (near, _, far):
        granted_puts(far)
        near.close()
        far.put("too late")
        with pytest.raises(ChannelClosed):
            far.close()
        assert all(item.value == "answered" for item in near.take(max_items=99))


def test_close_returns_when_all_puts_are_in_the_channel():
    with linked() as (near, _, far):
        for index in range(500):
            far.put(index)
        far.close()
        assert [item.value for item in near.take(max_items=1000, timeout_s=0.0)] == list(range(500))
        assert near.take() == []


# --- digests and classes ----------------------------------------------------------------------------------------------


def test_a_checked_channel_checks_from_end_to_end(monkeypatch):
    with linked(checked=True) as (near, _, far):
        values = [{"x": torch.arange(1000), "y": "text"}, 3]
        for put, take in ((far.put, near.take), (near.put, far.take), (far.put, far.take)):
            put(values[0])
            put(values[1])
            first, second = take(max_items=2, min_items=2)
            assert first.value["x"].tolist() == list(range(1000)) and second.value == 3
        monkeypatch.setattr("rlinf_comm.channel.sealed", lambda value: (bytes(16), value))
        far.put(1)
        with pytest.raises(DecodeError, match="not those that were put"):
            near.take()
        far.put(1)
        with pytest.raises(DecodeError, match="not those that were put"):
            far.take()


def test_the_doors_process_need_not_know_the_classes_of_what_it_passes_on(start_peer):
    with linked() as (near, _, far):
        start_peer("put_own_class", far.address, wait=False, script=SCRIPT).join()
        start_peer("put_own_class", far.address, wait=False, script=SCRIPT).join()
        with pytest.raises(DecodeError, match=r"no class is registered as '__main__:OnlyHere'"):
            near.take()
        with pytest.raises(
            DecodeError, match=r"channel 'samples', item 1: no class is registered as '__main__:OnlyHere'"
        ):
            far.take()
        assert near.stats().num_items == 0


def test_a_carried_value_arrives_as_itself_and_is_carried_once():
    inner = encode({"x": torch.arange(5)})
    once = encode(carried(inner.header, list(inner.buffers)))
    assert decode(once.header, once.buffers)["x"].tolist() == [0, 1, 2, 3, 4]
    twice = encode(carried(once.header, list(once.buffers)))
    with pytest.raises(DecodeError, match="carried value inside of another"):
        decode(twice.header, twice.buffers)
    assert decode(once.header, once.buffers)["x"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DecodeError):
        decode(encode(Carried(b"\xff", ())).header, ())


# --- processes --------------------------------------------------------------------------------------------------------


def test_producers_of_several_processes_arrive_once_and_in_their_order(start_peer):
    with linked(capacity_items=8, num_producers=3) as (near, _, far):
        for producer in range(3):
            start_peer("produce", far.address, producer, 60, wait=False, script=SCRIPT)
        indices_of: dict[int, list[int]] = {0: [], 1: [], 2: []}
        while items := near.take(max_items=4, timeout_s=HANG_S):
            for item in items:
                producer, index, array = item.value
                assert item.key == producer and set(array.tolist()) <= {producer * 1_000_000 + index}
                indices_of[producer].append(index)
        assert all(indices == list(range(60)) for indices in indices_of.values())


def test_consumers_of_several_processes_share_the_items(start_peer):
    reports = Channel.create("reports", num_producers=2)
    with linked(capacity_items=8) as (near, _, far):
        for _ in range(2):
            start_peer("take_one_at_a_time", far.address, reports.address, wait=False, script=SCRIPT)
        for index in range(60):
            near.put((0, index, np.full(index, index)), timeout_s=HANG_S)
        near.close()
        rows = sorted(value[1:] for value in reports)
    assert rows == [(index, True, index) for index in range(60)]


def test_what_a_killed_producer_had_put_is_there_and_then_it_is_missed(start_peer, caplog):
    with linked() as (near, _, far), caplog.at_level(logging.WARNING):
        producer = start_peer("put_and_stay", far.address, 300, script=SCRIPT)
        producer.process.kill()
        values = [near.take(timeout_s=HANG_S)[0].value for _ in range(300)]
        assert values == list(range(300))
        for take in (near.take, far.take):
            with pytest.raises(PeerLost, match=rf"process {producer.process.pid} .*died without leaving") as caught:
                take(timeout_s=HANG_S)
            assert caught.value.pids == (producer.process.pid,)
        assert far.drop_lost_peers() == [producer.process.pid]
        for take in (near.take, far.take):
            with pytest.raises(ChannelTimeout):
                take(timeout_s=0.15)
        assert any("its connection ended without a farewell" in record.getMessage() for record in caplog.records)


def test_what_a_producer_that_is_killed_in_its_puts_has_sent_whole_is_there_alone(start_peer):
    num_elements = 1 << 18
    with linked(capacity_items=4, capacity_bytes=64 << 20) as (near, _, far):
        producer = start_peer("put_without_end", far.address, num_elements, script=SCRIPT)
        taken = [near.take(timeout_s=HANG_S)[0].value for _ in range(3)]
        producer.process.kill()
        while isinstance(items := outcome(lambda: near.take(timeout_s=HANG_S)), list):
            taken.append(items[0].value)
        assert items is PeerLost
        for index, array in enumerate(taken):
            assert array.shape == (num_elements,) and (array == index).all()


def test_what_is_cut_in_its_middle_is_not_there_and_its_producer_is_missed():
    with linked() as (near, server, far):
        producer = Channel.open(server.address)
        outbox = Outbox(compose(Put(0, 1.0, -1, None, answers=False), encode(np.ones(100_000))))
        first = outbox._pieces[0]
        client(producer)._put_exchange._lifeline._socket.sendall(bytes(first) + bytes(outbox._pieces[1])[:300_000])
        client(producer)._put_exchange.shut(farewell=False)
        with pytest.raises(PeerLost):
            near.take(timeout_s=HANG_S)
        assert near.stats().num_put == 0
        assert near.drop_lost_peers() == [os.getpid()]
        far.put("still there")
        assert near.take(timeout_s=HANG_S)[0].value == "still there"


@pytest.mark.parametrize(("how", "is_missed"), [("regularly", False), ("exception", True)])
def test_who_ends_regularly_is_not_missed(start_peer, how, is_missed):
    with linked() as (near, _, far):
        start_peer("put_and_end", far.address, how, wait=False, script=SCRIPT).process.wait(HANG_S)
        assert near.take(timeout_s=HANG_S)[0].value == how
        with pytest.raises(PeerLost if is_missed else ChannelTimeout):
            near.take(timeout_s=HANG_S if is_missed else 0.3)


def test_with_lost_peers_tolerated_nobody_is_told(start_peer):
    with linked(lost_peers="tolerate") as (near, server, far):
        producer = start_peer("put_and_stay", far.address, 5, script=SCRIPT)
        producer.process.kill()
        producer.process.wait(HANG_S)
        while len(server._clients) > 1:
            time.sleep(0.001)
        assert len(near.take(max_items=5, min_items=5, timeout_s=HANG_S)) == 5
        with pytest.raises(ChannelTimeout):
            near.take(timeout_s=0.25)


def test_a_killed_door_ends_all_waits(start_peer):
    replies = Channel.create("told")
    server = start_peer("serve", replies.address, script=SCRIPT)
    address, near_address = replies.take(timeout_s=HANG_S)[0].value
    far, other, near = Channel.open(address), Channel.open(address), Channel.open(near_address)
    far.put(0)
    errors: list[Exception] = []

    def wait(call: Callable[[], Any]) -> None:
        try:
            call()
        except CommError as error:
            errors.append(error)

    calls = [lambda: far.put(1), lambda: other.take(keys=[7]), lambda: near.take(keys=[7])]
    threads = [threading.Thread(target=wait, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    while near.stats().num_blocked_puts < 1:
        time.sleep(0.001)
    server.process.send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join(HANG_S)
    assert [type(error) for error in errors] == [PeerLost] * 3
    for call in (lambda: far.put(1), far.take, other.stats):
        with pytest.raises(PeerLost):
            call()
    with pytest.raises(PeerLost):
        Channel.open(address)


def test_a_closed_door_says_so():
    with linked() as (near, server, far):
        far.put(0)
        waiting: list[Exception] = []

        def take() -> None:
            try:
                far.take(keys=[7])
            except PeerLost as error:
                waiting.append(error)

        thread = threading.Thread(target=take)
        thread.start()
        while not client(far)._exchanges[1:]:
            time.sleep(0.001)
        server.close()
        thread.join(HANG_S)
        assert len(waiting) == 1
        with pytest.raises(PeerLost):
            far.put(1)
        assert near.take()[0].value == 0  # the channel stays as it is


def test_a_door_stands_where_the_channel_was_created():
    channel = Channel.create("samples")
    with pytest.raises(ValueError, match="in the process that created it"):
        ChannelServer(Channel.open(channel.address))
    with pytest.raises(ValueError, match=r"host='0\.0\.0\.0' is no address"):
        ChannelServer(channel, host="0.0.0.0")


def test_a_forked_child_opens_its_own(capfd):
    with linked() as (near, _, far):
        pid = os.fork()
        if pid == 0:
            try:
                far.put(1)
            except PeerLost:
                Channel.open(far.address).put("of the child")
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert near.take(timeout_s=HANG_S)[0].value == "of the child"
        far.put("of the parent")
        assert near.take(timeout_s=HANG_S)[0].value == "of the parent"


# --- strangers --------------------------------------------------------------------------------------------------------


def test_garbage_is_nothing_but_lines_in_the_log(caplog):
    random = np.random.default_rng(17)
    greeted = handshake.GREETING.pack(handshake.MAGIC, handshake.VERSION, bytes(16))
    with linked() as (near, server, far), caplog.at_level(logging.WARNING):
        for number in range(2000):
            stranger = socket.create_connection(server.address.server.endpoint, timeout=HANG_S)
            with stranger:
                garbage = random.bytes(int(random.integers(1, 200)))
                stranger.sendall(garbage if number % 2 else greeted + garbage)
            if number % 100 == 0:
                far.put(number)
        assert [item.value for item in near.take(max_items=20, min_items=20)] == list(range(0, 2000, 100))
        assert Channel.open(server.address).stats().num_put == 20
        assert server.traffic.num_put == 20
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) <= 20 and all("was turned away" in line for line in lines)


def test_garbage_of_a_member_costs_it_its_line(caplog):
    """Of one who knows the secret and speaks another protocol."""
    random = np.random.default_rng(17)
    with linked() as (near, server, far), caplog.at_level(logging.WARNING):
        for _ in range(50):
            connection = Connection.to_peer(server.address.server, Deadline(HANG_S))
            connection.socket.sendall(random.bytes(100))
            connection.shut()
        for _ in range(20):
            member = Channel.open(server.address)
            client(member)._put_exchange._lifeline._socket.sendall(random.bytes(100))
            with pytest.raises(PeerLost):
                member.close()
        far.put("still there")
        assert near.take()[0].value == "still there"


def test_who_has_another_secret_is_turned_away(monkeypatch, caplog):
    with linked() as (near, server, far), caplog.at_level(logging.WARNING):
        monkeypatch.setenv(SECRET_VARIABLE, "another secret, of thirty-two characters")
        with pytest.raises(PeerLost, match="of another job"):
            Channel.open(server.address)
        monkeypatch.undo()
        far.put(1)
        assert near.take()[0].value == 1
    assert "does not know the secret" in caplog.text


def test_another_version_is_refused_by_name(monkeypatch):
    with linked() as (near, server, far):
        greeting = handshake.GREETING.pack(handshake.MAGIC, handshake.VERSION + 1, bytes(16))
        monkeypatch.setattr("rlinf_comm.wire.connection.new_greeting", lambda: greeting)
        with pytest.raises(PeerLost):
            Channel.open(server.address)
        monkeypatch.undo()
        monkeypatch.setattr("rlinf_comm.wire.listener.new_greeting", lambda: greeting)
        with pytest.raises(DecodeError, match=f"speaks version {handshake.VERSION + 1} of the peer protocol"):
            Channel.open(server.address)
        far.put(1)
        assert near.take()[0].value == 1


def test_beyond_this_machine_a_door_needs_a_secret_that_was_set(monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    secret.job_secret()
    with pytest.raises(NotTrusted, match="the server of channel 'samples' can be reached from other machines"):
        ChannelServer(Channel.create("samples"), host="10.1.2.3")


def test_a_peer_left_is_told_from_a_lost_one():
    channel = Channel.create("samples")
    server = ChannelServer(channel)
    far = Channel.open(server.address)
    far.put(1)
    far.leave()
    with pytest.raises(PeerLost, match="this process has left it"):
        far.put(2)
    while server._clients:
        time.sleep(0.001)
    assert server._lost == {} and not issubclass(PeerLost, PeerLeft)
    server.close()
