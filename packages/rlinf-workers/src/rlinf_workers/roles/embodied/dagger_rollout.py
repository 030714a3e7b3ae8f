"""DaggerRollout: acts as in an evaluation, lets the expert act where it drives, and records what the expert named."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlinf_workers.policies.base import PolicySettings
from rlinf_workers.roles.embodied.acting import ActingWorker
from rlinf_workers.roles.records.embodied import Action, GroupObservation, LabelledSegment


@dataclass
class _Labels:
    """What the expert has named in a segment of one group."""

    policy_version: int
    fields: list[dict[str, Tensor]] = field(default_factory=list)
    actions: list[Tensor] = field(default_factory=list)


class DaggerRollout(ActingWorker[LabelledSegment]):
    """The rollout role of DAgger. The policy takes its most likely actions, so that the expert is asked about the
    observations that the policy will meet when it is used."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._segments: dict[int, _Labels] = {}
        """By group; only segments that have not ended."""

    @torch.no_grad()
    def act_on(self, observation: GroupObservation) -> tuple[Action | None, list[LabelledSegment]]:
        training = self.step.phase == "train"
        if observation.is_last:
            return None, [self._finished(observation.group)] if training else []
        actions = self._policy.act(self._here(observation.fields), None).actions.cpu()
        if training:
            self._add(observation, actions)
            if (expert := observation.expert) is not None:
                actions[expert.rows[expert.acts]] = expert.actions[expert.acts]
        return Action(group=observation.group, time=observation.time, actions=actions), []

    def abandon(self) -> None:
        self._segments.clear()

    def _add(self, observation: GroupObservation, actions: Tensor) -> None:
        """Adds the labelled rows, in copies, because channel memory is limited and reused.

        Args:
            actions: [n, K, A] of the policy.
        """
        segment = self._segments.setdefault(observation.group, _Labels(self._version))
        self._check_version(observation, segment.policy_version)
        expert = observation.expert
        rows = torch.zeros(0, dtype=torch.int64) if expert is None else expert.rows
        segment.fields.append({name: values[rows] for name, values in observation.fields.items()})
        segment.actions.append(actions[rows] if expert is None else expert.actions.clone())

    def _finished(self, group: int) -> LabelledSegment:
        segment = self._segments.pop(group)
        return LabelledSegment(
            group=group,
            fields={name: torch.cat([rows[name] for rows in segment.fields]) for name in segment.fields[0]},
            actions=torch.cat(segment.actions),
            policy_version=segment.policy_version,
        )
