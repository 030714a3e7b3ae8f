"""Policy: a model that answers observations with actions and computes log-probabilities of actions.

A policy is a torch module. Before any process starts, the job calls the class method `needs` for its requirements. The
rollout and the actor each create a policy from the same `PolicySettings`; the rollout calls `act`, the actor `evaluate`
(in an SFT warm-up from demonstrations `imitate`), and weights are sent from the actor to the rollout. Neither depends
on which policy it has.

Legend: n rows, K actions of a chunk (answered at once, executed one after the other), A dimensions of an action, D
numbers or tokens that an action consists of, each with a log-probability: 1 for a policy that has log-probabilities of
whole actions only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
"""Name -> [n, *shape of the field]: float32, unscaled uint8 pictures, texts as from `records.embodied.text_tensor`."""


class PolicyError(WorkersError, ValueError):
    """A policy cannot act in this environment, or not with these options; the message says why and what would work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The requirements of a policy for the flow."""

    reads: tuple[str, ...]
    """The fields that `act` and `evaluate` get; the environment has to provide them."""
    chunk_size: int = 1
    """K, the number of actions in an answer."""
    values_of_actions: bool = False
    """Whether values are [n, K]: before each action of the chunk."""
    reads_gripper_sign: bool = False
    """Whether `imitate` reads only the sign of the last number of a demonstrated action, the gripper."""
    notes: tuple[str, ...] = ()
    """What the run's manifest should say about the policy, such as weights of a checkpoint that are not loaded."""
    acting: Mapping[str, str] = field(default_factory=dict)
    """Options, with their defaults, that decide how it answers without exploration, besides its weights: the crop of
    pictures, the statistics that scale actions, ... The protocol of an evaluation records them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyStep:
    """The answer of a policy, without gradients."""

    actions: Tensor
    """[n, K, A] float32, unclipped, since the environment clips to its bounds; or int64, each dimension from 0 on."""
    logprobs: Tensor
    """[n, K, D] nats"""
    values: Tensor
    """[n] or [n, K], expected discounted rewards from here, or from each action, on; zeros for a policy without a
    critic."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """[n, ...] each: what `evaluate` needs in addition to the actions, such as a denoising chain. They are sent to the
    actor with the actions; the environment does not see them."""

    def rows(self, chosen: slice | Tensor) -> PolicyStep:
        """The answers to some of the rows."""
        return PolicyStep(
            actions=self.actions[chosen],
            logprobs=self.logprobs[chosen],
            values=self.values[chosen],
            extras={name: values[chosen] for name, values in self.extras.items()},
        )


def joined_steps(steps: Sequence[PolicyStep]) -> PolicyStep:
    """The answers to the rows of several passes, one after the other."""
    if len(steps) == 1:
        return steps[0]
    return PolicyStep(
        actions=torch.cat([step.actions for step in steps]),
        logprobs=torch.cat([step.logprobs for step in steps]),
        values=torch.cat([step.values for step in steps]),
        extras={name: torch.cat([step.extras[name] for step in steps]) for name in steps[0].extras},
    )


class Policy(nn.Module, ABC):
    """Base of all policies; `rlinf_workers.testing.policies` checks an implementation.

    The constructor is called as `cls(fields, actions, seed=..., **options)`: the observations and actions of one row of
    the environment, and the recipe's options. The same arguments give the same weights in every process. The weights
    are the tensors of `state_dict()`: parameters, which are trained, and buffers, such as statistics; all of them are
    sent to the rollout, saved and loaded.
    """

    noise_size: int
    """Number of standard normal numbers that are needed to sample one row's chunk."""
    values_cost_less: bool = False
    """Whether `values` costs less than an answer; the rollout then calls it for states that need only a value."""
    backbone: ClassVar[tuple[str, ...]] = ()
    """Modules that an adapter (`actor.lora`) may change: their weights are frozen and low-rank updates of their linear
    layers are trained; all other modules are trained fully. Empty: the policy supports no adapter. A policy that does
    is also constructed with torch's default device `meta`, and must then read no weights."""

    @classmethod
    @abstractmethod
    def needs(cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, **options: Any) -> Needs:
        """The requirements of a policy with these arguments. Called before any process starts, so no weights are loaded
        here.

        Raises: PolicyError for fields, actions or options that the policy does not support.
        """

    @abstractmethod
    def act(self, fields: Fields, noise: Tensor | None) -> PolicyStep:
        """Answers n independent rows. Called without gradients.

        Args:
            noise: [n, noise_size], standard normal, the only source of randomness, so that results do not depend on the
                plan; None: the most likely actions.
        """

    @abstractmethod
    def evaluate(self, fields: Fields, actions: Tensor, extras: Mapping[str, Tensor]) -> ModelOutputs:
        """Log-probabilities and values of actions [n, K, A], differentiable; for the actions of `act`, the same numbers
        as in its answer.

        Args:
            extras: those of the answer; empty if it has none.
        """

    def values(self, fields: Fields) -> Tensor:
        """The values that `act` would return, independent of its noise; for a policy with `values_cost_less`."""
        raise NotImplementedError(f"{type(self).__name__} returns values only with answers")

    def imitate(self, fields: Fields, actions: Tensor, noise: Tensor) -> Tensor:
        """The supervised loss of demonstrated chunks, one number for each independent row, [n], differentiable. The
        default is the negative log-probability of the chunk.

        Args:
            actions: [n, K, A], as in `PolicyStep.actions`.
            noise: [n, noise_size], standard normal, the only source of randomness of the loss.
        """
        return -self.evaluate(fields, actions, {}).logprobs.reshape(len(actions), -1).sum(1)

    def write_published(self, output: Path, dtype: torch.dtype | None = None) -> Sequence[str]:
        """Writes the policy in the format of the published checkpoint that it started from.

        Args:
            output: an existing, empty folder.
            dtype: dtype of all floating-point weights; None: as in the checkpoint.

        Returns: names of parameters for which the format has no place, such as those of a value head.
        Raises: PolicyError if the policy has no such format, or did not start from a checkpoint.
        """
        raise PolicyError(f"{type(self).__name__} has no published format")

    def action_range(self) -> tuple[Tensor, Tensor] | None:
        """The numbers of an action that the statistics of the policy's training scale to -1 and 1, [A] each, in the
        environment's convention; infinite for numbers that are not scaled. None: it has no such statistics."""
        return None

    def observation_sums(self, fields: Fields) -> Tensor:
        """[S] float64 on the CPU, sums over n rows for `absorb`; empty for a policy without statistics. The actor adds
        them up over the shards of a step."""
        return torch.zeros(0, dtype=torch.float64)

    def absorb(self, sums: Tensor) -> None:
        """Updates the statistics (buffers) with the sums over all rows of a step, [S], after the step's updates."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings:
    """A policy and its environment; the same settings give the same weights in every process."""

    name: str
    """A name of the registry, or an import path `package.module:Class`."""
    fields: dict[str, FieldSpec]
    """The observation of one row of the environment."""
    actions: ActionSpec
    """The actions of one row of the environment."""
    options: dict[str, Any]
    seed: int = 0
    wide_heads: bool = False
    """Whether modules outside the backbone are always float32, because they are trained together with an adapter."""


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
    """The policy without weights, which takes neither memory nor time; only for policies with a `backbone`."""
    with torch.device("meta"):
        return POLICIES.get(settings.name)(settings.fields, settings.actions, seed=settings.seed, **settings.options)
