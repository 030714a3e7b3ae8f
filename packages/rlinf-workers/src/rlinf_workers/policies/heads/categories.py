"""Discrete actions: each dimension is one of a fixed number of choices.

A category is sampled by the Gumbel-max rule (arXiv:1611.01144, eq. 1) from standard normal noise, like a Gaussian: if z
is standard normal with distribution function Phi, then Phi(z) is uniform and -log(-log Phi(z)) is Gumbel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_workers.policies.heads.base import ActionHead


class CategoriesHead(ActionHead):
    """Each dimension is a choice, counted from 0; the outputs are the concatenated logits of the dimensions."""

    def __init__(self, num_choices: tuple[int, ...]) -> None:
        super().__init__()
        self.num_outputs = sum(num_choices)
        self._num_choices = num_choices

    def _logprobs(self, outputs: Tensor) -> list[Tensor]:
        return [part.log_softmax(-1) for part in outputs.split(self._num_choices, dim=-1)]

    def mode(self, outputs: Tensor) -> Tensor:
        return torch.stack([p.argmax(-1) for p in self._logprobs(outputs)], dim=-1)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        gumbel = -torch.log(-torch.special.log_ndtr(noise.double()))
        parts = gumbel.split(self._num_choices, dim=-1)
        return torch.stack([(p + g).argmax(-1) for p, g in zip(self._logprobs(outputs), parts, strict=True)], dim=-1)

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        chosen = [p.gather(-1, actions[..., i, None]) for i, p in enumerate(self._logprobs(outputs))]
        return torch.cat(chosen, dim=-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        return torch.stack([-(p.exp() * p).sum(-1) for p in self._logprobs(outputs)], dim=-1)
