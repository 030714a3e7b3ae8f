"""Demonstrations by the scripted experts that Meta-World ships, one for each task.

An expert reads Meta-World's whole observation, whatever fields are recorded, and is not always right: `success` says
so of each episode.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_envs.errors import EnvError
from rlinf_envs.metaworld_env import MetaworldEnv, described
from rlinf_envs.protocol import Observation
from rlinf_envs.vector import SingleObservation


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """One episode of an expert, T actions long."""

    task: str
    seed: int
    """The seed that its environment was reset with."""
    observations: Observation
    """[T, ...]: the fields that were shown before each action; a text as T strings."""
    actions: Tensor
    """[T, 4] float32, in -1..1."""
    rewards: Tensor
    """[T] float32: what each action earned."""
    success: bool
    """Whether the last action solved the task; the episode ends there. Else it ran into its time limit."""


def record_demonstrations(
    env_id: str, num_episodes: int, *, seed: int = 0, max_episode_steps: int | None = None, **options: Any
) -> list[Demonstration]:
    """`num_episodes` episodes of a task or suite, with the seeds seed, seed + 1, ...

    The options are `make_metaworld`'s, so that the fields are those of the environment to be trained in. A suite's
    tasks take turns. EnvError as there.
    """
    if num_episodes < 1:
        raise EnvError(f"num_episodes={num_episodes}; at least one demonstration is needed")
    tasks, limit = described(env_id, max_episode_steps, options)
    env = MetaworldEnv(tasks, **{name: value for name, value in options.items() if name != "tasks"})
    try:
        return [_recorded(env, seed + episode, limit) for episode in range(num_episodes)]
    finally:
        env.close()


def _recorded(env: MetaworldEnv, seed: int, limit: int) -> Demonstration:
    from metaworld.policies import ENV_POLICY_MAP

    shown = env.reset(seed)
    expert = ENV_POLICY_MAP[env.task]()
    rows: list[SingleObservation] = []
    actions: list[np.ndarray] = []
    rewards: list[float] = []
    success = False
    while len(actions) < limit and not success:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that its action is larger than 1, which is clipped here
            action = np.clip(expert.get_action(env.full_state), -1.0, 1.0).astype(np.float32)
        step = env.step(action)
        rows.append(shown)
        actions.append(action)
        rewards.append(step.reward)
        shown, success = step.observation, bool(step.success)
    return Demonstration(
        task=env.task,
        seed=seed,
        observations=_stacked(rows),
        actions=torch.from_numpy(np.stack(actions)),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        success=success,
    )


def _stacked(rows: list[SingleObservation]) -> Observation:
    stacked: Observation = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        stacked[name] = [str(v) for v in values] if isinstance(first, str) else torch.from_numpy(np.stack(values))
    return stacked
