"""Discrete actions, each dimension one of so many choices.

A category is drawn by the Gumbel-max rule (arXiv:1611.01144, eq. 1) from standard normal noise, as a Gaussian is: if z
is standard normal with distribution function Phi, then Phi(z) is uniform and -log(-log Phi(z)) is Gumbel.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Categories:
    """Discrete actions: each dimension is one of so many choices, 0 being the first."""

    def __init__(self, logits: Tensor, num_choices: tuple[int, ...]) -> None:
        """Args: logits: [..., sum(num_choices)], the dimensions of an action side by side."""
        self._num_choices = num_choices
        self._logprobs = [part.log_softmax(-1) for part in logits.split(num_choices, dim=-1)]

    def mode(self) -> Tensor:
        return torch.stack([logprobs.argmax(-1) for logprobs in self._logprobs], dim=-1)

    def sample(self, noise: Tensor) -> Tensor:
        gumbel = -torch.log(-torch.special.log_ndtr(noise.double()))
        parts = gumbel.split(self._num_choices, dim=-1)
        return torch.stack([(p + g).argmax(-1) for p, g in zip(self._logprobs, parts, strict=True)], dim=-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        chosen = [p.gather(-1, actions[..., i, None])[..., 0] for i, p in enumerate(self._logprobs)]
        return torch.stack(chosen).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([-(p.exp() * p).sum(-1) for p in self._logprobs]).sum(0)
