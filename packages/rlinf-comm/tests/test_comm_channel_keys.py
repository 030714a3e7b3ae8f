"""Text keys, shares of keys, and sums of weights."""

import threading

import numpy as np
import pytest

from rlinf_comm import Channel, ChannelTimeout


def values_of(items):
    return [item.value for item in items]


def test_texts_and_numbers_are_keys():
    channel = Channel.create("texts")
    for key in ("math", 7, "code", "math", -1, "ünï"):
        channel.put(f"item of {key}", key=key)
    assert [item.key for item in channel.take(keys=["math"], max_items=9)] == ["math", "math"]
    assert [item.key for item in channel.take(keys=[-1, "ünï", 7], max_items=9)] == [7, -1, "ünï"]
    (left,) = channel.take(max_items=9)
    assert (left.key, left.value) == ("code", "item of code")
    for wrong in ("", "\ud800", 1.5, None, 1 << 64):
        with pytest.raises(ValueError, match=r"key=.* a number of 64 bits with its sign, or a text that is not empty"):
            channel.put(1, key=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a number of 64 bits with its sign"):
            channel.take(keys=[wrong], timeout_s=0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a sequence of keys"):
        channel.take(keys="math")


def test_a_text_and_the_number_it_gives_are_two_keys():
    channel = Channel.create("collision")
    number = fnv(b"math")
    channel.put("text", key="math")
    channel.put("number", key=number)
    assert values_of(channel.take(keys=[number], max_items=2)) == ["number"]
    assert values_of(channel.take(keys=["math"], max_items=2)) == ["text"]


def fnv(text):
    number = 0xCBF29CE484222325
    for byte in text:
        number = (number ^ byte) * 0x100000001B3 % (1 << 64)
    return number - (1 << 64) if number >= 1 << 63 else number


def test_a_key_keeps_its_text_beside_tensors():
    channel = Channel.create("text and tensors")
    channel.put({"a": np.arange(3000), "b": np.ones(5)}, key="k" * 300)
    (item,) = channel.take()
    assert item.key == "k" * 300 and item.value["a"][-1] == 2999 and item.value["b"].sum() == 5


def test_a_channel_full_of_one_key_has_room_for_another(start_peer):
    """Each key may fill no more than its share; a producer that waits for room for its own key starves nobody."""
    channel = Channel.create("shares", capacity_items=8, num_producers=2, num_keys=2)
    with start_peer("produce_one_key", channel.address, "greedy", 6) as greedy:
        while channel.stats().num_items < 4 or channel.stats().num_blocked_puts < 1:
            assert greedy.process.poll() is None
        with pytest.raises(ChannelTimeout, match=r"4 with key 'greedy'.* each of num_keys=2 keys may fill"):
            channel.take(keys=["rare"], timeout_s=0.05)
        for index in range(4):
            channel.put(index, key="rare", timeout_s=0)
        with pytest.raises(ChannelTimeout):
            channel.put(4, key="rare", timeout_s=0)
        assert values_of(channel.take(keys=["rare"], max_items=4)) == [0, 1, 2, 3]
        assert values_of(channel.take(keys=["greedy"], min_items=4, max_items=4)) == [0, 1, 2, 3]
        assert values_of(channel.take(keys=["greedy"], min_items=2, max_items=4, timeout_s=60)) == [4, 5]


def test_shares_hold_for_bytes():
    channel = Channel.create("byte shares", capacity_bytes=64_000, num_keys=2)
    channel.put(bytes(20_000), key=0)
    with pytest.raises(ChannelTimeout):
        channel.put(bytes(20_000), key=0, timeout_s=0)
    channel.put(bytes(20_000), key=1, timeout_s=0)
    with pytest.raises(ValueError, match="does not fit capacity_bytes=64000 shared by num_keys=2"):
        channel.put(bytes(40_000), key=2)
    with pytest.raises(ValueError, match="num_keys=9 with capacity_items=4"):
        Channel.create("few", capacity_items=4, num_keys=9)


def test_a_take_says_that_the_channel_is_full_of_other_keys():
    channel = Channel.create("starved", capacity_items=3)
    for index in range(3):
        channel.put(index, key=index // 2)
    with pytest.raises(ChannelTimeout):
        channel.put(3, key=5, timeout_s=0)
    with pytest.raises(ChannelTimeout) as caught:
        channel.take(keys=[5], timeout_s=0)
    for part in ("take of 1 items with keys [5]", "2 with key 0, 1 with key 1 were not asked for", "num_keys="):
        assert part in str(caught.value)


def test_a_take_waits_for_a_sum_of_weights():
    channel = Channel.create("weights")
    for weight in (2.0, 3.0):
        channel.put(weight, weight=weight)
    with pytest.raises(ChannelTimeout):
        channel.take(max_items=9, min_weight=5.5, timeout_s=0)
    assert values_of(channel.take(max_items=9, min_weight=5.0, timeout_s=0)) == [2.0, 3.0]
    channel.put(1.0, weight=1.0)
    later = threading.Timer(0.05, lambda: channel.put(8.0, weight=8.0))
    later.start()
    assert values_of(channel.take(max_items=9, min_weight=4.0, timeout_s=60)) == [1.0, 8.0]
    channel.put(1.0, weight=1.0)
    assert values_of(channel.take(max_items=1, min_weight=4.0, timeout_s=0)) == [1.0], "max_items comes first"
    channel.put(0.5, weight=0.5)
    channel.close()
    assert values_of(channel.take(max_items=9, min_weight=4.0)) == [0.5], "a closed channel gives what is left"
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="min_weight"):
            channel.take(min_weight=wrong)
    with pytest.raises(ValueError, match="from 0 to max_weight=3"):
        channel.take(min_weight=4.0, max_weight=3.0)


def test_exactly_the_weight_ends_a_take():
    channel = Channel.create("exact")
    for weight in (2.0, 3.0):
        channel.put(weight, weight=weight)
    assert values_of(channel.take(max_items=9, min_items=9, max_weight=5.0, timeout_s=0)) == [2.0, 3.0]
    for weight in (5.0, 0.0, 0.0, 1.0):
        channel.put(weight, weight=weight)
    assert values_of(channel.take(max_items=9, min_items=9, max_weight=5.0, timeout_s=0)) == [5.0, 0.0, 0.0]
