"""The modules that OpenVLA-OFT adds to OpenVLA; the tensors have the names of the published files.

Legend: n rows, K actions of a chunk, A dimensions of an action, H width of the language model.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BLOCKS = 2
"""Number of residual blocks of the head: four layers including the first and the last (arXiv:2502.19645, section
IV-B)."""


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class _MlpResNet(nn.Module):
    def __init__(self, size: int, width: int, out: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(size)
        self.fc1 = nn.Linear(size, width)
        self.mlp_resnet_blocks = nn.ModuleList(_Block(width) for _ in range(NUM_BLOCKS))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class ContinuousHead(nn.Module):
    """Hidden states [n, K A, H] that predict the numbers of a chunk -> the numbers, [n, K, A], in the dataset's scale
    of -1..1. The A states of an action are concatenated."""

    def __init__(self, width: int, num_dims: int) -> None:
        super().__init__()
        self.model = _MlpResNet(num_dims * width, width, num_dims)
        self._num_dims = num_dims

    def forward(self, states: Tensor) -> Tensor:
        return self.model(states.unflatten(1, (-1, self._num_dims)).flatten(2))


class ProprioProjector(nn.Module):
    """The robot's state [n, size] -> one embedding, [n, H]."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, state: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(state)))


def laplace_log_prob(numbers: Tensor, centre: Tensor, spread: float) -> Tensor:
    """[...] nats for each number, by a Laplace distribution, whose negative log-likelihood is the L1 loss up to
    constants."""
    return -(numbers - centre).abs() / spread - math.log(2 * spread)


def laplace_entropy(centre: Tensor, spread: float) -> Tensor:
    """[...] nats, the same for each number."""
    return torch.full_like(centre, 1 + math.log(2 * spread))


def laplace_draw(centre: Tensor, noise: Tensor, spread: float) -> Tensor:
    """[...]: samples from standard normal noise of the same shape, through the normal distribution function and the
    inverse of Laplace's."""
    distance = -math.log(2) - torch.special.log_ndtr(-noise.double().abs())
    return centre + spread * noise.sign() * distance.to(centre)
