"""Scales actions and states between their range in a dataset and -1..1, as in fine-tuning."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf_workers.policies.openvla.actions import ActionStatistics

EPSILON = 1e-8
"""Added to the divisor, for a dimension that is constant."""


class Scaling(nn.Module):
    """Scales rows [..., D]; dimensions outside the mask, such as a gripper, are unchanged."""

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
        """Dataset range -> -1..1, clipped."""
        return torch.where(self.mask, 2 * (numbers - self.low) / self.range - 1, numbers).clamp(-1, 1)

    def inverse(self, scaled: Tensor) -> Tensor:
        """-1..1 -> dataset range."""
        return torch.where(self.mask, 0.5 * (scaled + 1) * self.range + self.low, scaled)
