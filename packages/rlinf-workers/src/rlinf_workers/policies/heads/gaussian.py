"""A diagonal Gaussian over continuous actions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf_algos import gaussian_entropy, gaussian_log_prob
from rlinf_workers.policies.heads.base import ActionHead


class GaussianHead(ActionHead):
    """The outputs are the means; the standard deviation of each number of a chunk is a parameter."""

    def __init__(self, num_dims: int, initial_log_std: float) -> None:
        super().__init__()
        self.num_outputs = num_dims
        self.log_std = nn.Parameter(torch.full((num_dims,), initial_log_std))

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return outputs + noise * self.log_std.exp()

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        return gaussian_log_prob(actions[..., None], outputs[..., None], self._log_stds(outputs))

    def entropy(self, outputs: Tensor) -> Tensor:
        return gaussian_entropy(outputs[..., None], self._log_stds(outputs))

    def _log_stds(self, outputs: Tensor) -> Tensor:
        """[..., D, 1]: each number is an action of one dimension."""
        return self.log_std.expand(outputs.shape)[..., None]
