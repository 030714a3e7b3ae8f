"""Rollout: its policy maps observations to actions, and it records what training needs. Action, value and
log-probability come from one forward pass.

Rows of whole episodes (`GroupObservation.episodes`) act `NUM_ROWS` at a time on a CPU, each in the place of its
episode, so that their numbers do not depend on how many simulators there are; a GPU answers all rows of a group at once
(docs/decisions/056).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rlinf_workers.models.placement import tensors_of
from rlinf_workers.policies.base import Policy, PolicySettings, PolicyStep, joined_steps
from rlinf_workers.roles.embodied.acting import ActingWorker
from rlinf_workers.roles.embodied.episode_log import EpisodeLog
from rlinf_workers.roles.records.embodied import Action, GroupObservation, Trajectory

NUM_ROWS = 4
"""Passes of one shape have the same numbers for a row in the same place, whatever the other rows are. With another
number of rows, or in another place, they may differ: a linear layer of 64 inputs and 2 outputs computes some rows of a
batch in another order than others."""


@dataclass
class _Segment:
    """What one group has done since its reset; the lists are indexed by time."""

    policy_version: int
    """The version that acts and estimates values, from the first observation to the last."""
    fields: list[dict[str, Tensor]] = field(default_factory=list)
    answers: list[PolicyStep] = field(default_factory=list)
    next_values: list[Tensor] = field(default_factory=list)
    results: list[GroupObservation] = field(default_factory=list)


@dataclass
class _ActingStep:
    """A training step of whole episodes."""

    policy_version: int
    policy: Policy
    """Holds the weights of that version."""
    log: EpisodeLog


class EmbodiedRollout(ActingWorker[Trajectory]):
    """The rollout role of on-policy flows. A group is always served by the same rank, which holds its segment, or its
    episodes.

    Args:
        num_groups: environment groups, which end at different times if a step is whole episodes; 0: they end together.
        group_size: consecutive episodes that begin at the same start, if a step is whole episodes.
    """

    def __init__(self, settings: PolicySettings, num_groups: int = 0, group_size: int = 1) -> None:
        super().__init__(settings, num_groups)
        self._group_size = group_size
        self._segments: dict[int, _Segment] = {}
        """By group; only segments that have not ended."""
        self._acting: dict[int, _ActingStep] = {}
        """Step -> how its whole episodes are acted in; the newest two."""
        self._earlier: Policy | None = None
        """The weights of the step before, which goes on while the next one has received its own."""

    @torch.no_grad()
    def act_on(self, observation: GroupObservation) -> tuple[Action | None, list[Trajectory]]:
        if observation.episodes is not None:
            return self._act_in_episodes(self._acting_step(), observation, observation.episodes)
        training = self.step.phase == "train"
        answer, next_values = self._answer(observation, training)
        trajectory = self._extend(observation, answer, next_values) if training else None
        complete = [] if trajectory is None else [trajectory]
        if observation.is_last:
            return None, complete
        return Action(group=observation.group, time=observation.time, actions=answer.actions.cpu()), complete

    # -- whole episodes --------------------------------------------------------------------------------------------

    def begin_acting(self) -> None:
        if self.is_ahead:
            self._acting_step()

    def end_acting(self) -> None:
        self._acting.pop(self.step.step, None)

    @torch.no_grad()
    def before_new_weights(self) -> None:
        """Copies the weights for the steps that go on with them."""
        if not self._acting:
            return
        if self._earlier is None:
            self._earlier = deepcopy(self._policy)
        else:
            for name, tensor in tensors_of(self._earlier).items():
                tensor.copy_(tensors_of(self._policy)[name])
        for acting in self._acting.values():
            acting.policy = self._earlier

    def _acting_step(self) -> _ActingStep:
        """The step of the calling stage. Its first call comes when the weights are those of its run."""
        step = self.step.step
        if step not in self._acting:
            self._acting = {other: acting for other, acting in self._acting.items() if other == step - 1}
            self._acting[step] = _ActingStep(self._version, self._policy, EpisodeLog(self._group_size))
        return self._acting[step]

    def _act_in_episodes(
        self, acting: _ActingStep, observation: GroupObservation, episodes: Tensor
    ) -> tuple[Action | None, list[Trajectory]]:
        """Rows at rest get actions of zeros, which are not executed."""
        log, complete = acting.log, []
        if observation.time:
            complete = log.add_results(observation, self._last_values(acting, observation))
        if observation.is_last:
            return None, complete
        rows = (episodes >= 0).nonzero()[:, 0].tolist()
        numbers = episodes[rows].tolist()
        answer = self._answer_rows(acting.policy, observation.fields, rows, numbers, self._noise_of(log, numbers))
        log.add_answers(observation, rows, answer, acting.policy_version)
        actions = torch.zeros(len(episodes), *answer.actions.shape[1:], dtype=answer.actions.dtype)
        actions[rows] = answer.actions.cpu()
        return Action(group=observation.group, time=observation.time, actions=actions), complete

    def _last_values(self, acting: _ActingStep, observation: GroupObservation) -> Tensor:
        """[n], values of the last states of episodes that have just ended, 0 for other rows."""
        values = torch.zeros(len(observation.rewards))
        rows = (observation.terminated | observation.truncated).nonzero()[:, 0].tolist()
        if observation.final_fields is not None and rows:
            noise = torch.zeros(len(rows), self._policy.noise_size, device=self.device)
            episodes = acting.log.acting(observation.group)
            numbers = [episodes[row] for row in rows]
            answer = self._answer_rows(acting.policy, observation.final_fields, rows, numbers, noise)
            values[rows] = _first_values(answer.values)
        return values

    def _answer_rows(
        self, policy: Policy, fields: Mapping[str, Tensor], rows: list[int], episodes: list[int], noise: Tensor
    ) -> PolicyStep:
        """Answers these rows, [m], which act in these episodes."""
        if self.device.type != "cpu":
            return policy.act(self._here({name: value[rows] for name, value in fields.items()}), noise)
        passes, places = _passes(episodes)
        steps = []
        for few in passes:
            chosen = {name: values[[rows[index] for index in few]] for name, values in fields.items()}
            steps.append(policy.act(chosen, noise[few]))
        return joined_steps(steps).rows(torch.tensor(places))

    def _noise_of(self, log: EpisodeLog, episodes: list[int]) -> Tensor:
        """[m, noise_size], which depends only on the seed, the step, the episode and its time."""
        keys = [
            [self.step.seed, (self.step.step << 40) | (episode << 16) | time]
            for episode, time in zip(episodes, log.times(episodes), strict=True)
        ]
        rows = [np.random.Generator(np.random.Philox(key=key)).standard_normal(self._policy.noise_size) for key in keys]
        return torch.from_numpy(np.stack(rows)).float().to(self.device)

    def abandon(self) -> None:
        self._segments.clear()
        self._acting.clear()

    # -- segments --------------------------------------------------------------------------------------------------

    def _answer(self, observation: GroupObservation, training: bool) -> tuple[PolicyStep, Tensor]:
        """Returns the next step and the values of the states that the last chunk led to, which training needs: the
        first values of a forward pass on them. Batch shapes depend only on the group, so that numbers do not depend on
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
        """For a policy whose forward pass dominates the cost of a step. Pictures are read in the channel's memory,
        without a copy; values of reached states are computed only if an episode has ended, or if the policy can compute
        values without a full step."""
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

    def _extend(self, observation: GroupObservation, answer: PolicyStep, next_values: Tensor) -> Trajectory | None:
        """Adds to the segment of the group. Copies, because channel memory is limited and a segment of pictures may
        exceed it."""
        segment = self._segments.setdefault(observation.group, _Segment(self._version))
        self._check_version(observation, segment.policy_version)
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
            policy_version=segment.policy_version,
        )


def _passes(episodes: list[int]) -> tuple[list[list[int]], list[int]]:
    """Cuts rows into passes of `NUM_ROWS`: place p of a pass is for a row whose episode's number is p modulo
    `NUM_ROWS`, or for any row to fill it up.

    Returns: the rows of each pass, and the place of each row in the answers to all of them.
    """
    own: list[list[int]] = [[] for _ in range(NUM_ROWS)]
    places = []
    for row, episode in enumerate(episodes):
        of_place = own[episode % NUM_ROWS]
        places.append(len(of_place) * NUM_ROWS + episode % NUM_ROWS)
        of_place.append(row)
    num_passes = max(map(len, own))
    return [[rows[number] if number < len(rows) else 0 for rows in own] for number in range(num_passes)], places


def _result_of(observation: GroupObservation) -> GroupObservation:
    """A copy of the results of the last chunk, without the observation itself."""
    names = ("rewards", "num_executed", "terminated", "truncated")
    copies = {name: getattr(observation, name).clone() for name in names}
    return replace(observation, fields={}, final_fields=None, **copies)


def _first_values(values: Tensor) -> Tensor:
    """[n] or [n, K] -> [n] on the CPU: the value of a state is the value of the first action chosen in it."""
    return values.reshape(len(values), -1)[:, 0].cpu()
