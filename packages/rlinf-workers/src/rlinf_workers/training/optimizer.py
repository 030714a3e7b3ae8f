"""AdamW and its schedule, as a recipe gives them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from rlinf_comm.records import record


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """AdamW and its schedule."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    """Linear, from 1/warmup_steps."""
    decay_steps: int | None = None
    """Linear decay to `min_lr_ratio` over that many optimizer steps; None: constant."""
    min_lr_ratio: float = 0.1

    def learning_rate_at(self, step: int) -> float:
        """For optimizer step `step`, counted from 0."""
        factor = 1.0
        if self.decay_steps:
            factor = max(self.min_lr_ratio, 1 - step / self.decay_steps)
        if self.warmup_steps:
            factor *= min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * factor

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """The optimizer, at its first rate."""
        return torch.optim.AdamW(parameters, self.learning_rate, betas=self.betas, weight_decay=self.weight_decay)

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Sets the learning rate of optimizer step `step`; returns it."""
        rate = self.learning_rate_at(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate
