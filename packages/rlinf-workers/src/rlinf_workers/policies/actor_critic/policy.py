"""A small actor-critic for state observations: two tanh towers, for policy and value, with a Gaussian for continuous
actions and categories for discrete ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import Fields, Needs, PolicyStep
from rlinf_workers.policies.heads.choose import head_for
from rlinf_workers.policies.layers import POLICY_GAIN, VALUE_GAIN, in_own_dtype, tanh_tower
from rlinf_workers.policies.state_statistics import StatePolicy, check_state
from rlinf_workers.trainers.base import ModelOutputs


class ActorCritic(StatePolicy):
    """The policy and its value function over the field "state" [n, D]."""

    @classmethod
    def needs(
        cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, *, chunk_size: int = 1, **options: Any
    ) -> Needs:
        check_state(fields)
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
        (size,) = fields["state"].shape
        super().__init__(size)
        self.head = head_for(actions, chunk_size, initial_log_std=initial_log_std)
        self.noise_size = self.head.num_outputs
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.policy = tanh_tower(size, hidden_sizes, self.head.num_outputs, POLICY_GAIN)
            self.value = tanh_tower(size, hidden_sizes, 1, VALUE_GAIN)
        self._chunk_shape = (chunk_size, actions.low.numel())
        self._normalizes = normalize_observations

    def _states(self, fields: Fields) -> Tensor:
        return self.normalize(fields["state"]) if self._normalizes else fields["state"]

    def act(self, fields: Fields, noise: Tensor | None) -> PolicyStep:
        states = self._states(fields)
        outputs = in_own_dtype(self.policy, states)
        actions = self.head.mode(outputs) if noise is None else self.head.sample(outputs, noise)
        return PolicyStep(
            actions=actions.unflatten(-1, self._chunk_shape),
            logprobs=self.head.log_prob(outputs, actions).unflatten(-1, self._chunk_shape),
            values=in_own_dtype(self.value, states)[..., 0],
        )

    def evaluate(self, fields: Fields, actions: Tensor, extras: Mapping[str, Tensor]) -> ModelOutputs:
        states = self._states(fields)
        outputs = in_own_dtype(self.policy, states)
        return ModelOutputs(
            logprobs=self.head.log_prob(outputs, actions.flatten(-2)).unflatten(-1, self._chunk_shape),
            entropies=self.head.entropy(outputs).unflatten(-1, self._chunk_shape),
            values=in_own_dtype(self.value, states)[..., 0],
        )
