"""What an action head is: the meaning of a policy's last layer.

Legend: D numbers of a chunk, the K actions of A dimensions side by side; O outputs of the network for one row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor, nn


class ActionDistribution(Protocol):
    """What one forward of the network says about the next chunk; leading dimensions `...` as in its input."""

    def mode(self) -> Tensor:
        """[..., D], the likeliest chunk."""
        ...

    def sample(self, noise: Tensor) -> Tensor:
        """[..., D], without gradient for categories.

        Args:
            noise: [..., O], standard normal.
        """
        ...

    def log_prob(self, actions: Tensor) -> Tensor:
        """[..., D] -> [...] nats, summed over the chunk."""
        ...

    def entropy(self) -> Tensor:
        """[...] nats, summed over the chunk."""
        ...


class ActionHead(nn.Module, ABC):
    """Turns outputs of a network into a distribution; holds the parameters that no network gives."""

    num_outputs: int
    """O; also how many numbers of noise draw one chunk."""

    @abstractmethod
    def forward(self, outputs: Tensor) -> ActionDistribution:
        """[..., O] -> the distribution over chunks."""
