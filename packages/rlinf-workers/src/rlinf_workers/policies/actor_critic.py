"""A small actor-critic for state observations: two tanh towers, policy and value, with a Gaussian or categories as the
environment's actions want it.

Orthogonal initialisation with the gains usual since arXiv:2005.12729 (hidden sqrt(2), policy head 0.01 * sqrt(2),
value head 1). Running statistics of the observations are part of the model, so that they travel with the weights and
every process normalises alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_envs.protocol import ActionSpec, FieldSpec
from rlinf_workers.policies.base import Answer, Fields, Needs, Policy, PolicyError
from rlinf_workers.policies.heads.choose import head_for
from rlinf_workers.training.base import Evaluation

OBSERVATION_CLIP = 10.0


class ActorCritic(Policy):
    """The policy and its value function over the field "state" [n, D]."""

    observation_mean: Tensor
    observation_variance: Tensor
    observation_count: Tensor

    @classmethod
    def needs(
        cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, *, chunk_size: int = 1, **options: Any
    ) -> Needs:
        if "state" in fields and len(fields["state"].shape) != 1:
            raise PolicyError(f"its 'state' is a row of numbers, and here it has shape {list(fields['state'].shape)}")
        head_for(actions, chunk_size)
        return Needs(reads=("state",), chunk_size=chunk_size)

    def __init__(
        self,
        fields: Mapping[str, FieldSpec],
        actions: ActionSpec,
        *,
        hidden_sizes: tuple[int, ...] = (128, 128, 128),
        initial_log_std: float = -0.5,
        normalize_observations: bool = True,
        chunk_size: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        (size,) = fields["state"].shape
        self.head = head_for(actions, chunk_size, initial_log_std=initial_log_std)
        self.noise_size = self.head.num_outputs
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.policy = _tower(size, hidden_sizes, self.head.num_outputs, 0.01 * math.sqrt(2))
            self.value = _tower(size, hidden_sizes, 1, 1.0)
        self._chunk_shape = (chunk_size, actions.low.numel())
        self._normalizes = normalize_observations
        self.register_buffer("observation_mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("observation_variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("observation_count", torch.zeros(1, dtype=torch.float64))

    def normalize(self, states: Tensor) -> Tensor:
        """Zero mean, unit variance by the running statistics, clipped; [n, D] float32."""
        if not self._normalizes:
            return states
        scale = (self.observation_variance + 1e-8).rsqrt()
        scaled = ((states.double() - self.observation_mean) * scale).float()
        return scaled.clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)

    def act(self, fields: Fields, noise: Tensor | None) -> Answer:
        states = self.normalize(fields["state"])
        outputs = self.policy(states)
        actions = self.head.mode(outputs) if noise is None else self.head.sample(outputs, noise)
        return Answer(
            actions=actions.unflatten(-1, self._chunk_shape),
            logprobs=self.head.log_prob(outputs, actions),
            values=self.value(states)[..., 0],
        )

    def evaluate(self, fields: Fields, actions: Tensor, extras: Mapping[str, Tensor]) -> Evaluation:
        states = self.normalize(fields["state"])
        outputs = self.policy(states)
        return Evaluation(
            logprobs=self.head.log_prob(outputs, actions.flatten(-2)),
            entropies=self.head.entropy(outputs),
            values=self.value(states)[..., 0],
        )

    def observation_sums(self, fields: Fields) -> Tensor:
        """[1 + 2 D]: the number of rows, their sum, the sum of their squares."""
        states = fields["state"].double()
        count = torch.tensor([float(len(states))], dtype=torch.float64)
        return torch.cat([count, states.sum(0).cpu(), states.square().sum(0).cpu()])

    @torch.no_grad()
    def absorb(self, sums: Tensor) -> None:
        """Merges a step into the running statistics (the parallel formula of Chan et al.)."""
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


def _tower(size: int, hidden: tuple[int, ...], out: int, head_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [_linear(size, width, math.sqrt(2)), nn.Tanh()]
        size = width
    return nn.Sequential(*layers, _linear(size, out, head_gain))


def _linear(size: int, out: int, gain: float) -> nn.Linear:
    layer = nn.Linear(size, out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
