"""Stand-in for torchvision.transforms.functional."""

from __future__ import annotations

from typing import Any, NoReturn

from . import InterpolationMode

__all__ = ["InterpolationMode", "pil_to_tensor"]


def pil_to_tensor(*_: Any, **__: Any) -> NoReturn:
    """Raises: NotImplementedError."""
    raise NotImplementedError(
        "torchvision's pil_to_tensor: this is rlinf's stand-in for CPUs, which converts no images"
    )
