"""A small actor-critic for state observations: two tanh towers; continuous actions from a diagonal Gaussian with a free
standard deviation, discrete ones from categories.

Orthogonal initialisation with the gains usual since arXiv:2005.12729 (hidden sqrt(2), policy head 0.01 * sqrt(2),
value head 1). Running statistics of the observations are part of the model, so that they travel with the weights and
every process normalises alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlinf_comm.records import record
from rlinf_workers.policies.heads.base import ActionDistribution
from rlinf_workers.policies.heads.categories import Categories
from rlinf_workers.policies.heads.gaussian import Gaussian

OBSERVATION_CLIP = 10.0


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ActorCriticSettings:
    """Shape of the two towers."""

    observation_size: int
    action_size: int
    """A, dimensions of an action."""
    num_choices: tuple[int, ...] | None = None
    """Discrete actions: choices of each of the A dimensions; None: continuous ones."""
    hidden_sizes: tuple[int, ...] = (128, 128, 128)
    initial_log_std: float = -0.5
    normalize_observations: bool = True
    seed: int = 0

    @property
    def head_size(self) -> int:
        """Outputs of the policy tower, and how much noise draws one action."""
        return self.action_size if self.num_choices is None else sum(self.num_choices)


@dataclass(frozen=True, slots=True)
class ActorCriticOutput:
    """Action, log-probability, entropy and value from one forward, each with the leading dimensions of the input."""

    actions: Tensor
    """[..., A] float32; int64 where actions are discrete, each dimension counted from 0"""
    logprobs: Tensor
    """[...] nats, summed over action dimensions"""
    entropy: Tensor
    """[...] nats"""
    values: Tensor
    """[...]"""


class ActorCritic(nn.Module):
    """The policy and its value function."""

    observation_mean: Tensor
    observation_variance: Tensor
    observation_count: Tensor

    def __init__(self, settings: ActorCriticSettings) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            size, hidden = settings.observation_size, settings.hidden_sizes
            self.policy = _tower(size, hidden, settings.head_size, 0.01 * math.sqrt(2))
            self.value = _tower(size, hidden, 1, 1.0)
        self._num_choices = settings.num_choices
        if settings.num_choices is None:
            self.log_std = nn.Parameter(torch.full((settings.action_size,), settings.initial_log_std))
        self._normalizes = settings.normalize_observations
        self.register_buffer("observation_mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("observation_variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("observation_count", torch.zeros(1, dtype=torch.float64))

    def normalize(self, observations: Tensor) -> Tensor:
        """Zero mean, unit variance by the running statistics, clipped; [..., D] float32."""
        if not self._normalizes:
            return observations
        scale = (self.observation_variance + 1e-8).rsqrt()
        scaled = ((observations.double() - self.observation_mean) * scale).float()
        return scaled.clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)

    def forward(
        self, observations: Tensor, *, actions: Tensor | None = None, noise: Tensor | None = None
    ) -> ActorCriticOutput:
        """One forward for everything.

        Args:
            observations: [..., D], raw.
            actions: [..., A] to evaluate; else drawn with `noise` (standard normal, [..., head_size]); without either
                the likeliest.
        """
        states = self.normalize(observations)
        distribution = self._distribution(self.policy(states))
        if actions is None:
            actions = distribution.mode() if noise is None else distribution.sample(noise)
        return ActorCriticOutput(
            actions=actions,
            logprobs=distribution.log_prob(actions),
            entropy=distribution.entropy(),
            values=self.value(states)[..., 0],
        )

    def _distribution(self, head: Tensor) -> ActionDistribution:
        if self._num_choices is None:
            return Gaussian(head, self.log_std)
        return Categories(head, self._num_choices)

    def values(self, observations: Tensor) -> Tensor:
        """[..., D] raw -> [...]"""
        return self.value(self.normalize(observations))[..., 0]

    @torch.no_grad()
    def absorb_observations(self, count: Tensor, total: Tensor, total_of_squares: Tensor) -> None:
        """Merges a batch into the running statistics (the parallel formula of Chan et al.). All float64; sums over
        the batch, [D]."""
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
