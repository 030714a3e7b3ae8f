"""Base of action heads, which turn the output of a policy's last layer into a distribution over actions.

Legend: D numbers of a chunk, its K concatenated actions of A dimensions; O outputs of the network for one row. Leading
dimensions `...` are as in the outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class ActionHead(nn.Module, ABC):
    """A distribution over chunks, parameterized by the outputs of a network [..., O] and by parameters of its own."""

    num_outputs: int
    """O; also the number of noise values that are needed to sample one chunk."""

    @abstractmethod
    def mode(self, outputs: Tensor) -> Tensor:
        """[..., D], the most likely chunk."""

    @abstractmethod
    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """[..., D], without gradient for categories.

        Args:
            noise: [..., O], standard normal.
        """

    @abstractmethod
    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """[..., D] -> [..., D] nats, of each number of the chunk."""

    @abstractmethod
    def entropy(self, outputs: Tensor) -> Tensor:
        """[..., D] nats, of each number of the chunk."""
