"""Prepares pictures for the vision towers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def resized(pictures: Tensor, size: int) -> Tensor:
    """[n, H, W, 3] uint8 -> [n, 3, size, size] float32 in 0..1.

    The published processor's `resize-naive`: both sides to `size` whatever their ratio, bicubic with antialiasing,
    rounded to integer levels after the rows and again after the columns, as in Pillow. (Recent releases of Pillow start
    with the columns for some pictures that are not square.)
    """
    x = pictures.movedim(-1, 1).float()
    for target in ((x.shape[-2], size), (size, size)):
        if x.shape[-2:] != target:
            x = F.interpolate(x, target, mode="bicubic", antialias=True).round().clamp(0, 255)
    return x / 255


CROP_SHARE = 0.9
"""Share of a picture's area that is kept, in its centre."""


def center_cropped(pictures: Tensor) -> Tensor:
    """[n, 3, size, size] in 0..1 -> the centre of the pictures in the same size, for checkpoints that were fine-tuned
    on random crops of that share. Like TensorFlow's `crop_and_resize`: bilinear between corners, rounded down to
    levels."""
    share = CROP_SHARE**0.5
    turn = pictures.new_tensor([[share, 0.0, 0.0], [0.0, share, 0.0]]).expand(len(pictures), 2, 3)
    grid = F.affine_grid(turn, list(pictures.shape), align_corners=True)
    return (F.grid_sample(pictures, grid, align_corners=True) * 255.5).floor().clamp(0, 255) / 255


def normalized(pictures: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """[n, 3, H, W] with the mean of each colour subtracted, divided by its standard deviation."""
    shift, scale = (torch.tensor(row, device=pictures.device)[:, None, None] for row in (mean, std))
    return (pictures - shift) / scale
