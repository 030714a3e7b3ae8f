"""Rollout: its policy answers observations with actions, and it keeps what training needs. Action, value and
log-probability come from one forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.policies.base import PolicySettings, PolicyStep, make_policy
from rlinf_workers.roles.records.embodied import Action, GroupObservation, Trajectory
from rlinf_workers.serving import ServedModule, ServingWorker


@dataclass
class _Segment:
    """What one group has done since its reset; lists by time."""

    fields: list[dict[str, Tensor]] = field(default_factory=list)
    answers: list[PolicyStep] = field(default_factory=list)
    next_values: list[Tensor] = field(default_factory=list)
    results: list[GroupObservation] = field(default_factory=list)


class EmbodiedRollout(ServingWorker):
    """The rollout role of embodied flows. A group always meets the same rank, which holds its segment."""

    def __init__(self, settings: PolicySettings) -> None:
        self._policy = make_policy(settings, self.device)
        self._served = ServedModule(self._policy, self.device)
        self._segments: dict[int, _Segment] = {}
        """Of the groups whose segments have not ended."""

    def act(
        self, observations: Reader[GroupObservation], actions: Writer[Action], trajectories: Writer[Trajectory]
    ) -> None:
        """Stage: observations in; actions out at once, and a trajectory when a segment is whole (training only)."""
        for chunk in observations:
            actions_of_chunk: list[tuple[int, Action]] = []
            for observation in chunk:
                action, trajectory = self.act_on(observation)
                if action is not None:
                    actions_of_chunk.append((action.group, action))
                if trajectory is not None:
                    trajectories.put(trajectory, key=trajectory.group)
            actions.put_many(actions_of_chunk)

    @torch.no_grad()
    def act_on(self, observation: GroupObservation) -> tuple[Action | None, Trajectory | None]:
        """The actions to execute, None at the end of a segment; and the trajectory of a segment of training that has
        ended, else None."""
        training = self.step.phase == "train"
        answer, next_values = self._answer(observation, training)
        trajectory = self._extend(observation, answer, next_values) if training else None
        if observation.is_last:
            return None, trajectory
        return Action(group=observation.group, time=observation.time, actions=answer.actions.cpu()), trajectory

    def abandon(self) -> None:
        self._segments.clear()

    def _answer(self, observation: GroupObservation, training: bool) -> tuple[PolicyStep, Tensor]:
        """What to do next, and the values of the states that the last chunk led to, which training needs: first values
        of an answer to these. Forwards have shapes that depend on the group alone, so that numbers do not depend on
        the plan."""
        if self._policy.values_cost_less or any(name.startswith("image.") for name in observation.fields):
            return self._answer_apart(observation, training)
        num_envs = len(observation.rewards)
        reached = observation.fields if observation.final_fields is None else observation.final_fields
        fields = {name: torch.cat([field, reached[name]]).to(self.device) for name, field in observation.fields.items()}
        noise = self._noise(observation, 2 * num_envs) if training else None
        both = self._policy.act(fields, noise)
        return both.rows(slice(num_envs)), _first_values(both.values[num_envs:])

    def _answer_apart(self, observation: GroupObservation, training: bool) -> tuple[PolicyStep, Tensor]:
        """For a policy whose forward is what a step costs. Pictures are read where the channel has them, without a
        copy, and values of reached states are asked for where an episode has ended, or of a policy that knows them
        without an answer."""
        num_envs = len(observation.rewards)
        noise = self._noise(observation, 2 * num_envs) if training else None
        answer = self._policy.act(self._here(observation.fields), None if noise is None else noise[:num_envs])
        if noise is None:
            return answer, _first_values(answer.values)
        final = observation.final_fields
        if self._policy.values_cost_less:
            return answer, _first_values(self._policy.values(self._here(final or observation.fields)))
        reached = answer if final is None else self._policy.act(self._here(final), noise[num_envs:])
        return answer, _first_values(reached.values)

    def _here(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.device) for name, value in fields.items()}

    def _noise(self, observation: GroupObservation, num_rows: int) -> Tensor:
        key = [self.step.seed, (self.step.step << 40) | (observation.group << 20) | observation.time]
        values = np.random.Generator(np.random.Philox(key=key)).standard_normal((num_rows, self._policy.noise_size))
        return torch.from_numpy(values).float().to(self.device)

    def _extend(self, observation: GroupObservation, answer: PolicyStep, next_values: Tensor) -> Trajectory | None:
        """Adds to the segment of the group. Copies: what lies in the channel takes room there, and a segment of
        pictures may be larger than it."""
        segment = self._segments.setdefault(observation.group, _Segment())
        if observation.time > 0:
            segment.results.append(_result_of(observation))
            segment.next_values.append(next_values)
        if observation.is_last:
            return self._trajectory(observation.group, self._segments.pop(observation.group))
        segment.fields.append({name: value.clone() for name, value in observation.fields.items()})
        segment.answers.append(answer)
        return None

    def _trajectory(self, group: int, segment: _Segment) -> Trajectory:
        return Trajectory(
            group=group,
            fields={name: torch.stack([fields[name] for fields in segment.fields]) for name in segment.fields[0]},
            actions=torch.stack([answer.actions for answer in segment.answers]).cpu(),
            extras={
                name: torch.stack([answer.extras[name] for answer in segment.answers]).cpu()
                for name in segment.answers[0].extras
            },
            rollout_logprobs=torch.stack([answer.logprobs for answer in segment.answers]).cpu(),
            values=torch.stack([answer.values for answer in segment.answers]).cpu(),
            next_values=torch.stack(segment.next_values),
            rewards=torch.stack([result.rewards for result in segment.results]),
            num_executed=torch.stack([result.num_executed for result in segment.results]),
            terminated=torch.stack([result.terminated for result in segment.results]),
            truncated=torch.stack([result.truncated for result in segment.results]),
            policy_version=self._version,
        )


def _result_of(observation: GroupObservation) -> GroupObservation:
    """A copy of what the last chunk did, without what it shows."""
    names = ("rewards", "num_executed", "terminated", "truncated")
    copies = {name: getattr(observation, name).clone() for name in names}
    return replace(observation, fields={}, final_fields=None, **copies)


def _first_values(values: Tensor) -> Tensor:
    """[n] or [n, K] -> [n] on the CPU: the value of a state is that of the first action chosen in it."""
    return values.reshape(len(values), -1)[:, 0].cpu()
