"""Demonstrations by Meta-World's scripted experts, one per task.

An expert may fail, see `success`. Each episode ends with its first success or at its time limit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlinf_envs.adapters.metaworld.env import MetaworldEnv, described
from rlinf_envs.core.env_spec import EnvSpec
from rlinf_envs.core.vector import SingleObservation
from rlinf_envs.demonstrations.base import Demonstration, stacked
from rlinf_envs.errors import EnvError


def record_expert(spec: EnvSpec, seed: int) -> Demonstration:
    """Records one episode of the environment that `spec` describes."""
    (demonstration,) = record_demonstrations(
        spec.id, 1, seed=seed, max_episode_steps=spec.max_episode_steps, **dict(spec.options)
    )
    return demonstration


def record_demonstrations(
    env_id: str, num_episodes: int, *, seed: int = 0, max_episode_steps: int | None = None, **options: Any
) -> list[Demonstration]:
    """Records `num_episodes` episodes of a task or suite, with the seeds seed, seed + 1, ...

    The options are `make_metaworld`'s, so that the fields are those of the training environment. A suite's tasks take
    turns. EnvError as there.
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
    env.reset(seed)
    rows: list[SingleObservation] = []
    actions: list[np.ndarray] = []
    rewards: list[float] = []
    success = False
    while len(actions) < limit and not success:
        (action,) = env.expert_actions(1)
        rows.append(env.observe())
        step = env.step(action)
        actions.append(action)
        rewards.append(step.reward)
        success = bool(step.success)
    return Demonstration(
        task=env.task,
        seed=seed,
        observations=stacked(rows),
        actions=torch.from_numpy(np.stack(actions)),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        success=success,
    )
