"""SoftPolicy: a policy that off-policy algorithms train, together with critics of actions.

The actor holds the policy and its critics as two models, each with its own optimizer; only the policy is sent to the
rollout. `SoftActor` is the shipped implementation for states and pictures.

Legend: n rows, K actions of a chunk, A numbers of an action, E critics.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_comm import record
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import Fields, Policy, PolicyError
from rlinf_workers.trainers.base import ModelOutputs


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSettings:
    """What an algorithm says of the critics; the widths are the policy's options."""

    num_critics: int
    layer_norm: bool


class SoftCritics(nn.Module):
    """An ensemble of values of actions, and a target for each, which is no trained parameter. The targets are in the
    `state_dict`, so that checkpoints have them."""

    def encoded(self, fields: Fields) -> Fields:
        """The fields with what the critics share with the policy computed, such as features of pictures, once for all
        that follows: policy and critics take the result in place of the fields. Called without gradients."""
        return fields

    @abstractmethod
    def forward(self, fields: Fields, actions: Tensor) -> Tensor:
        """[n, E], differentiable in parameters and actions [n, K, A]."""

    @abstractmethod
    def target_values(self, fields: Fields, actions: Tensor, subset: Tensor | None) -> Tensor:
        """[n, E'] of the target critics with the indices `subset` [E'], of all for None. Called without gradients."""

    @abstractmethod
    def follow(self, rate: float) -> None:
        """Moves the targets towards the critics, see `rlinf_algos.follow_`. Called without gradients."""


class SoftPolicy(Policy):
    """A policy whose samples are differentiable, and that knows which critics go with it."""

    log_temperature: nn.Parameter
    """Scalar, logarithm of the weight of the entropy. It is trained beside the policy, from the algorithm's initial
    value on, and does not affect `act`."""

    @abstractmethod
    def sample(self, fields: Fields, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draws actions, differentiable in the parameters: the actions of `act`, [n, K, A], and the log-probabilities
        of whole chunks with actions scaled to -1..1, [n] nats."""

    @classmethod
    @abstractmethod
    def critics(
        cls,
        fields: Mapping[str, FieldSpec],
        actions: ActionSpec,
        settings: CriticSettings,
        *,
        seed: int = 0,
        **options: Any,
    ) -> SoftCritics:
        """The critics for a policy with these arguments. The same arguments give the same weights in every process."""

    @torch.no_grad()
    def share(self, critics: SoftCritics) -> None:
        """Copies what the policy shares with the critics, which alone train it (an encoder of pictures). Called after
        each update of the critics."""
        return

    def evaluate(self, fields: Fields, actions: Tensor, extras: Mapping[str, Tensor]) -> ModelOutputs:
        raise PolicyError(f"{type(self).__name__} is trained by off-policy algorithms, which sample actions anew")
