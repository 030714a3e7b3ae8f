"""A toy arm on a line: two discrete actions move it, and it is rewarded for being near its goal."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rlinf_envs import BatchedEnv, Demonstration, EnvSpec, vector_of_callable


class Arm(gym.Env):
    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-10, 10, (2,), np.float32)

    def __init__(self, speed: float = 0.1) -> None:
        self._speed = speed

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._position, self._goal = self.np_random.uniform(-1, 1, 2)
        return self._seen(), {}

    def step(self, action):
        self._position += self._speed if action else -self._speed
        distance = abs(self._position - self._goal)
        return self._seen(), -distance, False, False, {"success": bool(distance < self._speed)}

    def _seen(self):
        return np.array([self._position, self._goal], np.float32)


def make_arms(
    env_id: str, num_envs: int, *, max_episode_steps: int | None, ignore_terminations: bool, speed: float = 0.1
) -> BatchedEnv:
    """`num_envs` arms; the ids differ in nothing but their own limit."""
    return vector_of_callable(
        lambda: Arm(speed), num_envs, max_episode_steps=max_episode_steps, ignore_terminations=ignore_terminations
    )


def record_expert(spec: EnvSpec, seed: int) -> Demonstration:
    """Moves towards the goal."""
    options: dict[str, Any] = dict(spec.options)
    arm = Arm(**options)
    states, actions, rewards = [arm.reset(seed=seed)[0]], [], []
    for _ in range(spec.max_episode_steps or 40):
        actions.append(int(states[-1][0] < states[-1][1]))
        state, reward, *_, info = arm.step(actions[-1])
        states.append(state)
        rewards.append(reward)
    return Demonstration(
        task=spec.id,
        seed=seed,
        observations={"state": torch.from_numpy(np.stack(states[:-1]))},
        actions=torch.tensor(actions),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        success=info["success"],
    )
