"""Policy: answers observations with actions, and keeps what training needs. Action, value and log-probability come
from one forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.models.placement import move_model
from rlinf_workers.policies.actor_critic import ActorCritic, ActorCriticOutput, ActorCriticSettings
from rlinf_workers.records.embodied import Action, Observation, Trajectory
from rlinf_workers.worker import Worker


@dataclass
class _Segment:
    """What one group has done since its reset; lists by time."""

    states: list[Tensor] = field(default_factory=list)
    outputs: list[ActorCriticOutput] = field(default_factory=list)
    next_values: list[Tensor] = field(default_factory=list)
    results: list[Observation] = field(default_factory=list)


class EmbodiedRollout(Worker):
    """The rollout role of embodied flows. A group always meets the same rank, which holds its segment."""

    def __init__(self, settings: ActorCriticSettings) -> None:
        self._model = ActorCritic(settings).to(self.device)
        self._noise_size = settings.head_size
        self._version = -1

    @torch.no_grad()
    def act(self, observations: Reader[Observation], actions: Writer[Action], trajectories: Writer[Trajectory]) -> None:
        """Stage: observations in; actions out at once, and a trajectory when a segment is whole (training only)."""
        training = self.step.phase == "train"
        segments: dict[int, _Segment] = {}
        for chunk in observations:
            answers: list[tuple[int, Action]] = []
            for observation in chunk:
                output, next_values = self._forward(observation, training)
                if not observation.is_last:
                    action = Action(group=observation.group, time=observation.time, actions=output.actions.cpu())
                    answers.append((observation.group, action))
                if training:
                    self._extend(segments, observation, output, next_values, trajectories)
            actions.put_many(answers)

    def _forward(self, observation: Observation, training: bool) -> tuple[ActorCriticOutput, Tensor]:
        """What to do next, and the values of the states that the last action led to. One forward over both, of a
        shape that depends on the group alone, so that numbers do not depend on the plan."""
        num_envs = len(observation.state)
        reached = observation.state if observation.final_state is None else observation.final_state
        states = torch.cat([observation.state, reached]).to(self.device)
        noise = self._noise(observation, len(states)) if training else None
        output = self._model(states, noise=noise)
        mine = ActorCriticOutput(
            actions=output.actions[:num_envs],
            logprobs=output.logprobs[:num_envs],
            entropy=output.entropy[:num_envs],
            values=output.values[:num_envs],
        )
        return mine, output.values[num_envs:].cpu()

    def _noise(self, observation: Observation, num_rows: int) -> Tensor:
        key = [self.step.seed, (self.step.step << 40) | (observation.group << 20) | observation.time]
        values = np.random.Generator(np.random.Philox(key=key)).standard_normal((num_rows, self._noise_size))
        return torch.from_numpy(values).float().to(self.device)

    def _extend(
        self,
        segments: dict[int, _Segment],
        observation: Observation,
        output: ActorCriticOutput,
        next_values: Tensor,
        trajectories: Writer[Trajectory],
    ) -> None:
        segment = segments.setdefault(observation.group, _Segment())
        if observation.time > 0:
            segment.results.append(observation)
            segment.next_values.append(next_values)
        if not observation.is_last:
            segment.states.append(observation.state)
            segment.outputs.append(output)
            return
        del segments[observation.group]
        trajectory = self._trajectory(observation.group, segment)
        trajectories.put(trajectory, key=observation.group, policy_version=self._version)

    def _trajectory(self, group: int, segment: _Segment) -> Trajectory:
        return Trajectory(
            group=group,
            states=torch.stack(segment.states),
            actions=torch.stack([output.actions for output in segment.outputs]).cpu(),
            rollout_logprobs=torch.stack([output.logprobs for output in segment.outputs]).cpu(),
            values=torch.stack([output.values for output in segment.outputs]).cpu(),
            next_values=torch.stack(segment.next_values),
            rewards=torch.stack([result.rewards for result in segment.results]),
            terminated=torch.stack([result.terminated for result in segment.results]),
            truncated=torch.stack([result.truncated for result in segment.results]),
            policy_version=self._version,
        )

    def weights(self) -> Mapping[str, Tensor]:
        return dict(self._model.state_dict(keep_vars=True))

    def weights_received(self, policy_version: int) -> None:
        self._version = policy_version

    @property
    def policy_version(self) -> int:
        return self._version

    def onload(self) -> None:
        move_model(self._model, self.device)

    def offload(self) -> None:
        move_model(self._model, torch.device("cpu"))
