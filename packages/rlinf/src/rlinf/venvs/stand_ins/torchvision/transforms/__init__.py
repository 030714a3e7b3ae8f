"""Stand-in for torchvision.transforms."""

from __future__ import annotations

from enum import Enum


class InterpolationMode(Enum):
    """How images are resized; torchvision's names and values, which transformers maps to Pillow's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
