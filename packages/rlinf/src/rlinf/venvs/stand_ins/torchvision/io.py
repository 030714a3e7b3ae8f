"""Stand-in for torchvision.io."""

from __future__ import annotations

from enum import Enum
from typing import Any, NoReturn


class ImageReadMode(Enum):
    """Colour modes for reading files; torchvision's names and values."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


def decode_image(*_: Any, **__: Any) -> NoReturn:
    """Raises: NotImplementedError."""
    raise NotImplementedError("torchvision.io.decode_image: this is rlinf's stand-in for CPUs, which reads no images")
