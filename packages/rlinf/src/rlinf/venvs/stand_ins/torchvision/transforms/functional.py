"""Stand-in for torchvision.transforms.functional."""

from __future__ import annotations

from typing import Any, NoReturn

from . import InterpolationMode

__all__ = ["InterpolationMode", "pil_to_tensor", "to_pil_image"]


def pil_to_tensor(*_: Any, **__: Any) -> NoReturn:
    """Raises: NotImplementedError."""
    raise NotImplementedError(
        "torchvision's pil_to_tensor: this is rlinf's stand-in for CPUs, which converts no images"
    )


def to_pil_image(*_: Any, **__: Any) -> NoReturn:
    """Raises: NotImplementedError."""
    raise NotImplementedError("torchvision's to_pil_image: this is rlinf's stand-in for CPUs, which converts no images")
