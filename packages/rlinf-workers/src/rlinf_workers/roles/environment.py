"""Env: steps groups of environments with the actions that it is sent.

The environments are cut into groups, and a group is what travels: while one group waits for its action, the process
simulates another. Two groups in each process are enough to keep both the simulator and the policy busy (pipelining in
halves).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlinf_envs import BatchedEnv, EnvSpec, make_env
from rlinf_envs.protocol import EpisodeEnd, StepResult, tensor_field
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.records import Action, Observation
from rlinf_workers.worker import Worker


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSettings:
    """Which environments, and how long a segment is."""

    spec: EnvSpec
    """Of one group; `num_envs` is the group's."""
    num_groups: int
    num_steps: int
    """Steps of a training segment (T)."""
    num_eval_episodes: int
    eval_seed: int
    """Evaluation resets with eval_seed, eval_seed + 1, ...; below 2**31."""


TRAIN_SEED_BIT = 1 << 31
"""Set in every reset seed of training and in none of evaluation, so that the two never meet."""


def training_seeds(seed: int, step: int, group: int, num_envs: int) -> list[int]:
    """Reset seeds of one group's environments at a training step; below 2**32."""
    state = np.random.SeedSequence([seed, step, group]).generate_state(num_envs)
    return [int(value) | TRAIN_SEED_BIT for value in state]


@dataclass
class _Group:
    """One group on its way through its segments."""

    index: int
    env: BatchedEnv
    segments: list[list[int]]
    """Reset seeds of the segments to come."""
    num_steps: int
    time: int = 0
    counted: int = 0
    """Episodes of the present segment that count (an evaluation's last segment may be wider than what is left to
    do)."""


class Environment(Worker):
    """Simulates its share of the environment groups: group g lives on rank g % num_ranks."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._groups = [g for g in range(settings.num_groups) if g % self.num_ranks == self.rank]
        self._train = {group: make_env(settings.spec) for group in self._groups}
        self._evaluate: dict[int, BatchedEnv] = {}

    def interact(self, actions: Reader[Action], observations: Writer[Observation]) -> None:
        """Stage: actions in, observations out; the first observations come from resets. Ends when every group has
        done its segments."""
        running = {group.index: group for group in self._prepare()}
        for group in running.values():
            self._begin_segment(group, observations)
        while running:
            for action in actions.next_chunk(at_most=len(running)):
                group = running[action.group]
                self._step(group, action, observations)
                if group.time == group.num_steps:
                    if group.segments:
                        self._begin_segment(group, observations)
                    else:
                        del running[action.group]

    def _prepare(self) -> list[_Group]:
        settings, context = self._settings, self.step
        if context.phase == "train":
            return [
                _Group(
                    index=group,
                    env=self._train[group],
                    segments=[training_seeds(context.seed, context.step, group, settings.spec.num_envs)],
                    num_steps=settings.num_steps,
                )
                for group in self._groups
            ]
        return [self._prepare_evaluation(group) for group in self._groups]

    def _prepare_evaluation(self, group: int) -> _Group:
        """Whole episodes without early end; the episodes are dealt to the groups in turn, padded to whole segments."""
        settings = self._settings
        if group not in self._evaluate:
            self._evaluate[group] = make_env(replace(settings.spec, ignore_terminations=True))
        episodes = range(group, settings.num_eval_episodes, settings.num_groups)
        width = settings.spec.num_envs
        seeds = [settings.eval_seed + episode for episode in episodes]
        segments = [seeds[i : i + width] for i in range(0, len(seeds), width)]
        if not settings.spec.max_episode_steps:
            raise ValueError("env.max_episode_steps is needed for evaluation: an episode has to end")
        return _Group(
            index=group, env=self._evaluate[group], segments=segments, num_steps=settings.spec.max_episode_steps
        )

    def _begin_segment(self, group: _Group, observations: Writer[Observation]) -> None:
        seeds = group.segments.pop(0)
        group.counted, group.time = len(seeds), 0
        width = group.env.num_envs
        state = tensor_field(group.env.reset(seeds + [seeds[-1]] * (width - len(seeds))), "state")
        zeros = torch.zeros(width)
        self._send(observations, group, state, state, zeros, zeros.bool(), zeros.bool())

    def _step(self, group: _Group, action: Action, observations: Writer[Observation]) -> None:
        result: StepResult = group.env.step(action.actions)
        group.time += 1
        for episode in result.episodes:
            if episode.env_index < group.counted:
                self._record_episode(episode)
        self._send(
            observations,
            group,
            tensor_field(result.observation, "state"),
            tensor_field(result.final_observation, "state"),
            result.rewards,
            result.terminated,
            result.truncated,
        )

    def _record_episode(self, episode: EpisodeEnd) -> None:
        self.record("env/return", episode.return_)
        self.record("env/episode_length", episode.length)
        if episode.success_once is not None:
            self.record("env/success_once", float(episode.success_once))
        if episode.success_at_end is not None:
            self.record("env/success_at_end", float(episode.success_at_end))

    def _send(
        self,
        observations: Writer[Observation],
        group: _Group,
        state: Tensor,
        final_state: Tensor,
        rewards: Tensor,
        terminated: Tensor,
        truncated: Tensor,
    ) -> None:
        item = Observation(
            group=group.index,
            time=group.time,
            state=state,
            final_state=final_state,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            is_last=group.time == group.num_steps,
        )
        observations.put(item, key=group.index)

    def close(self) -> None:
        for env in [*self._train.values(), *self._evaluate.values()]:
            env.close()
