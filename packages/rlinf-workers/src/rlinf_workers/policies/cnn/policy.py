"""A small actor-critic for pictures: a convolutional encoder for each camera, one shared layer, policy and value.

Policy and value share everything but their last layers, as in CleanRL's PPO for Atari; encoder and initialisation are
the same, too. Unlike there, each camera has its own encoder, and a normalised state may be added to the features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import Fields, Needs, PolicyStep
from rlinf_workers.policies.heads.choose import head_for
from rlinf_workers.policies.layers import POLICY_GAIN, VALUE_GAIN, in_own_dtype, orthogonal
from rlinf_workers.policies.options import options_of
from rlinf_workers.policies.picture_encoder import PictureEncoder, encoded_cameras
from rlinf_workers.policies.state_statistics import StatePolicy, check_state
from rlinf_workers.trainers.base import ModelOutputs


@dataclass(frozen=True, kw_only=True, slots=True)
class CnnOptions:
    """Options of the policy."""

    cameras: str | None = None
    """Names of cameras, as in "image.<camera>", separated by commas; None: all."""
    reads_state: bool = False
    """Whether the state is an additional input."""
    hidden_size: int = 256
    """Width of the layer that policy and value share."""
    initial_log_std: float = -0.5
    chunk_size: int = 1


class CnnActorCritic(StatePolicy):
    """The policy and its value function over pictures [n, H, W, C] uint8, and the field "state" [n, D] on request."""

    @classmethod
    def needs(cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, **options: Any) -> Needs:
        chosen = options_of(CnnOptions, options)
        cameras = encoded_cameras(fields, chosen.cameras)
        if chosen.reads_state:
            check_state(fields)
        head_for(actions, chosen.chunk_size)
        return Needs(reads=(*cameras, *(["state"] if chosen.reads_state else [])), chunk_size=chosen.chunk_size)

    def __init__(self, fields: Mapping[str, FieldSpec], actions: ActionSpec, *, seed: int = 0, **options: Any) -> None:
        chosen = options_of(CnnOptions, options)
        state_size = fields["state"].shape[0] if chosen.reads_state else 0
        super().__init__(state_size)
        cameras = encoded_cameras(fields, chosen.cameras)
        self.head = head_for(actions, chosen.chunk_size, initial_log_std=chosen.initial_log_std)
        self.noise_size = self.head.num_outputs
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.encoders = PictureEncoder(fields, cameras)
            num_features = self.encoders.num_features + state_size
            self.shared = nn.Sequential(orthogonal(nn.Linear(num_features, chosen.hidden_size)), nn.ReLU())
            self.policy = orthogonal(nn.Linear(chosen.hidden_size, self.head.num_outputs), POLICY_GAIN)
            self.value = orthogonal(nn.Linear(chosen.hidden_size, 1), VALUE_GAIN)
        self._chunk_shape = (chosen.chunk_size, actions.low.numel())

    def _outputs(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """Outputs of the policy [n, O], values [n]."""
        features = self.encoders(fields)
        if self._state_size:
            features = torch.cat([features, self.normalize(fields["state"])], dim=-1)
        shared = in_own_dtype(self.shared, features)
        return in_own_dtype(self.policy, shared), in_own_dtype(self.value, shared)[..., 0]

    def act(self, fields: Fields, noise: Tensor | None) -> PolicyStep:
        outputs, values = self._outputs(fields)
        actions = self.head.mode(outputs) if noise is None else self.head.sample(outputs, noise)
        logprobs = self.head.log_prob(outputs, actions)
        shape = self._chunk_shape
        return PolicyStep(actions=actions.unflatten(-1, shape), logprobs=logprobs.unflatten(-1, shape), values=values)

    def evaluate(self, fields: Fields, actions: Tensor, extras: Mapping[str, Tensor]) -> ModelOutputs:
        outputs, values = self._outputs(fields)
        return ModelOutputs(
            logprobs=self.head.log_prob(outputs, actions.flatten(-2)).unflatten(-1, self._chunk_shape),
            entropies=self.head.entropy(outputs).unflatten(-1, self._chunk_shape),
            values=values,
        )
