"""Running statistics of states. They are buffers of the policy, so that they are sent with the weights and all
processes normalise in the same way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlinf_envs import FieldSpec
from rlinf_workers.policies.base import Fields, Policy, PolicyError

OBSERVATION_CLIP = 10.0


def check_state(fields: Mapping[str, FieldSpec]) -> None:
    """Raises: PolicyError if there is a "state" that is not a row of numbers."""
    if "state" in fields and len(fields["state"].shape) != 1:
        raise PolicyError(f"its 'state' must be a row of numbers, but has shape {list(fields['state'].shape)}")


class StatePolicy(Policy):
    """A policy that normalises the field "state" [n, D] by running mean and variance."""

    observation_mean: Tensor
    observation_variance: Tensor
    observation_count: Tensor

    def __init__(self, state_size: int) -> None:
        """Args: state_size: D; 0 for a policy that reads no state."""
        super().__init__()
        self._state_size = state_size
        if state_size:
            self.register_buffer("observation_mean", torch.zeros(state_size, dtype=torch.float64))
            self.register_buffer("observation_variance", torch.ones(state_size, dtype=torch.float64))
            self.register_buffer("observation_count", torch.zeros(1, dtype=torch.float64))

    def normalize(self, states: Tensor) -> Tensor:
        """Zero mean, unit variance by the running statistics, clipped; [n, D] float32."""
        scale = (self.observation_variance + 1e-8).rsqrt()
        scaled = ((states.double() - self.observation_mean) * scale).float()
        return scaled.clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)

    def observation_sums(self, fields: Fields) -> Tensor:
        """[1 + 2 D]: the number of rows, their sum, the sum of their squares; empty without a state."""
        if not self._state_size:
            return super().observation_sums(fields)
        states = fields["state"].double()
        count = torch.tensor([float(len(states))], dtype=torch.float64)
        return torch.cat([count, states.sum(0).cpu(), states.square().sum(0).cpu()])

    @torch.no_grad()
    def absorb(self, sums: Tensor) -> None:
        """Merges a step into the running statistics (the parallel formula of Chan et al.)."""
        if not self._state_size:
            return
        count, total, total_of_squares = sums.split([1, *[(len(sums) - 1) // 2] * 2])
        batch_mean = total / count
        batch_variance = total_of_squares / count - batch_mean**2
        new_count = self.observation_count + count
        shift = batch_mean - self.observation_mean
        old = self.observation_variance * self.observation_count
        spread = old + batch_variance * count + shift**2 * self.observation_count * count / new_count
        self.observation_mean += shift * count / new_count
        self.observation_variance.copy_(spread / new_count)
        self.observation_count.copy_(new_count)
