"""A convolutional encoder for each camera: that of Mnih et al. (Nature 518, 2015), orthogonally initialised.

32 filters of 8 x 8 with stride 4, 64 of 4 x 4 with stride 2, 64 of 3 x 3 with stride 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rlinf_envs import FieldSpec
from rlinf_workers.policies.base import Fields, PolicyError
from rlinf_workers.policies.layers import in_own_dtype, orthogonal
from rlinf_workers.policies.pictures import chosen_cameras

MIN_SIDE = 36
"""Minimum side in pixels; with fewer, the last layer has no input."""


def encoded_cameras(fields: Mapping[str, FieldSpec], cameras: str | None) -> tuple[str, ...]:
    """As `chosen_cameras`. Raises: PolicyError also for pictures that are too small to encode."""
    chosen = chosen_cameras(fields, cameras)
    for name in chosen:
        height, width, _ = fields[name].shape
        if min(height, width) < MIN_SIDE:
            raise PolicyError(f"its encoder needs {MIN_SIDE} pixels per side, but {name!r} has {height} x {width}")
    return chosen


class PictureEncoder(nn.ModuleList):
    """Pictures [n, H, W, C] uint8 of all cameras -> [n, num_features].

    Args:
        cameras: fields of pictures.
    """

    def __init__(self, fields: Mapping[str, FieldSpec], cameras: Sequence[str]) -> None:
        super().__init__(_convolutions(fields[name].shape[-1]) for name in cameras)
        self._cameras = tuple(cameras)
        blank = {name: torch.zeros(1, *fields[name].shape) for name in cameras}
        self.num_features = self(blank).shape[-1]

    def forward(self, fields: Fields) -> Tensor:
        pictures = [fields[name].movedim(-1, -3).float() / 255 for name in self._cameras]
        return torch.cat([in_own_dtype(one, picture) for one, picture in zip(self, pictures, strict=True)], dim=-1)


def _convolutions(num_channels: int) -> nn.Sequential:
    """[n, C, H, W] in 0..1 -> [n, features]."""
    return nn.Sequential(
        orthogonal(nn.Conv2d(num_channels, 32, 8, stride=4)),
        nn.ReLU(),
        orthogonal(nn.Conv2d(32, 64, 4, stride=2)),
        nn.ReLU(),
        orthogonal(nn.Conv2d(64, 64, 3)),
        nn.ReLU(),
        nn.Flatten(),
    )
