"""SoftPolicy: a policy that off-policy algorithms train, together with critics of actions.

The actor holds the policy and its critics as two models, each with its own optimizer; only the policy is sent to the
rollout. `SoftActor` is the shipped implementation for states and pictures.

What is learned from need not be what the environment shows and takes: `SoftNoise` learns the initial noise of a policy
that denoises actions, from that policy's features. Transitions have what `observe` makes of an observation, and the
learned actions, which `execute` turns into those of the environment.

Legend: n rows, K actions of a chunk, A numbers of an action, E critics. In `SoftPolicy` and `SoftCritics`, K and A are
those of learned actions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedSpaces:
    """What transitions have of an observation, and of an answer."""

    fields: dict[str, FieldSpec]
    actions: ActionSpec
    """Of shape [K, A], with finite bounds."""


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

    takes_demonstrations: ClassVar[bool] = True
    """Whether learned actions are those of the environment, so that demonstrations have them."""

    @abstractmethod
    def sample(self, fields: Fields, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draws learned actions, differentiable in the parameters: those of `act`, [n, K, A], and the log-probabilities
        of whole chunks with actions scaled to -1..1, [n] nats.

        Args:
            fields: as from `observe`.
        """

    @classmethod
    def learned_spaces(cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, **options: Any) -> LearnedSpaces:
        """The spaces for a policy with these arguments. The default: what `needs` reads, and the environment's
        actions."""
        needs = cls.needs(fields, actions, **options)
        low, high = (bound.flatten().expand(needs.chunk_size, -1) for bound in (actions.low, actions.high))
        return LearnedSpaces(
            fields={name: fields[name] for name in needs.reads},
            actions=ActionSpec(kind="continuous", shape=tuple(low.shape), low=low, high=high),
        )

    def observe(self, fields: Fields) -> Fields:
        """What is learned from in an observation, [n, ...] each. Called without gradients."""
        return fields

    def execute(self, fields: Fields, actions: Tensor) -> Tensor:
        """The environment's actions for learned ones. Called without gradients.

        Args:
            fields: of the environment; the ones that `observe` has got last, where that has been called before.
        """
        return actions

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
