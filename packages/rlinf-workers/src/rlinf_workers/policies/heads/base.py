"""What an action head is: the meaning of a policy's last layer.

Legend: D numbers of a chunk, the K actions of A dimensions side by side; O outputs of the network for one row. Leading
dimensions `...` are as in the outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class ActionHead(nn.Module, ABC):
    """The distribution over chunks that outputs of a network [..., O] stand for; holds the parameters that no network
    gives."""

    num_outputs: int
    """O; also how many numbers of noise draw one chunk."""

    @abstractmethod
    def mode(self, outputs: Tensor) -> Tensor:
        """[..., D], the likeliest chunk."""

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
