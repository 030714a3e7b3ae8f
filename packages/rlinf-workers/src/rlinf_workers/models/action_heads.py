"""What a policy tower's output means: a diagonal Gaussian over continuous actions, or categories.

Both turn the same standard normal noise into an action, so that whoever samples draws one kind of noise. A category is
drawn by the Gumbel-max rule (arXiv:1611.01144, eq. 1) with noise of the same distribution: if z is standard normal with
distribution function Phi, then Phi(z) is uniform and -log(-log Phi(z)) is Gumbel.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rlinf_algos.gaussian import gaussian_entropy, gaussian_log_prob


class ActionDistribution(Protocol):
    """What one forward of the policy tower says about the next action; leading dimensions `...` as in its input."""

    def mode(self) -> Tensor:
        """[..., A], the likeliest action."""
        ...

    def sample(self, noise: Tensor) -> Tensor:
        """[..., A], without gradient for categories.

        Args:
            noise: standard normal, of the shape of the tower's output.
        """
        ...

    def log_prob(self, actions: Tensor) -> Tensor:
        """[..., A] -> [...] nats, summed over the dimensions of an action."""
        ...

    def entropy(self) -> Tensor:
        """[...] nats, summed over the dimensions of an action."""
        ...


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
