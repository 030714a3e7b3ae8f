"""rlinf_comm.testing: the comparison says where, and the checks notice a channel or layout that is wrong."""

import dataclasses

import comm_channel_checks
import numpy as np
import pytest
import torch
from comm_channel_checks import CHANNEL_CHECKS, check_hoarding, check_order, check_privacy

from rlinf_comm import Channel, LayoutError
from rlinf_comm.testing import LAYOUT_CHECKS, assert_bitwise_equal
from rlinf_comm.weights import Block, Box, BufferSpec, Layout, RankLayout, TensorSpec


def test_equal_values_pass():
    nan = torch.tensor([float("nan"), -0.0])
    assert_bitwise_equal(nan, nan.clone())
    assert_bitwise_equal({"a": [nan, (1, "x", None)]}, {"a": [nan.clone(), (1, "x", None)]})
    assert_bitwise_equal(torch.empty(0, 3), torch.empty(0, 3))
    assert_bitwise_equal(torch.zeros(4, 3).T, torch.zeros(3, 4))


@dataclasses.dataclass
class Record:
    x: object


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (
            {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])},
            {"w": torch.tensor([[1.0, 2.0], [3.5, 4.5]])},
            "value['w'][1, 0]: 3.0 (0x40400000) instead of 3.5 (0x40600000); 2 of 4 elements differ",
        ),
        (torch.tensor(0.0), torch.tensor(-0.0), "value[]: 0.0 (0x00000000) instead of -0.0 (0x80000000); 1 of 1"),
        (np.array([1, 2], "i2"), np.array([1, 3], "i2"), "value[1]: 2 (0x0002) instead of 3 (0x0003); 1 of 2"),
        (torch.zeros(2), torch.zeros(2).half(), "value: dtype torch.float32 instead of torch.float16"),
        (torch.zeros(2), torch.zeros(1, 2), "value: shape (2,) instead of (1, 2)"),
        (Record([1, 2.0]), Record([1, -2.0]), "value.x[1]: 2.0 instead of -2.0"),
        (0.0, -0.0, "value: 0.0 instead of -0.0"),
        ((1,), [1], "value: a tuple instead of a list"),
        ([1], [1, 2], "value: 1 elements instead of 2"),
        ({"a": 1}, {"b": 1}, "value: keys ['a'] instead of ['b']"),
        ("a", "b", "value: 'a' instead of 'b'"),
    ],
)
def test_differences_are_located(actual, expected, message):
    with pytest.raises(AssertionError) as caught:
        assert_bitwise_equal(actual, expected)
    assert message in str(caught.value)


class Wrong:
    """A channel with one method replaced."""

    def __init__(self, *arguments, **options):
        self._channel = Channel.create(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self._channel, name)


class LastFirst(Wrong):
    def take(self, **options):
        return self._channel.take(**options)[::-1]


class Sharing(Wrong):
    """Hands out what the producer still holds."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._sent = []

    def put(self, value, **options):
        self._sent.append(value)
        self._channel.put(value, **options)

    def take(self, **options):
        return [dataclasses.replace(item, value=self._sent.pop(0)) for item in self._channel.take(**options)]


class Losing(Wrong):
    def take(self, **options):
        items = self._channel.take(**options)
        return items or self._channel.take(**options)

    def put(self, value, **options):
        if not (isinstance(value, np.ndarray) and value[0] == 7):
            self._channel.put(value, **options)


@pytest.mark.parametrize(
    ("check", "channel"), [(check_order, LastFirst), (check_privacy, Sharing), (check_hoarding, Losing)]
)
def test_checks_notice_a_wrong_channel(check, channel):
    with pytest.raises(AssertionError):
        check(channel)


def test_all_checks_are_listed():
    names = [name for name in vars(comm_channel_checks) if name.startswith("check_")]
    assert [check.__name__ for check in CHANNEL_CHECKS] == names


# --- layouts ----------------------------------------------------------------------------------------------------------

SPECS = {"w": TensorSpec((3, 2), "float32"), "n": TensorSpec((4,), "int64")}


def unchecked(*blocks, size=8):
    """A layout that was never validated, as one that a broken builder or codec could make."""
    layout = object.__new__(Layout)
    buffers = {"w": BufferSpec((size,), "float32"), "n": BufferSpec((4,), "int64")}
    n = Block("n", SPECS["n"].whole, "n", 0, (1,))
    layout.__dict__.update(specs=SPECS, ranks=(RankLayout(buffers, (*blocks, n)),))
    return layout


@pytest.mark.parametrize("check", LAYOUT_CHECKS, ids=lambda check: check.__name__)
def test_sound_layouts_pass(check):
    check(Layout.sharded(SPECS, 3, dtype="bfloat16"))
    check(unchecked(Block("w", Box((0, 0), (3, 2)), "w", 2, (2, 1))))


def failing(layout):
    names = set()
    for check in LAYOUT_CHECKS:
        try:
            check(layout)
        except (AssertionError, LayoutError):
            names.add(check.__name__)
    return names


def test_layouts_that_miss_an_element_fail():
    missing = unchecked(Block("w", Box((0, 0), (2, 2)), "w", 0, (2, 1)))
    assert failing(missing) == {"check_covers_every_tensor", "check_round_trip"}


def test_layouts_with_blocks_on_top_of_each_other_fail():
    halves = Box((0, 0), (2, 2)), Box((2, 0), (1, 2))
    on_top = unchecked(Block("w", halves[0], "w", 0, (2, 1)), Block("w", halves[1], "w", 3, (2, 1)))
    assert failing(on_top) == {"check_stores_nothing_twice", "check_round_trip"}
    twice = unchecked(Block("w", SPECS["w"].whole, "w", 0, (2, 1)), Block("w", halves[1], "w", 6, (2, 1)))
    assert "check_stores_nothing_twice" in failing(twice)
