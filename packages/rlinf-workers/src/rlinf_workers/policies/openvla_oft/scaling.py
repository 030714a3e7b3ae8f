"""Numbers of a dataset between their own range and -1..1, as fine-tuning scales actions and states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf_workers.policies.openvla.actions import ActionStatistics

EPSILON = 1e-8
"""In the divisor, for a number that never changes."""


class Scaling(nn.Module):
    """Of rows [..., D]; what the mask leaves out, a gripper for example, stays as it is."""

    low: Tensor
    range: Tensor
    mask: Tensor

    def __init__(self, statistics: ActionStatistics) -> None:
        super().__init__()
        low, high = (torch.tensor(row, dtype=torch.float64) for row in (statistics.low, statistics.high))
        self.register_buffer("low", low.float(), persistent=False)
        self.register_buffer("range", (high - low + EPSILON).float(), persistent=False)
        self.register_buffer("mask", torch.tensor(list(statistics.mask)), persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """In -1..1; what lies beyond the range is cut off."""
        return torch.where(self.mask, 2 * (numbers - self.low) / self.range - 1, numbers).clamp(-1, 1)

    def inverse(self, scaled: Tensor) -> Tensor:
        """As the dataset has them."""
        return torch.where(self.mask, 0.5 * (scaled + 1) * self.range + self.low, scaled)
