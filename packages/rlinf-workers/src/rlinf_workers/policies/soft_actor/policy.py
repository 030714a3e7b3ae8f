"""The actor of soft actor-critic: ReLU layers over state and pictures, and a normal distribution squashed by tanh.

Sizes, initialisation (torch's default) and the bounds of the standard deviation are those of the authors' code and of
stable-baselines3. Actions are scaled to the environment's bounds; densities are of actions scaled to -1..1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_algos import squashed_sample
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import Fields, Needs, PolicyError, PolicyStep
from rlinf_workers.policies.options import options_of
from rlinf_workers.policies.soft import CriticSettings, SoftCritics, SoftPolicy
from rlinf_workers.policies.soft_actor.critics import CriticEnsemble
from rlinf_workers.policies.soft_actor.inputs import (
    SoftActorOptions,
    SoftInputs,
    encoded,
    fields_to_read,
    make_encoder,
)

LOG_STD_RANGE = (-20.0, 2.0)


class SoftActor(SoftPolicy):
    """A squashed normal distribution over actions, given "state" [n, D], pictures [n, H, W, C] uint8, or both."""

    action_center: Tensor
    action_half_range: Tensor

    @classmethod
    def needs(cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, **options: Any) -> Needs:
        chosen = options_of(SoftActorOptions, options)
        for name in ("hidden_size", "num_layers", "chunk_size"):
            if getattr(chosen, name) < 1:
                raise PolicyError(f"options.{name} is {getattr(chosen, name)}; use at least 1")
        reads = fields_to_read(fields, chosen)
        if actions.kind != "continuous":
            raise PolicyError("its actions are numbers, and those of the environment are choices; use an on-policy one")
        if not bool((actions.low.isfinite() & actions.high.isfinite()).all()):
            raise PolicyError("its actions have bounds, and those of the environment have none")
        return Needs(reads=reads, chunk_size=chosen.chunk_size)

    def __init__(self, fields: Mapping[str, FieldSpec], actions: ActionSpec, *, seed: int = 0, **options: Any) -> None:
        super().__init__()
        chosen = options_of(SoftActorOptions, options)
        low, high = actions.low.flatten(), actions.high.flatten()
        self.register_buffer("action_center", (low + high) / 2)
        self.register_buffer("action_half_range", (high - low) / 2)
        self._chunk_shape = (chosen.chunk_size, low.numel())
        self.noise_size = chosen.chunk_size * low.numel()
        reads = fields_to_read(fields, chosen)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.encoder = make_encoder(fields, reads)
            self.inputs = SoftInputs(fields, reads, self.encoder)
            layers: list[nn.Module] = []
            size = self.inputs.size
            for _ in range(chosen.num_layers):
                layers += [nn.Linear(size, chosen.hidden_size), nn.ReLU(inplace=True)]
                size = chosen.hidden_size
            self.policy = nn.Sequential(*layers, nn.Linear(size, 2 * self.noise_size))
        if self.encoder is not None:
            self.encoder.requires_grad_(False)  # the critics train it
        self.log_temperature = nn.Parameter(torch.zeros(()))

    @classmethod
    def critics(
        cls,
        fields: Mapping[str, FieldSpec],
        actions: ActionSpec,
        settings: CriticSettings,
        *,
        seed: int = 0,
        **options: Any,
    ) -> CriticEnsemble:
        chosen = options_of(SoftActorOptions, options)
        return CriticEnsemble(fields, actions, settings, options=chosen, seed=seed)

    @torch.no_grad()
    def share(self, critics: SoftCritics) -> None:
        if self.encoder is not None:
            assert isinstance(critics, CriticEnsemble), "made by `critics`"
            assert critics.encoder is not None, "both read the same fields"
            for copied, trained in zip(self.encoder.parameters(), critics.encoder.parameters(), strict=True):
                copied.copy_(trained)

    def _distribution(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the standard deviation before tanh, [n, K, A] each."""
        mean, log_std = self.policy(self.inputs(encoded(fields, self.encoder))).chunk(2, dim=-1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        return mean.unflatten(-1, self._chunk_shape), log_std.unflatten(-1, self._chunk_shape)

    def _scaled(self, squashed: Tensor) -> Tensor:
        return self.action_center + self.action_half_range * squashed

    def act(self, fields: Fields, noise: Tensor | None) -> PolicyStep:
        mean, log_std = self._distribution(fields)
        still = torch.zeros_like(mean)
        squashed, logprobs = squashed_sample(mean, log_std, still if noise is None else noise.view_as(mean))
        return PolicyStep(
            actions=self._scaled(squashed), logprobs=logprobs[..., None], values=mean.new_zeros(len(mean))
        )

    def sample(self, fields: Fields, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self._distribution(fields)
        squashed, logprobs = squashed_sample(mean, log_std, noise.view_as(mean))
        return self._scaled(squashed), logprobs.sum(-1)
