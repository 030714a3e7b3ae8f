"""Broadcasts to other hosts: each peer here claims a host of its own choice, and all are in this process."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from rlinf_comm import BroadcastError, PeerLeft, PeerLost, UnsupportedValueError
from rlinf_comm.peers import Peer, peer
from rlinf_comm.peers.address import PeerAddress, this_host
from rlinf_comm.peers.relay import Parcel, Relay
from rlinf_comm.peers.spanning import spanning_branches
from rlinf_comm.testing import assert_bitwise_equal

HANG_S = 20.0
CAPACITY_BYTES = 8 << 20
LARGE = np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8)


def on_host(name):
    return dataclasses.replace(this_host(), boot_id=name)


@pytest.fixture
def join(monkeypatch):
    """join({host: names}) -> peers by name that know each other, and say that they are on those hosts"""
    made = {}

    def join(names_by_host):
        for host, names in names_by_host.items():
            monkeypatch.setattr(peer, "this_host", lambda host=host: on_host(host))
            for name in names.split():
                made[name] = Peer.listen(name, transports=("shared", "tcp"), capacity_bytes=CAPACITY_BYTES)
        for one in made.values():
            one._known.update({name: other.address for name, other in made.items() if other is not one})
        return made

    yield join
    for one in made.values():
        one.close()


@pytest.fixture
def parcels(monkeypatch):
    """(who, to whom) of all large messages that were sent by relays"""
    sent = []
    real = Relay._send

    def send(self, to, message, deadline):
        if isinstance(message, Parcel):
            sent.append((self._mine.name, to.name))
        real(self, to, message, deadline)

    monkeypatch.setattr(Relay, "_send", send)
    return sent


def receive(one):
    return one.receive("a", timeout_s=HANG_S)


# --- which way --------------------------------------------------------------------------------------------------------


def addresses(names_by_host):
    return [
        PeerAddress(name=name, host=on_host(host), pid=1, start_ticks=0, endpoint=("", 0), incarnation=name.encode())
        for host, names in names_by_host.items()
        for name in names.split()
    ]


def ways_of(names_by_host):
    branches = spanning_branches(on_host("here"), addresses(names_by_host))
    ways = [[address.name for address in way] for branch in branches for way in branch.ways()]
    return {way[-1]: way[:-1] for way in ways}


def test_a_host_gets_one_copy_for_all_of_its_peers():
    ways = ways_of({"here": "b", "one": "c d e", "two": "f", "three": "g h"})
    assert ways == {"c": [], "d": ["c"], "e": ["c"], "g": [], "h": ["g"]}


@pytest.mark.parametrize("num_hosts", [4, 5, 7, 12, 33])
def test_many_hosts_pass_on_to_two_each(num_hosts):
    ways = ways_of({f"host {index}": f"{index} mate-{index}" for index in range(num_hosts)} | {"here": "b"})
    assert set(ways) == {f"{kind}{index}" for kind in ("", "mate-") for index in range(num_hosts)}
    firsts = {name: way for name, way in ways.items() if name.isdigit()}
    served = [way[-1] if way else "the sender" for way in firsts.values()]
    assert max(served.count(name) for name in served) <= 2
    assert max(map(len, firsts.values())) < np.ceil(np.log2(num_hosts + 1))
    assert all(ways[f"mate-{name}"] == [*way, name] for name, way in firsts.items())


# --- values -----------------------------------------------------------------------------------------------------------


def test_large_values_cross_to_a_host_once_and_keep_their_place(join, parcels):
    peers = join({"here": "a b", "there": "c d e", "elsewhere": "f"})
    a, names = peers["a"], "bcdef"
    mine = LARGE.copy()
    for index in range(3):
        a.broadcast(("small", index), names, timeout_s=HANG_S)
        mine[0] = index
        a.broadcast({"w": mine, "empty": mine[:0], "index": index}, names, timeout_s=HANG_S)
        for name in names:
            a.send(name, index, timeout_s=HANG_S)
        for name in names if index else ():
            assert receive(peers[name]) == ("small", index - 1)
            value = receive(peers[name])
            mine[0] = index - 1
            assert_bitwise_equal(value, {"w": mine, "empty": mine[:0], "index": index - 1})
            value["w"][:] = 0  # its own
            mine[0] = index
            assert receive(peers[name]) == index - 1
    assert sorted(parcels) == [("a", "c")] * 3 + [("c", "d")] * 3 + [("c", "e")] * 3


def test_many_hosts(join, parcels):
    hosts = {f"host {index}": f"p{index} q{index}" for index in range(5)}
    peers = join({"here": "a"} | hosts)
    names = [name for name in peers if name != "a"]
    peers["a"].broadcast(LARGE, names, timeout_s=HANG_S)
    for name in names:
        assert_bitwise_equal(receive(peers[name]), LARGE)
    assert len(parcels) == len(names) and sum(who == "a" for who, _ in parcels) == 2


def test_two_may_broadcast_to_each_other(join):
    peers = join({"one": "a b", "two": "c d"})
    threads = [
        threading.Thread(target=lambda one=one, to=to: [one.broadcast(LARGE, to, timeout_s=HANG_S) for _ in range(4)])
        for one, to in ((peers["a"], "bcd"), (peers["c"], "abd"))
    ]
    for thread in threads:
        thread.start()
    for sender, receivers in (("a", "bcd"), ("c", "abd")):
        for _ in range(4):
            for name in receivers:
                assert_bitwise_equal(peers[name].receive(sender, timeout_s=HANG_S), LARGE)
    for thread in threads:
        thread.join(HANG_S)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_peer_that_dies_on_the_way_is_named_and_keeps_the_value_from_nobody(join, monkeypatch):
    peers = join({"here": "a", "there": "c d e"})
    real = Relay._take_in

    def die_in_c(self, parcel):
        if self._mine.name == "c":
            peers["c"]._end(farewell=False)
        else:
            real(self, parcel)

    peers["a"].broadcast(0, "cde", timeout_s=HANG_S)
    for name in "cde":
        assert receive(peers[name]) == 0  # so it holds the link of a, and closes it when it dies
    monkeypatch.setattr(Relay, "_take_in", die_in_c)
    start_s = time.monotonic()
    with pytest.raises(BroadcastError, match="1 of 3 peers were not reached: c: 'c' is lost") as caught:
        peers["a"].broadcast(LARGE, "cde", timeout_s=HANG_S)
    assert time.monotonic() - start_s < HANG_S / 2 - 1, "the death was not noticed, only the time passed"
    assert {name: type(error) for name, error in caught.value.failures.items()} == {"c": PeerLost}
    for name in "de":
        assert_bitwise_equal(receive(peers[name]), LARGE)
    peers["a"].broadcast(LARGE, "de", timeout_s=HANG_S)  # with another first peer of that host
    for name in "de":
        assert_bitwise_equal(receive(peers[name]), LARGE)


def test_one_that_is_stuck_on_the_way_costs_the_others_half_of_the_time(join, monkeypatch):
    peers = join({"here": "a", "there": "c d"})
    going_on = threading.Event()
    real = Relay._take_in

    def take_in(self, parcel):
        if self._mine.name == "c":
            going_on.wait(HANG_S)
        real(self, parcel)

    monkeypatch.setattr(Relay, "_take_in", take_in)
    peers["a"].broadcast(LARGE, "cd", timeout_s=3.0)
    going_on.set()  # the parcel comes late
    peers["a"].broadcast(LARGE[:2_000_000], "cd", timeout_s=HANG_S)
    for name in "cd":
        assert_bitwise_equal(receive(peers[name]), LARGE)
        assert_bitwise_equal(receive(peers[name]), LARGE[:2_000_000])
        assert not any(peers[name]._relay._kept.values()), "a value is kept that nobody will take"


def test_a_peer_that_is_unknown_on_the_way_gets_the_value_directly(join):
    """c cannot call d."""
    peers = join({"here": "a", "there": "c d"})
    a, d = peers["a"], peers["d"]
    a.connect(d.address, timeout_s=HANG_S)
    d._reception.close()
    a.broadcast(LARGE, "cd", timeout_s=HANG_S)
    for name in "cd":
        assert_bitwise_equal(receive(peers[name]), LARGE)


def test_values_wait_up_to_the_capacity_and_then_the_sender_does(join):
    peers = join({"here": "a", "there": "c d"})
    sent = []

    def broadcast_for_ever():
        while len(sent) < 100:
            peers["a"].broadcast(LARGE, "cd", timeout_s=2.0)
            assert_bitwise_equal(receive(peers["c"]), LARGE)
            sent.append(LARGE)

    with pytest.raises(BroadcastError, match=r"1 of 2 .*d: send to 'd' not done") as caught:
        broadcast_for_ever()
    assert list(caught.value.failures) == ["d"]
    kept = peers["d"]._relay._kept[peers["a"].address.incarnation].values()
    assert len(kept) > 1 and sum(parcel.num_bytes for parcel in kept) <= CAPACITY_BYTES
    for value in sent:
        assert_bitwise_equal(receive(peers["d"]), value)
    assert_bitwise_equal(receive(peers["c"]), LARGE)


def test_what_cannot_cross_is_refused_for_each(join):
    peers = join({"here": "a", "there": "c d"})
    with pytest.raises(BroadcastError, match=r"2 of 2 .*value\[1\]: a function cannot cross") as caught:
        peers["a"].broadcast([LARGE, print], "cd", timeout_s=HANG_S)
    assert {type(error) for error in caught.value.failures.values()} == {UnsupportedValueError}


def test_nothing_is_kept_of_a_sender_that_has_ended(join):
    peers = join({"here": "a", "there": "c d"})
    peers["a"].broadcast(LARGE, "cd", timeout_s=HANG_S)
    d = peers["d"]
    assert d._relay._kept[peers["a"].address.incarnation]
    assert_bitwise_equal(receive(d), LARGE)
    peers["a"].broadcast(LARGE, "cd", timeout_s=HANG_S)
    peers["a"].close()
    assert_bitwise_equal(receive(d), LARGE)  # what was sent before the end
    with pytest.raises(PeerLeft):
        receive(d)
    assert not d._relay._kept


def test_names_of_relays_are_taken():
    with pytest.raises(ValueError, match="names that start with 'relay of ' are taken"):
        Peer.listen("relay of a")
