"""Decides which boxes of a Gymnasium observation are images, and converts them to uint8 [H, W, C].

The declared space decides, and the values have to match it:

* Dtype and bounds: uint8, or any dtype whose bounds are 0 and 255, or 0 and 1 (black and white). A uint8 box with other
  bounds is an image too, whose values are not scaled.
* Axes: the channels are the first or the last axis, whichever has length 3, or else 1 or 4; otherwise the one that is
  at most a quarter as long as the other two axes (stacked frames). Two axes of at least 16 pixels are a grey image.

If that is ambiguous, nothing is guessed: the option `picture_layout` decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from gymnasium import spaces

from rlinf_envs.errors import EnvError

Layout = Literal["hwc", "chw", "hw"]
LAYOUTS = ("hwc", "chw", "state")
"""Values of the option `picture_layout`."""
_CHANNELS = ((3,), (1, 4))
"""RGB; grey, RGB with depth or opacity."""
_MIN_GREY_SIDE = 16
"""Smaller boxes of two axes are boards and grids."""
_STACK_RATIO = 4
"""An axis at least this many times shorter than the other two holds channels."""
_TOY_SIDE = 4
"""Images without a longer side are test data, read as [H, W, C]."""
_TOLERANCE = 1e-3
"""How far rounding may move a value out of its bounds, as a share of their distance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One box of an observation that is an image."""

    name: str
    """Name of the box in messages."""
    space: spaces.Box
    layout: Layout
    low: float
    """The value that is black."""
    high: float
    """The value that is white."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """[H, W, C]"""
        shape = self.space.shape
        if self.layout == "hw":
            return shape[0], shape[1], 1
        return shape if self.layout == "hwc" else (shape[1], shape[2], shape[0])  # pyright: ignore[reportReturnType]

    def read(self, value: object) -> np.ndarray:
        """Converts a value to [H, W, C] uint8. Raises: EnvError for values outside the space's bounds."""
        array = np.asarray(value)
        if array.shape != self.space.shape:
            raise EnvError(
                f"{self.name} has the shape {list(array.shape)}; its observation_space says {list(self.space.shape)}"
            )
        if array.dtype != np.uint8 or self.high != 255:
            array = self._as_uint8(array)
        if self.layout == "hw":
            return array[..., None]
        return array if self.layout == "hwc" else array.transpose(1, 2, 0)

    def notes(self, value: object) -> tuple[str, ...]:
        """Returns notes for the user about the first image, after `read`."""
        highest = float(np.max(np.asarray(value)))
        if self.high != 255 or not 0 < highest <= 1:
            return ()
        return (
            f"the brightest value of {self.name} is {highest:g} at first, and its observation_space says that 255 is "
            "white: policies see it as black. Return values from 0 to 255, or declare a Box from 0 to 1",
        )

    def _as_uint8(self, array: np.ndarray) -> np.ndarray:
        lowest, highest = float(array.min()), float(array.max())
        declared = f"its observation_space says {self.space.dtype} between {self.low:g} and {self.high:g}"
        if self.space.dtype == np.uint8 and np.issubdtype(array.dtype, np.floating):
            raise EnvError(
                f"{self.name} has {array.dtype} values between {lowest:g} and {highest:g}; {declared}. Return "
                f"{'(255 * picture)' if highest <= 1 else 'picture'}.astype(np.uint8), or declare "
                "Box(0.0, 1.0, shape, np.float32) for values between 0 and 1"
            )
        slack = _TOLERANCE * (self.high - self.low)
        if not (self.low - slack <= lowest and highest <= self.high + slack):  # also true for NaN
            raise EnvError(f"{self.name} has values between {lowest:g} and {highest:g}; {declared}")
        scaled = (array.astype(np.float64) - self.low) * (255 / (self.high - self.low))
        return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def picture_of(space: spaces.Space, name: str, layout: str | None) -> Picture | None:
    """Returns how to read a part of an observation as an image; None: it holds numbers.

    Args:
        name: the part's name, for messages.
        layout: one of `LAYOUTS`, which decides for boxes of three axes; None: the rules of this module.

    Raises: EnvError for an ambiguous box; it names the option that decides.
    """
    if not isinstance(space, spaces.Box) or layout == "state" or len(space.shape) < 2:
        return None
    bounds = _bounds(space)
    is_uint8 = space.dtype == np.uint8
    described = f"{name} is {space.dtype} of shape {list(space.shape)}"
    if len(space.shape) == 2:
        is_grey = is_uint8 and bounds == (0, 255) and min(space.shape) >= _MIN_GREY_SIDE
        return Picture(name=name, space=space, layout="hw", low=0, high=255) if is_grey else None
    if len(space.shape) > 3:
        if is_uint8 or bounds is not None:
            raise EnvError(
                f"{described}, and a picture has three axes, [H, W, C]: put stacked frames into the channels, or set "
                "the option picture_layout=state to read it as numbers"
            )
        return None
    axes = layout or _axes(space.shape)
    if axes is None and not is_uint8:
        return None
    if layout is None and (axes in (None, "either") or (not is_uint8 and bounds is None)):
        raise EnvError(
            f"{described} with values between {space.low.min():g} and {space.high.max():g}, which may be a picture or "
            "not: set the option picture_layout (env.options.picture_layout of a run) to hwc (channels last), chw "
            "(channels first) or state (numbers). A picture has bounds of 0 and 255, or 0 and 1"
        )
    if bounds is None and not is_uint8:
        bounds = float(space.low.min()), float(space.high.max())
        if not np.isfinite(bounds).all() or bounds[0] >= bounds[1]:
            raise EnvError(f"{described} without bounds, so nobody knows what is white; declare low and high")
    low, high = bounds or (0.0, 255.0)
    return Picture(name=name, space=space, layout="chw" if axes == "chw" else "hwc", low=low, high=high)


def _bounds(space: spaces.Box) -> tuple[float, float] | None:
    """Returns the values of black and white if the bounds are those of an image."""
    if not (space.low == 0).all():
        return None
    return next(((0.0, high) for high in (255.0, 1.0) if (space.high == high).all()), None)


def _axes(shape: tuple[int, ...]) -> str | None:
    """Returns hwc, chw or either; None: neither the first nor the last axis holds channels."""
    first, middle, last = shape
    sides = {"chw": min(middle, last), "hwc": min(first, middle)}
    for sizes in _CHANNELS:
        ends = [name for name, size in (("chw", first), ("hwc", last)) if size in sizes]
        if ends:
            break
    else:
        sized = (("chw", first), ("hwc", last))
        ends = [name for name, size in sized if size * _STACK_RATIO <= sides[name]]
    if len(ends) == 2:
        return "hwc" if max(shape) <= _TOY_SIDE else "either"
    return ends[0] if ends else None
