"""A diagonal Gaussian over continuous actions."""

from __future__ import annotations

from torch import Tensor

from rlinf_algos.gaussian import gaussian_entropy, gaussian_log_prob


class Gaussian:
    """Continuous actions: independent normal dimensions."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        """Args: mean: [..., A]. log_std: [A]."""
        self._mean, self._log_std = mean, log_std

    def mode(self) -> Tensor:
        return self._mean

    def sample(self, noise: Tensor) -> Tensor:
        return self._mean + noise * self._log_std.exp()

    def log_prob(self, actions: Tensor) -> Tensor:
        return gaussian_log_prob(actions, self._mean, self._log_std)

    def entropy(self) -> Tensor:
        return gaussian_entropy(self._mean, self._log_std)
