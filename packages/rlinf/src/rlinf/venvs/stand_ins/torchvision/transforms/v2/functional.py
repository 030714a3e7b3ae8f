"""Stand-in for torchvision.transforms.v2.functional."""

from __future__ import annotations

from .. import InterpolationMode
from ..functional import pil_to_tensor

__all__ = ["InterpolationMode", "pil_to_tensor"]
