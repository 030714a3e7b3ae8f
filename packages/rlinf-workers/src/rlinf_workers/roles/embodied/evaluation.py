"""Evaluates a trained policy without training: the env and policy roles alone.

They compute what the evaluations of a run compute, so the same seeds in the same environments give the same numbers.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rlinf_comm import record
from rlinf_envs import EpisodeEnd
from rlinf_workers.models.language_model import is_adapter
from rlinf_workers.models.lora import add_adapter
from rlinf_workers.policies.base import Policy, PolicySettings, PolicyStep, make_policy
from rlinf_workers.roles.embodied.actor import PolicyModel
from rlinf_workers.roles.embodied.environment import Environment, EnvironmentSettings
from rlinf_workers.roles.embodied.rollout import EmbodiedRollout
from rlinf_workers.roles.records.embodied import GroupObservation

record(EpisodeEnd)


class EvaluationEnvironment(Environment):
    """An env worker that only evaluates, in environments that may change between evaluations."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._groups = self._own_groups(settings.num_groups)
        self._threads = ThreadPoolExecutor(max(1, len(self._groups))) if settings.spec.num_processes else None
        self._pictures = self._picture_pool()
        self._train = {}
        self._evaluate = {}
        self._last_observations = {}
        self._ends: list[EpisodeEnd] = []

    def evaluate_in(self, settings: EnvironmentSettings) -> None:
        """Evaluates in these environments from now on. The number of groups, the observation fields, and whether groups
        have processes of their own must stay the same."""
        for env in self._evaluate.values():
            env.close()
        self._evaluate.clear()
        self._settings = settings

    def take_episodes(self) -> list[EpisodeEnd]:
        """Returns the episodes that ended since the last call."""
        ends, self._ends = self._ends, []
        return ends

    def _record_episode(self, episode: EpisodeEnd, cut: bool) -> None:
        super()._record_episode(episode, cut)
        self._ends.append(episode)


class EvaluationPolicy(EmbodiedRollout):
    """A policy worker that acts with the weights of a checkpoint."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._is_one_by_one = False

    def load_policy(self, folder: str) -> None:
        """Loads the weights of a model's checkpoint folder, or of an adapter. Raises: WeightFilesError naming tensors
        that are missing or have another shape."""
        _load_weights(self._policy, self._settings, folder)

    def act_one_by_one(self) -> None:
        """From now on, answers one environment at a time: a row's numbers then do not depend on the rows beside it."""
        self._is_one_by_one = True

    def _answer(self, observation: GroupObservation, training: bool) -> tuple[PolicyStep, Tensor]:
        if not self._is_one_by_one:
            return super()._answer(observation, training)
        rows = (
            {name: value[row : row + 1].clone() for name, value in observation.fields.items()}
            for row in range(len(observation.rewards))
        )
        steps = [self._policy.act(self._here(row), None) for row in rows]
        actions, logprobs, values = (
            torch.cat([getattr(step, name) for step in steps]) for name in ("actions", "logprobs", "values")
        )
        return PolicyStep(actions=actions, logprobs=logprobs, values=values), values


def load_policy(settings: PolicySettings, folder: str, device: torch.device) -> Policy:
    """Returns a policy with the weights of a model's checkpoint folder, or of an adapter.

    Raises: WeightFilesError naming tensors that are missing or have another shape.
    """
    policy = make_policy(settings, device)
    _load_weights(policy, settings, folder)
    return policy


def _load_weights(policy: Policy, settings: PolicySettings, folder: str) -> None:
    if is_adapter(folder):
        add_adapter(policy, folder)
    else:
        PolicyModel(settings).load(policy, folder)
