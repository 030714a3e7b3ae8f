"""Completions whose lengths are known beforehand, log-normal as those of reasoning are.

What ends a completion is a draw. Here the token with the id 0 is the stop token, which the inverted cumulative
distribution gives for the uniform number 0 and, as long as it has less than half of the probability, for none above
one half. So the noise of a completion of n tokens is 0 at its n-th token and above one half at all others; nothing else
of an engine is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_workers.engines import HuggingFaceEngine, SamplingSettings, sampling
from rlinf_workers.engines.huggingface import engine as huggingface, slots
from rlinf_workers.models import ModelSettings

SIGMA = 1.0
"""Standard deviation of the logarithm of a length."""


def lengths_of(seed: int, index: int, settings: SamplingSettings, mean_tokens: float) -> np.ndarray:
    """Tokens of a prompt's completions, [G] int64 from 1 to max_new_tokens: log-normal with this mean before what is
    too long is cut. The same in every step, so that steps can be compared."""
    generator = np.random.Generator(np.random.Philox(key=[seed + 1, index]))
    lengths = generator.lognormal(np.log(mean_tokens) - SIGMA**2 / 2, SIGMA, settings.group_size)
    return np.clip(np.rint(lengths), 1, settings.max_new_tokens).astype(np.int64)


def plant(mean_tokens: float) -> None:
    """Gives the engines of this process noise that ends completions at `lengths_of`."""

    def planted(keys: Sequence[sampling.NoiseKey], settings: SamplingSettings) -> Tensor:
        noise = sampling.prompt_noise(keys, settings) / 2 + 0.5
        lengths = [lengths_of(key.seed, key.index, settings, mean_tokens) for key in keys]
        ends = torch.from_numpy(np.concatenate(lengths)) - 1
        return noise.clamp_(max=1 - 2**-24).scatter_(1, ends[:, None], 0.0)

    huggingface.prompt_noise = slots.prompt_noise = planted


class PlantedEngine(HuggingFaceEngine):
    """The engine `huggingface` with completions of planted lengths.

    Args:
        mean_tokens: mean of the lengths, in training and evaluation.
    """

    def __init__(
        self, model: ModelSettings, device: torch.device, *, mean_tokens: float = 64.0, **options: Any
    ) -> None:
        super().__init__(model, device, **options)
        plant(mean_tokens)
        self._stop_ids = torch.zeros(1, dtype=torch.long, device=device)
        if self._slots is not None:
            self._slots._stop_ids = self._stop_ids
