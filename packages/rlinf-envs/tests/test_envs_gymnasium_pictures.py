"""Pictures in Gymnasium's boxes: the picture comes out, or an error says what to do."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlinf_envs import EnvError
from rlinf_envs.adapters.gymnasium.env import GymnasiumEnv

RGB = (np.arange(16 * 12 * 3).reshape(16, 12, 3) % 256).astype(np.uint8)


class Shows(gymnasium.Env):
    """One value, whatever its space says."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space, value: Any) -> None:
        self.observation_space, self.value = space, value

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.value, {}


def seen(space: spaces.Space, value: Any, layout: str | None = None) -> tuple[str, Any]:
    env = GymnasiumEnv(Shows(space, value), picture_layout=layout)
    env.reset(0)
    ((name, array),) = env.observe().items()
    assert isinstance(array, np.ndarray) and array.shape == env.observation_spec[name].shape
    return name, array


def box(low: Any, high: Any, shape: tuple[int, ...], dtype: Any = np.uint8) -> spaces.Box:
    return spaces.Box(low, high, shape, dtype)


CHW = RGB.transpose(2, 0, 1)
STACK = np.concatenate([RGB.transpose(2, 0, 1)[:, :, :12]] * 4)[:, :16].repeat(5, 1).repeat(5, 2)


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        (box(0, 255, RGB.shape), RGB, RGB),
        (box(0, 255, RGB.shape), RGB.astype(np.int64), RGB),
        (box(0, 255, CHW.shape), CHW, RGB),
        (box(0.0, 1.0, RGB.shape, np.float32), (RGB / 255).astype(np.float32), RGB),
        (box(0.0, 1.0, CHW.shape, np.float64), CHW / 255, RGB),
        (box(0.0, 255.0, RGB.shape, np.float32), RGB.astype(np.float32), RGB),
        (box(0, 1, RGB.shape), RGB % 2, RGB % 2 * 255),
        (box(0, 255, (1, 16, 12)), CHW[:1], RGB[..., :1]),
        (box(0, 255, (16, 20)), RGB.reshape(16, 36)[:, :20], RGB.reshape(16, 36)[:, :20, None]),
        (box(0, 255, (4, 6, 3)), RGB[:4, :6], RGB[:4, :6]),
        (box(0, 255, STACK.shape), STACK, STACK.transpose(1, 2, 0)),
    ],
)
def test_the_declared_space_says_what_is_a_picture(space: spaces.Box, value: np.ndarray, expected: np.ndarray) -> None:
    name, array = seen(space, value)
    assert (name, array.dtype) == ("image.main", np.uint8)
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (
            box(0, 255, RGB.shape),
            RGB / 255,
            r"float64 values between 0 and 1; .*uint8 between 0 and 255.*\(255 \* pict",
        ),
        (box(0, 255, RGB.shape), RGB.astype(np.float32), r"float32 values between 0 and 255; .* picture.astype"),
        (box(0, 255, RGB.shape), RGB.astype(np.int16) - 1, "values between -1 and 254"),
        (box(0.0, 1.0, RGB.shape, np.float32), RGB, "values between 0 and 255; its observation_space says float32 bet"),
        (box(0.0, 1.0, RGB.shape, np.float32), RGB * np.nan, "values between nan and nan"),
        (box(0, 255, RGB.shape), CHW, r"the shape \[3, 16, 12\]; its observation_space says \[16, 12, 3\]"),
    ],
)
def test_values_that_the_space_does_not_declare_are_refused(space: spaces.Box, value: np.ndarray, text: str) -> None:
    with pytest.raises(EnvError, match=text):
        seen(space, value)


@pytest.mark.parametrize(
    "space",
    [
        box(0, 255, (3, 16, 3)),
        box(0, 255, (4, 16, 1)),
        box(0, 255, (10, 12, 9)),
        box(-np.inf, np.inf, (7, 7, 3), np.float32),
        box(0, 10, (7, 7, 3), np.int64),
    ],
)
def test_what_may_be_a_picture_or_not_needs_the_option(space: spaces.Box) -> None:
    value = np.ones(space.shape, space.dtype)
    with pytest.raises(
        EnvError, match=r"may be a picture or not: set the option picture_layout .* hwc .* chw .* state"
    ):
        seen(space, value)
    name, array = seen(space, value, "state")
    assert (name, array.tolist()) == ("state", [1.0] * value.size)
    if space.dtype == np.uint8:
        assert seen(space, value, "chw")[1].shape == (*space.shape[1:], space.shape[0])


def test_frames_on_an_axis_of_their_own_are_refused() -> None:
    with pytest.raises(EnvError, match=r"of shape \[4, 16, 12, 3\], and a picture has three axes"):
        seen(box(0, 255, (4, 16, 12, 3)), np.zeros((4, 16, 12, 3), np.uint8))


def test_numbers_of_an_integer_space_are_not_cut() -> None:
    assert seen(box(0, 255, (2,)), np.array([0.5, 0.25]))[1].tolist() == [0.5, 0.25]
    assert seen(spaces.Box(0, 9, (2, 2), np.int64), np.full((2, 2), 0.5))[1].tolist() == [0.5] * 4
    assert seen(box(0.0, 1.0, (5, 5, 5), np.float32), np.ones((5, 5, 5)))[0] == "state"


def test_a_layout_that_is_none_is_refused() -> None:
    with pytest.raises(EnvError, match="picture_layout='rgb'; allowed: hwc, chw, state"):
        seen(box(0, 255, RGB.shape), RGB, "rgb")


@pytest.mark.parametrize(
    ("dtype", "values", "is_noted"),
    [
        (np.uint8, [0, 1, 1], True),
        (np.float32, [0.0, 0.3, 0.9], True),
        (np.uint8, [0, 0, 0], False),
        (np.uint8, [0, 1, 2], False),
    ],
)
def test_a_first_picture_that_is_all_but_black_is_noted(dtype: type, values: list[float], is_noted: bool) -> None:
    space = box(0, 255, (6, 6, 3), dtype)
    env = GymnasiumEnv(Shows(space, np.full((6, 6, 3), values, dtype)))
    for seed in (0, 1):
        env.reset(seed)
        env.observe()
    text = (
        f"the brightest value of the observation is {max(values):g} at first, and its observation_space says that 255"
    )
    assert [note.startswith(text) for note in env.notes] == [True] * is_noted
