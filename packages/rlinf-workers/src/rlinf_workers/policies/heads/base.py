"""What an action head gives: a distribution over the next action, drawn from by standard normal noise."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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
