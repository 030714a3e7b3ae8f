"""A diagonal Gaussian over continuous actions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf_algos.gaussian import gaussian_entropy, gaussian_log_prob
from rlinf_workers.policies.heads.base import ActionHead


class Gaussian:
    """Continuous actions: independent normal dimensions."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        """Args: mean: [..., D]. log_std: [D]."""
        self._mean, self._log_std = mean, log_std

    def mode(self) -> Tensor:
        return self._mean

    def sample(self, noise: Tensor) -> Tensor:
        return self._mean + noise * self._log_std.exp()

    def log_prob(self, actions: Tensor) -> Tensor:
        return gaussian_log_prob(actions, self._mean, self._log_std)

    def entropy(self) -> Tensor:
        return gaussian_entropy(self._mean, self._log_std)


class GaussianHead(ActionHead):
    """The outputs are the means; each number of a chunk has a free standard deviation."""

    def __init__(self, num_dims: int, initial_log_std: float) -> None:
        super().__init__()
        self.num_outputs = num_dims
        self.log_std = nn.Parameter(torch.full((num_dims,), initial_log_std))

    def forward(self, outputs: Tensor) -> Gaussian:
        return Gaussian(outputs, self.log_std)
