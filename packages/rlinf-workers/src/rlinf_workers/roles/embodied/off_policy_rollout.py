"""OffPolicyRollout: acts like the other rollout and records transitions; nobody needs its values or probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlinf_comm import record
from rlinf_workers.policies.base import Fields, PolicySettings
from rlinf_workers.policies.soft import SoftPolicy
from rlinf_workers.roles.embodied.acting import ActingWorker
from rlinf_workers.roles.records.embodied import Action, GroupObservation, Transitions


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicyRolloutSettings:
    """A policy, and how long random actions replace it."""

    policy: PolicySettings
    num_random_steps: int
    """Training steps, from the first one on, whose actions are uniformly random."""


@dataclass
class _Transitions:
    """What one group has done in its segment; the lists are indexed by time."""

    policy_version: int
    fields: list[dict[str, Tensor]] = field(default_factory=list)
    next_fields: list[dict[str, Tensor]] = field(default_factory=list)
    actions: list[Tensor] = field(default_factory=list)
    rewards: list[Tensor] = field(default_factory=list)
    terminated: list[Tensor] = field(default_factory=list)


class OffPolicyRollout(ActingWorker[Transitions]):
    """The rollout role of off-policy flows."""

    def __init__(self, settings: OffPolicyRolloutSettings) -> None:
        super().__init__(settings.policy)
        self._settings, of = settings, settings.policy
        assert isinstance(self._policy, SoftPolicy), "checked by the job"
        self._soft = self._policy
        self._learned = self._soft.learned_spaces(of.fields, of.actions, **of.options).actions
        self._segments: dict[int, _Transitions] = {}
        """By group; only segments that have not ended."""

    @torch.no_grad()
    def act_on(self, observation: GroupObservation) -> tuple[Action | None, list[Transitions]]:
        if self.step.phase != "train":
            return None if observation.is_last else self._answer(observation, self._best(observation)), []
        final = observation.final_fields
        reached = None if final is None else self._soft.observe(self._here(final))
        fields = self._here(observation.fields)
        observed = self._soft.observe(fields)
        transitions = self._extend(observation, observed if reached is None else reached)
        if transitions is not None:
            return None, [transitions]
        learned = self._learned_actions(observation, observed)
        segment = self._segments[observation.group]
        segment.fields.append(_copy(observed))
        segment.actions.append(learned.cpu())
        return self._answer(observation, self._soft.execute(fields, learned)), []

    def abandon(self) -> None:
        self._segments.clear()

    @staticmethod
    def _answer(observation: GroupObservation, actions: Tensor) -> Action:
        return Action(group=observation.group, time=observation.time, actions=actions.cpu())

    def _best(self, observation: GroupObservation) -> Tensor:
        """[n, K, A], the likeliest actions."""
        return self._soft.act(self._here(observation.fields), None).actions

    def _learned_actions(self, observation: GroupObservation, observed: Fields) -> Tensor:
        """[n, *shape of a learned action]: random, or drawn from the policy."""
        num_envs = len(observation.rewards)
        if self.step.step < self._settings.num_random_steps:
            return self._random_actions(self._generator(observation), num_envs).to(self.device)
        return self._soft.sample(observed, self._noise(observation, num_envs))[0]

    def _random_actions(self, generator: np.random.Generator, num_envs: int) -> Tensor:
        low, high = self._learned.low, self._learned.high
        return low + (high - low) * torch.from_numpy(generator.random((num_envs, *low.shape), dtype=np.float32))

    def _extend(self, observation: GroupObservation, reached: Fields) -> Transitions | None:
        """Adds the results of the last chunk, which led to `reached`. Copies, because channel memory is limited and
        reused."""
        segment = self._segments.setdefault(observation.group, _Transitions(self._version))
        self._check_version(observation, segment.policy_version)
        if observation.time > 0:
            segment.next_fields.append(_copy(reached))
            segment.rewards.append(observation.rewards.sum(-1))
            segment.terminated.append(observation.terminated.clone())
        if not observation.is_last:
            return None
        del self._segments[observation.group]
        return Transitions(
            group=observation.group,
            fields=_stacked(segment.fields),
            next_fields=_stacked(segment.next_fields),
            actions=torch.stack(segment.actions),
            rewards=torch.stack(segment.rewards),
            terminated=torch.stack(segment.terminated),
            policy_version=segment.policy_version,
        )


def _copy(fields: Fields) -> dict[str, Tensor]:
    return {name: value.to("cpu", copy=True) for name, value in fields.items()}


def _stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
