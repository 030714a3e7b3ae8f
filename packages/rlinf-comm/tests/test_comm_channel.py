"""rlinf_comm.channel within one process: the contract, the memory, the messages."""

import gc
import os
import pickle
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from comm_channel_checks import CHANNEL_CHECKS
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from rlinf_comm import (
    Channel,
    ChannelAborted,
    ChannelAddress,
    ChannelClosed,
    ChannelStalled,
    ChannelTimeout,
    PeerLost,
    UnsupportedValueError,
    pack,
    unpack,
)
from rlinf_comm.testing import assert_bitwise_equal


def open_twice(name, **options):
    """A channel seen through its address, as another process sees it."""
    owner = Channel.create(name, **options)
    peer = Channel.open(unpack(pack(owner.address)))

    class BothEnds:
        put, close, abort, stats = owner.put, peer.close, peer.abort, peer.stats
        take, reopen = peer.take, owner.reopen

    return BothEnds()


@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
def test_channel_conforms(check):
    check(Channel.create)


@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
def test_channel_conforms_through_its_address(check):
    check(open_twice)


# --- values and memory ------------------------------------------------------------------------------------------------


def test_tensors_of_all_kinds_come_through():
    value = {
        "bf16": torch.arange(100).to(torch.bfloat16).reshape(10, 10).T,
        "bool": torch.tensor([True, False]),
        "0-d": torch.tensor(3.5),
        "empty": [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int64)],
        "large": torch.arange(3 << 20, dtype=torch.float32),
        "array": np.arange(5000.0),
    }
    channel = Channel.create("kinds")
    channel.put(value)
    (item,) = channel.take()
    assert_bitwise_equal(item.value, value)
    assert item.nbytes > (3 << 20) * 4 + 40_000


def test_large_tensors_are_views_in_place_and_small_ones_are_copied_out():
    channel = Channel.create("place")
    channel.put([torch.zeros(5000), torch.ones(5000)])
    channel.put(torch.zeros(5))
    large, small = (item.value for item in channel.take(max_items=2, min_items=2))
    assert channel.stats().num_held_items == 1
    del large[0]
    gc.collect()
    assert channel.stats().num_held_items == 1, "the second tensor of the item still lives"
    assert large[0].eq(1).all()
    view = large.pop()[100:200]
    del large
    gc.collect()
    assert channel.stats().num_held_items == 1, "a view of the tensor still lives"
    assert view.eq(1).all()
    del view
    gc.collect()
    assert channel.stats().num_held_items == 0
    assert small.eq(0).all()


def test_taken_tensors_are_aligned_and_writable():
    channel = Channel.create("aligned")
    channel.put([torch.ones(1, dtype=torch.uint8), torch.zeros(7000), torch.ones(3, dtype=torch.complex128)])
    tensors = channel.take()[0].value
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    tensors[1][:] = 5
    assert tensors[1].sum() == 35_000
    assert tensors[2].eq(1).all()


def test_tensors_outlive_the_channel():
    channel = Channel.create("outlived")
    channel.put(torch.full((10_000,), 3.0))
    tensor = channel.take()[0].value
    channel.abort("over")
    del channel
    gc.collect()
    assert tensor.eq(3.0).all()


def test_memory_comes_back_in_any_order():
    channel = Channel.create("order of frees", capacity_bytes=1 << 20)
    random = np.random.default_rng(0)
    tensors: list[torch.Tensor] = []
    for step in range(600):
        channel.put(torch.full((int(random.integers(1200, 30_000)),), float(step)))
        tensors.append(channel.take()[0].value)
        if len(tensors) > 8:
            tensor = tensors.pop(int(random.integers(len(tensors))))
            assert len(set(tensor.tolist())) == 1
    tensors.clear()
    del tensor
    gc.collect()
    stats = channel.stats()
    assert (stats.num_held_items, stats.num_held_bytes, stats.num_bytes) == (0, 0, 0)
    channel.put(torch.zeros((1 << 20) - 4096, dtype=torch.uint8), timeout_s=0)  # in one piece again


def test_dropping_the_channel_closes_its_memory():
    def num_open():
        links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return sum("rlinf:dropped" in os.readlink(link) for link in links if os.path.islink(link))

    def num_mapped():
        with open("/proc/self/maps") as lines:
            return sum("rlinf:dropped" in line for line in lines)

    channel = Channel.create("dropped")
    peer = Channel.open(channel.address)
    assert (num_open(), num_mapped()) == (2, 2)
    del channel, peer
    gc.collect()
    assert (num_open(), num_mapped()) == (0, 0)


def test_put_does_not_keep_the_value():
    channel = Channel.create("not kept")
    tensor = torch.zeros(10)
    alive = weakref.ref(tensor)
    channel.put({"t": tensor})
    del tensor
    gc.collect()
    assert alive() is None


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_iteration_ends_with_the_channel():
    channel = Channel.create("iterated", num_producers=2)
    for index in range(3):
        channel.put(index)
    channel.close()
    channel.close()
    assert list(channel) == [0, 1, 2]


def test_sequence_numbers_go_on_after_reopen():
    channel = Channel.create("reopened")
    for step in range(2):
        channel.put(step)
        channel.close()
        (item,) = channel.take()
        assert item.sequence == step
        channel.reopen(1)


def test_a_take_that_cannot_be_satisfied_says_so():
    channel = Channel.create("stalled", capacity_bytes=100_000)
    errors = []

    def produce():
        try:
            for _ in range(5):
                channel.put(np.zeros(40_000, dtype=np.uint8))
        except ChannelAborted as error:
            errors.append(error)

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    with pytest.raises(ChannelStalled, match=r"take of 5 items.*2 items are waiting.*raise capacity_items or"):
        channel.take(max_items=5, min_items=5, timeout_s=60)
    assert len(channel.take(max_items=5, min_items=2)) == 2, "the items are still there"
    channel.abort("enough")
    producer.join(60)
    assert len(errors) == 1


def test_waiting_consumers_with_different_keys_all_get_theirs():
    channel = Channel.create("many waiters")
    results: dict[int, list] = {}

    def consume(key):
        results[key] = [item.value for _ in range(10) for item in channel.take(keys=[key], timeout_s=60)]

    consumers = [threading.Thread(target=consume, args=(key,)) for key in range(6)]
    for consumer in consumers:
        consumer.start()
    for index in range(10):
        for key in reversed(range(6)):
            channel.put((key, index), key=key)
    for consumer in consumers:
        consumer.join(60)
    assert results == {key: [(key, index) for index in range(10)] for key in range(6)}


def test_blocked_time_is_counted():
    channel = Channel.create("times", capacity_items=1)
    with pytest.raises(ChannelTimeout):
        channel.take(timeout_s=0.03)
    channel.put(0)
    for _ in range(2):
        with pytest.raises(ChannelTimeout):
            channel.put(1, timeout_s=0.03)
    stats = channel.stats()
    assert stats.num_blocked_puts == 2
    assert stats.blocked_take_s >= 0.03
    assert stats.blocked_put_s >= 0.06
    assert (stats.num_put, stats.num_taken, stats.num_items) == (1, 0, 1)


def test_waits_leave_the_interpreter_to_other_threads():
    channel = Channel.create("gil")
    waiting = threading.Thread(target=channel.take)
    waiting.start()
    counted = 0
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        counted += 1
    assert counted > 0
    channel.close()
    waiting.join(60)
    assert not waiting.is_alive()


# --- messages ---------------------------------------------------------------------------------------------------------


def test_mistakes_are_explained():
    channel = Channel.create("explained", capacity_items=7, capacity_bytes=1000, num_producers=1)
    with pytest.raises(ValueError, match=r"'explained': one item of \d+ bytes does not fit capacity_bytes=1000"):
        channel.put(np.zeros(2000, dtype=np.uint8))
    with pytest.raises(ValueError, match="weight=-1"):
        channel.put(0, weight=-1.0)
    with pytest.raises(ValueError, match="weight=nan"):
        channel.put(0, weight=float("nan"))
    with pytest.raises(ValueError, match="max_items=0"):
        channel.take(max_items=0)
    with pytest.raises(ValueError, match=r"keys=\[\]"):
        channel.take(keys=[])
    with pytest.raises(ValueError, match="max_weight=-1"):
        channel.take(max_weight=-1.0)
    with pytest.raises(ValueError, match="timeout_s=-1"):
        channel.take(timeout_s=-1.0)
    with pytest.raises(UnsupportedValueError, match="scorer: a function"):
        channel.put({"scorer": len})
    with pytest.raises(ValueError, match="capacity_items=0; at least 1"):
        Channel.create("x", capacity_items=0)
    assert channel.stats().num_put == 0


def test_errors_say_what_the_state_was():
    channel = Channel.create("state", capacity_items=1)
    channel.put(0)
    with pytest.raises(
        ChannelTimeout, match=r"'state': put of \d+ bytes with key 3 not done within timeout_s=0; 1 items are waiting"
    ):
        channel.put(1, key=3, timeout_s=0)
    with pytest.raises(ChannelTimeout, match=r"take of 1 items with keys \[9\].*0 of 1 producers have closed"):
        channel.take(keys=[9], timeout_s=0)
    channel.close()
    with pytest.raises(ChannelClosed, match="all 1 producers have closed it"):
        channel.put(1)
    with pytest.raises(ValueError, match="one producer too many"):
        channel.close()


def test_long_reasons_are_cut_and_never_lost():
    channel = Channel.create("reason")
    channel.abort("ü" * 2000)
    with pytest.raises(ChannelAborted, match=r"ü{400}"):
        channel.take()
    channel.close()  # a producer that cleans up after an abort is no mistake


def test_reopen_is_for_the_owner():
    channel = Channel.create("owned")
    with pytest.raises(ValueError, match="only its owner"):
        Channel.open(channel.address).reopen(1)
    channel.reopen(3)
    assert channel.stats().num_producers == 3


def test_channels_are_not_pickled():
    channel = Channel.create("pickled")
    with pytest.raises(TypeError, match=r"send channel\.address"):
        pickle.dumps(channel)
    assert pickle.loads(pickle.dumps(channel.address)) == channel.address  # noqa: S301 - multiprocessing does so


def test_stale_addresses_are_refused():
    channel = Channel.create("stale")
    address = channel.address
    assert isinstance(address, ChannelAddress)
    wrong = ChannelAddress(
        name="wrong",
        creator_pid=address.creator_pid,
        creator_start_ticks=address.creator_start_ticks,
        fd=address.fd,
        nonce=address.nonce ^ 1,
    )
    with pytest.raises(PeerLost, match="another file by now"):
        Channel.open(wrong)
    del channel
    gc.collect()
    with pytest.raises(PeerLost, match="'stale'"):
        Channel.open(address)
    with open("/dev/null") as unrelated:  # takes the descriptor's number
        assert unrelated.fileno() >= 0
        with pytest.raises(PeerLost, match="closed"):
            Channel.open(address)


# --- against a model --------------------------------------------------------------------------------------------------


class ChannelMachine(RuleBasedStateMachine):
    """Any sequence of puts, takes, and drops of taken tensors, against a plain list."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.channel = Channel.create("machine", capacity_items=8, capacity_bytes=200_000)
        self.waiting: list[tuple[int, int, float, int]] = []  # sequence, key, weight, number of elements
        self.num_put = 0

    @rule(num_elements=st.integers(0, 8000), key=st.integers(0, 2), weight=st.sampled_from([0.0, 1.0, 2.5]))
    def put(self, num_elements, key, weight):
        value = [self.num_put, np.full(num_elements, self.num_put)]
        try:
            self.channel.put(value, key=key, weight=weight, timeout_s=0)
        except ChannelTimeout:
            queued = sum(8 * size for *_, size in self.waiting) + 8 * num_elements
            assert len(self.waiting) == 8 or queued > 200_000 - 9 * 256, "refused although there is room"
        else:
            self.waiting.append((self.num_put, key, weight, num_elements))
            self.num_put += 1

    @rule(
        target=held,
        max_items=st.integers(1, 4),
        keys=st.none() | st.sets(st.integers(0, 2), min_size=1),
        max_weight=st.none() | st.sampled_from([1.0, 3.0]),
    )
    def take(self, max_items, keys, max_weight):
        expected = []
        for entry in self.waiting:
            if keys is None or entry[1] in keys:
                total = sum(weight for _, _, weight, _ in expected) + entry[2]
                if len(expected) == max_items or (expected and max_weight is not None and total > max_weight):
                    break
                expected.append(entry)
        try:
            items = self.channel.take(max_items=max_items, keys=keys and list(keys), max_weight=max_weight, timeout_s=0)
        except ChannelTimeout:
            items = []
        assert [(item.sequence, item.key, item.weight, len(item.value[1])) for item in items] == expected
        self.waiting = [entry for entry in self.waiting if entry not in expected]
        return multiple(*((item.sequence, item.value[1]) for item in items))

    @rule(pair=consumes(held))
    def drop(self, pair):
        sequence, array = pair
        assert (array == sequence).all()

    @invariant()
    def counts_agree(self):
        stats = self.channel.stats()
        assert (stats.num_items, stats.num_put) == (len(self.waiting), self.num_put)
        assert stats.num_taken == self.num_put - len(self.waiting)


TestChannelMachine = ChannelMachine.TestCase
TestChannelMachine.settings = settings(max_examples=60, stateful_step_count=40)
