"""Policy: a model that answers observations with actions and says how likely actions are.

A policy is a torch module. The job asks the class what it `needs` of an environment before any process starts; the
rollout and the actor each make one from the same `PolicySettings`, the rollout calls `act`, the actor `evaluate`, and
the weights go from the second to the first. Neither knows which policy it has.

Legend: n rows, K actions of a chunk (answered at once, executed one after the other), A dimensions of an action.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_comm.records import record
from rlinf_envs.protocol import ActionSpec, FieldSpec
from rlinf_workers.errors import WorkersError
from rlinf_workers.registry import POLICIES
from rlinf_workers.training.base import Evaluation

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a policy does next, without gradients."""

    actions: Tensor
    """[n, K, A] float32, unclipped, as the environment clips to its bounds; or int64, each dimension from 0 on."""
    logprobs: Tensor
    """[n] nats, of the whole chunk"""
    values: Tensor
    """[n], expected discounted rewards from here on; zeros for a policy without a critic."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """[n, ...] each: what `evaluate` needs beside the actions, a denoising chain for example. They go with the actions
    to the actor; the environment does not see them."""

    def rows(self, chosen: slice | Tensor) -> Answer:
        """The answers to some of the rows."""
        return Answer(
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

    @classmethod
    @abstractmethod
    def needs(cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, **options: Any) -> Needs:
        """What the policy would need, made with these arguments. Called before any process starts, so no weights are
        loaded here.

        Raises: PolicyError for fields, actions or options that it cannot deal with.
        """

    @abstractmethod
    def act(self, fields: Fields, noise: Tensor | None) -> Answer:
        """Answers n rows, none of which depends on another. Called without gradients.

        Args:
            noise: [n, noise_size], standard normal, the only source of chance, so that numbers do not depend on the
                plan; None: the likeliest actions.
        """

    @abstractmethod
    def evaluate(self, fields: Fields, actions: Tensor, extras: Mapping[str, Tensor]) -> Evaluation:
        """What it thinks of actions [n, K, A], differentiable; those that `act` answered get the log-probabilities and
        values that it gave.

        Args:
            extras: those of the answer; empty where it has none.
        """

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


def make_policy(settings: PolicySettings, device: torch.device) -> Policy:
    """The policy of the settings, on the device."""
    made = POLICIES.get(settings.name)(settings.fields, settings.actions, seed=settings.seed, **settings.options)
    return made.to(device)
