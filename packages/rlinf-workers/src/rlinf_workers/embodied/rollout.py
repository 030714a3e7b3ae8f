"""Rollout: its policy answers observations with actions, and it keeps what training needs. Action, value and
log-probability come from one forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.policies.base import Answer, PolicySettings, make_policy
from rlinf_workers.records.embodied import Action, GroupObservation, Trajectory
from rlinf_workers.serving import ServedModule, ServingWorker


@dataclass
class _Segment:
    """What one group has done since its reset; lists by time."""

    fields: list[dict[str, Tensor]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    next_values: list[Tensor] = field(default_factory=list)
    results: list[GroupObservation] = field(default_factory=list)


class EmbodiedRollout(ServingWorker):
    """The rollout role of embodied flows. A group always meets the same rank, which holds its segment."""

    def __init__(self, settings: PolicySettings) -> None:
        self._policy = make_policy(settings, self.device)
        self._served = ServedModule(self._policy, self.device)

    @torch.no_grad()
    def act(
        self, observations: Reader[GroupObservation], actions: Writer[Action], trajectories: Writer[Trajectory]
    ) -> None:
        """Stage: observations in; actions out at once, and a trajectory when a segment is whole (training only)."""
        training = self.step.phase == "train"
        segments: dict[int, _Segment] = {}
        for chunk in observations:
            answers: list[tuple[int, Action]] = []
            for observation in chunk:
                answer, next_values = self._answer(observation, training)
                if not observation.is_last:
                    action = Action(group=observation.group, time=observation.time, actions=answer.actions.cpu())
                    answers.append((observation.group, action))
                if training:
                    self._extend(segments, observation, answer, next_values, trajectories)
            actions.put_many(answers)

    def _answer(self, observation: GroupObservation, training: bool) -> tuple[Answer, Tensor]:
        """What to do next, and the values of the states that the last chunk led to. One forward over both, of a
        shape that depends on the group alone, so that numbers do not depend on the plan."""
        num_envs = len(observation.rewards)
        reached = observation.fields if observation.final_fields is None else observation.final_fields
        fields = {name: torch.cat([shown, reached[name]]).to(self.device) for name, shown in observation.fields.items()}
        noise = self._noise(observation, 2 * num_envs) if training else None
        both = self._policy.act(fields, noise)
        return both.rows(slice(num_envs)), both.values[num_envs:].cpu()

    def _noise(self, observation: GroupObservation, num_rows: int) -> Tensor:
        key = [self.step.seed, (self.step.step << 40) | (observation.group << 20) | observation.time]
        values = np.random.Generator(np.random.Philox(key=key)).standard_normal((num_rows, self._policy.noise_size))
        return torch.from_numpy(values).float().to(self.device)

    def _extend(
        self,
        segments: dict[int, _Segment],
        observation: GroupObservation,
        answer: Answer,
        next_values: Tensor,
        trajectories: Writer[Trajectory],
    ) -> None:
        segment = segments.setdefault(observation.group, _Segment())
        if observation.time > 0:
            segment.results.append(observation)
            segment.next_values.append(next_values)
        if not observation.is_last:
            segment.fields.append(observation.fields)
            segment.answers.append(answer)
            return
        del segments[observation.group]
        trajectory = self._trajectory(observation.group, segment)
        trajectories.put(trajectory, key=observation.group)

    def _trajectory(self, group: int, segment: _Segment) -> Trajectory:
        return Trajectory(
            group=group,
            fields={name: torch.stack([shown[name] for shown in segment.fields]) for name in segment.fields[0]},
            actions=torch.stack([answer.actions for answer in segment.answers]).cpu(),
            extras={
                name: torch.stack([answer.extras[name] for answer in segment.answers]).cpu()
                for name in segment.answers[0].extras
            },
            rollout_logprobs=torch.stack([answer.logprobs for answer in segment.answers]).cpu(),
            values=torch.stack([answer.values for answer in segment.answers]).cpu(),
            next_values=torch.stack(segment.next_values),
            rewards=torch.stack([result.rewards for result in segment.results]),
            terminated=torch.stack([result.terminated for result in segment.results]),
            truncated=torch.stack([result.truncated for result in segment.results]),
            policy_version=self._version,
        )
