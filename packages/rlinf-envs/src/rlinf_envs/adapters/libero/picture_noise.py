"""Degraded pictures of LIBERO-Plus (arXiv:2510.13626): five kinds after Hendrycks and Dietterich (arXiv:1903.12261),
each in ten strengths.

1-10 motion blur, 11-20 Gaussian blur, 21-30 zoom blur, 31-40 fog, 41-50 frosted glass. LIBERO-Plus draws random numbers
from numpy's global generator, and calls ImageMagick for motion blur; here the generator is the episode's, and motion
blur follows ImageMagick's published formula, so pictures are alike and not equal.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np

NOISE_SIZE = 256
"""Side of the pictures that the degradations are defined for, in pixels."""
_MOTIONS = ((5, 2), (8, 3), (10, 4), (12, 5), (15, 6), (18, 8), (20, 10), (25, 12), (30, 15), (35, 20))
"""(radius, standard deviation) in pixels."""
_ZOOMS = (
    *((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    *((1.36, 0.01), (1.41, 0.01), (1.46, 0.02), (1.51, 0.02), (1.56, 0.03)),
)
"""(end, step) of the factors, which begin at 1."""
_FOGS = (
    *((0.5, 3.0), (1.0, 2.8), (1.5, 2.5), (2.0, 2.2), (2.5, 2.0)),
    *((3.0, 1.8), (3.5, 1.6), (4.0, 1.5), (4.5, 1.4), (5.0, 1.3)),
)
"""(amount, decay of the fractal)."""
_GLASSES = (
    *((0.5, 1, 3), (0.7, 1, 3), (0.9, 2, 3), (1.0, 2, 2), (1.1, 3, 2)),
    *((1.3, 3, 2), (1.5, 4, 2), (1.8, 4, 2), (2.2, 5, 1), (2.5, 5, 1)),
)
"""(standard deviation of the blur, largest move in pixels, repetitions)."""
_GLASS_SIZE = 224
"""Rows and columns that glass shuffles."""


def degraded(picture: np.ndarray, number: int, random: np.random.Generator) -> np.ndarray:
    """Returns a degraded picture, uint8.

    Args:
        picture: [256, 256, 3] uint8.
        number: 1 to 50.
    """
    kind, strength = divmod(number - 1, 10)
    values = picture.astype(np.float64) / 255
    result = (_motion, _gaussian, _zoom, _fog, _glass)[kind](values, strength, random)
    return (np.clip(result, 0, 1) * 255).astype(np.uint8)


def _motion(picture: np.ndarray, strength: int, random: np.random.Generator) -> np.ndarray:
    radius, deviation = _MOTIONS[strength]
    angle = math.radians(random.uniform(-45, 45))
    width = 2 * radius + 1
    weights = np.exp(-(np.arange(width) ** 2) / (2 * deviation**2))
    result = np.zeros_like(picture)
    rows, columns = np.indices(picture.shape[:2])
    for i, weight in enumerate(weights / weights.sum()):
        down, right = math.ceil(i * math.sin(angle) - 0.5), math.ceil(i * math.cos(angle) - 0.5)
        row, column = np.clip(rows + down, 0, len(picture) - 1), np.clip(columns + right, 0, picture.shape[1] - 1)
        result += weight * picture[row, column]
    return result


def _gaussian(picture: np.ndarray, strength: int, random: np.random.Generator) -> np.ndarray:
    return _blurred(picture, strength + 1)


def _zoom(picture: np.ndarray, strength: int, random: np.random.Generator) -> np.ndarray:
    end, step = _ZOOMS[strength]
    factors = np.arange(1, end, step)
    images: Any = importlib.import_module("scipy.ndimage")
    total, size = picture.copy(), len(picture)
    for factor in factors:
        inner = math.ceil(size / factor)
        top = (size - inner) // 2
        larger = images.zoom(picture[top : top + inner, top : top + inner], (factor, factor, 1), order=1)
        trim = (len(larger) - size) // 2
        total += larger[trim : trim + size, trim : trim + size]
    return total / (len(factors) + 1)


def _fog(picture: np.ndarray, strength: int, random: np.random.Generator) -> np.ndarray:
    amount, decay = _FOGS[strength]
    brightest = picture.max()
    fog = picture + amount * _plasma(NOISE_SIZE, decay, random)[..., None]
    return fog * brightest / (brightest + amount)


def _glass(picture: np.ndarray, strength: int, random: np.random.Generator) -> np.ndarray:
    deviation, largest, repetitions = _GLASSES[strength]
    pixels = (_blurred(picture, deviation) * 255).astype(np.uint8)
    rows = np.arange(pixels.shape[0] * pixels.shape[1]).reshape(pixels.shape[:2]).tolist()  # lists: faster to change
    # A pixel changes places with one beside it, one after the other, since moves follow each other.
    places = range(_GLASS_SIZE - largest, largest, -1)
    for _ in range(repetitions):
        moves = random.integers(-largest, largest, (len(places), len(places), 2)).tolist()
        for place, moves_in_row in zip(places, moves, strict=True):
            row = rows[place]
            for column, (right, down) in zip(places, moves_in_row, strict=True):
                other, beside = rows[place + down], column + right
                row[column], other[beside] = other[beside], row[column]
    shuffled = pixels.reshape(-1, 3)[np.array(rows)]
    return _blurred(shuffled / 255, deviation)


def _blurred(picture: np.ndarray, deviation: float) -> np.ndarray:
    images: Any = importlib.import_module("scipy.ndimage")
    return images.gaussian_filter(picture, (deviation, deviation, 0), mode="nearest", truncate=4.0)


def _plasma(size: int, decay: float, random: np.random.Generator) -> np.ndarray:
    """Returns a fractal of clouds by the diamond-square algorithm, [size, size] from 0 to 1."""
    clouds = np.zeros((size, size))
    step, wobble = size, 100.0

    def mean_of(sums: np.ndarray) -> np.ndarray:
        return sums / 4 + wobble * random.uniform(-wobble, wobble, sums.shape)

    while step >= 2:
        half = step // 2
        corners = clouds[0:size:step, 0:size:step]
        sums = corners + np.roll(corners, -1, 0)
        sums = sums + np.roll(sums, -1, 1)
        clouds[half:size:step, half:size:step] = mean_of(sums)
        squares, corners = clouds[half:size:step, half:size:step], clouds[0:size:step, 0:size:step]
        upper = corners + np.roll(corners, -1, 1)
        clouds[0:size:step, half:size:step] = mean_of(squares + np.roll(squares, 1, 0) + upper)
        left = corners + np.roll(corners, -1, 0)
        clouds[half:size:step, 0:size:step] = mean_of(squares + np.roll(squares, 1, 1) + left)
        step, wobble = half, wobble / decay
    clouds -= clouds.min()
    return clouds / clouds.max()
