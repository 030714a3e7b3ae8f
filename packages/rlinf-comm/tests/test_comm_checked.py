"""Channel.create(checked=True): what was put is what is taken, for copies and for tensors by reference."""

import ctypes
import pathlib

import numpy as np
import pytest
import torch

from rlinf_comm import Channel, DecodeError, SharedPool, UnsupportedValueError
from rlinf_comm.testing import assert_bitwise_equal

HANG_S = 20.0
NUM_FLIPS = 1000


@pytest.fixture
def channel():
    return Channel.create("checked", checked=True, capacity_bytes=4 << 20)


def test_values_cross_unchanged_also_for_who_opens_it(channel):
    value = {"w": torch.arange(20.0).reshape(4, 5).T, "a": np.arange(6)[::2], "n": [1, None, "ü", 1 << 70]}
    opened = Channel.open(channel.address)
    opened.put(value, key=3, weight=2.0, policy_version=7)
    (item,) = channel.take(timeout_s=HANG_S)
    assert_bitwise_equal(item.value, value)
    assert (item.key, item.weight, item.policy_version) == (3, 2.0, 7)


def test_what_cannot_cross_is_named_as_ever(channel):
    with pytest.raises(UnsupportedValueError, match=r"value\['f'\]\[0\]|f\[0\]"):
        channel.put({"f": [print]})


def flip(tensor: torch.Tensor, bit: int) -> None:
    tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


def test_each_flipped_bit_of_a_pooled_tensor_is_caught(channel):
    pool = SharedPool.create("flips", capacity_bytes=1 << 20)
    tensor = pool.copy_of(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    bits = np.random.default_rng(0).choice(8 * tensor.nbytes, NUM_FLIPS, replace=False).tolist()
    for bit in bits:
        channel.put({"w": tensor[:], "step": 1})
        flip(tensor, bit)
        with pytest.raises(DecodeError, match=r"channel 'checked', item \d+: its bytes are not those that were put"):
            channel.take(timeout_s=HANG_S)
        flip(tensor, bit)
    channel.put(tensor)
    assert_bitwise_equal(channel.take(timeout_s=HANG_S)[0].value, tensor)


def memory_of(label: str) -> tuple[int, int]:
    """(address, bytes) of the segment that /proc shows under this name."""
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    (line,) = [line for line in maps if f"memfd:rlinf:{label} " in line]
    start, end = (int(number, 16) for number in line.split()[0].split("-"))
    return start, end - start


def test_each_flipped_bit_of_a_copied_tensor_is_caught():
    channel = Channel.create("flipped", checked=True, capacity_bytes=1 << 16)
    array = np.random.default_rng(1).random(1000)
    start, num_bytes = memory_of("flipped")
    for bit in np.random.default_rng(0).choice(8 * array.nbytes, NUM_FLIPS, replace=False).tolist():
        channel.put({"w": array, "step": 1})
        there = start + ctypes.string_at(start, num_bytes).index(array.tobytes()) + bit // 8
        ctypes.c_uint8.from_address(there).value ^= 1 << bit % 8
        with pytest.raises(DecodeError, match=r"channel 'flipped', item \d+: its bytes are not those that were put"):
            channel.take(timeout_s=HANG_S)
        ctypes.c_uint8.from_address(there).value ^= 1 << bit % 8
    channel.put(array)
    assert_bitwise_equal(channel.take(timeout_s=HANG_S)[0].value, array)
