"""Policy: a model that answers observations with actions and says how likely actions are.

A policy is a torch module. The job asks the class what it `needs` of an environment before any process starts; the
rollout and the actor each make one from the same `PolicySettings`, the rollout calls `act`, the actor `evaluate` (in a
SFT warm-up from demonstrations `imitate`), and the weights go from the second to the first. Neither knows which policy
it has.

Legend: n rows, K actions of a chunk (answered at once, executed one after the other), A dimensions of an action, D
numbers or tokens that an action is made of, each with a log-probability: 1 for a policy that can only tell of whole
actions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlinf_comm import record
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.errors import WorkersError
from rlinf_workers.plugins import POLICIES
from rlinf_workers.trainers.base import ModelOutputs

record(FieldSpec)
record(ActionSpec)

Fields = Mapping[str, Tensor]
"""Name -> [n, *shape of the field]: float32, pictures uint8 as they are, texts as `records.embodied.text_tensor` has
them."""


class PolicyError(WorkersError, ValueError):
    """A policy cannot act in this environment, or not with these options; says why and what it takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a policy asks of the flow around it."""

    reads: tuple[str, ...]
    """The fields that `act` and `evaluate` get; the environment has to show them."""
    chunk_size: int = 1
    """K, actions of an answer."""
    values_of_actions: bool = False
    """Whether values are [n, K]: of each action of the chunk, before it is done."""
    reads_gripper_sign: bool = False
    """Whether `imitate` reads the last number of a demonstrated action, a gripper's, by its sign alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyStep:
    """What a policy does next, without gradients."""

    actions: Tensor
    """[n, K, A] float32, unclipped, as the environment clips to its bounds; or int64, each dimension from 0 on."""
    logprobs: Tensor
    """[n, K, D] nats"""
    values: Tensor
    """[n] or [n, K], expected discounted rewards from here, or from each action, on; zeros for a policy without a
    critic."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """[n, ...] each: what `evaluate` needs beside the actions, a denoising chain for example. They go with the actions
    to the actor; the environment does not see them."""

    def rows(self, chosen: slice | Tensor) -> PolicyStep:
        """The answers to some of the rows."""
        return PolicyStep(
            actions=self.actions[chosen],
            logprobs=self.logprobs[chosen],
            values=self.values[chosen],
            extras={name: values[chosen] for name, values in self.extras.items()},
        )


class Policy(nn.Module, ABC):
    """Base of all policies; `rlinf_workers.testing.policies` checks an implementation.

    The constructor is called as `cls(fields, actions, seed=..., **options)`: what one row of the environment shows and
    takes, and the recipe's options. The same arguments give the same weights in every process. The weights are the
    tensors of `state_dict()`: parameters, which are trained, and buffers, statistics for example; all of them are sent
    to the rollout, saved and loaded.
    """

    noise_size: int
    """Standard normal numbers that draw one row's chunk."""
    values_cost_less: bool = False
    """Whether `values` costs less than an answer; the rollout then asks it about states that are only valued."""
    backbone: ClassVar[tuple[str, ...]] = ()
    """Modules that an adapter (`actor.lora`) may change: their weights stay, and low-rank changes of their linear
    layers are trained; what lies outside is trained whole. Empty: it takes no adapter. A policy that does is also made
    with torch's default device `meta`, when it reads no weights."""

    @classmethod
    @abstractmethod
    def needs(cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, **options: Any) -> Needs:
        """What the policy would need, made with these arguments. Called before any process starts, so no weights are
        loaded here.

        Raises: PolicyError for fields, actions or options that it cannot deal with.
        """

    @abstractmethod
    def act(self, fields: Fields, noise: Tensor | None) -> PolicyStep:
        """Answers n rows, none of which depends on another. Called without gradients.

        Args:
            noise: [n, noise_size], standard normal, the only source of chance, so that numbers do not depend on the
                plan; None: the likeliest actions.
        """

    @abstractmethod
    def evaluate(self, fields: Fields, actions: Tensor, extras: Mapping[str, Tensor]) -> ModelOutputs:
        """What it thinks of actions [n, K, A], differentiable; those that `act` answered get the log-probabilities and
        values that it gave.

        Args:
            extras: those of the answer; empty where it has none.
        """

    def values(self, fields: Fields) -> Tensor:
        """The values that `act` would give, whatever is drawn; for a policy whose `values_cost_less`."""
        raise NotImplementedError(f"{type(self).__name__} gives values with answers alone")

    def imitate(self, fields: Fields, actions: Tensor, noise: Tensor) -> Tensor:
        """The supervised loss of demonstrated chunks, one number for each row, [n], differentiable. No row depends on
        another. Here it is minus the log-probability of the chunk.

        Args:
            actions: [n, K, A], as `PolicyStep.actions` has them.
            noise: [n, noise_size], standard normal, the only source of chance, for a loss that draws.
        """
        return -self.evaluate(fields, actions, {}).logprobs.reshape(len(actions), -1).sum(1)

    def observation_sums(self, fields: Fields) -> Tensor:
        """[S] float64 on the CPU, sums over n rows that `absorb` learns from; empty for a policy without statistics.
        The actor adds them up over the shards of a step."""
        return torch.zeros(0, dtype=torch.float64)

    def absorb(self, sums: Tensor) -> None:
        """Takes the sums over all rows of a step, [S], into the statistics (buffers), after the step's updates."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings:
    """Which policy, for which environment; the same settings give the same weights in every process."""

    name: str
    """A name of the registry, or an import path `package.module:Class`."""
    fields: dict[str, FieldSpec]
    """What one row of the environment shows."""
    actions: ActionSpec
    """What one row of the environment takes."""
    options: dict[str, Any]
    seed: int = 0
    wide_heads: bool = False
    """Whether what lies outside the backbone is float32 whatever the rest is, as it is trained beside an adapter."""


def make_policy(settings: PolicySettings, device: torch.device) -> Policy:
    """The policy of the settings, on the device."""
    policy: Policy = POLICIES.get(settings.name)(
        settings.fields, settings.actions, seed=settings.seed, **settings.options
    )
    for name, parameter in policy.named_parameters() if settings.wide_heads else ():
        if not name.startswith(tuple(f"{part}." for part in policy.backbone)):
            parameter.data = parameter.data.float()
    return policy.to(device)


def outline_policy(settings: PolicySettings) -> Policy:
    """The policy without its numbers, which takes neither memory nor time; only one that has a `backbone` can be made
    so."""
    with torch.device("meta"):
        return POLICIES.get(settings.name)(settings.fields, settings.actions, seed=settings.seed, **settings.options)
