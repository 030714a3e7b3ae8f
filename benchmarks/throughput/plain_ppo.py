"""PPO in one script, as people write it: a loop over vectorised environments, a buffer, epochs of minibatches.

The settings are those of the recipe pushcube-ppo, and so are the network's sizes. The environments are ManiSkill's own
(without rlinf-envs' exact resets), each in a process of Gymnasium's AsyncVectorEnv or all in this one (SyncVectorEnv).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from rlinf_envs.adapters.maniskill.tasks import registered_tasks
from rlinf_envs.adapters.maniskill.without_vulkan import disable_visuals, has_vulkan_device

NUM_ENVS, NUM_STEPS, EPISODE = 8, 50, 50
GAMMA, LAMBDA, CLIP, EPOCHS, MINIBATCHES, LEARNING_RATE, MAX_NORM = 0.95, 0.9, 0.2, 8, 4, 3e-4, 0.5


def make_env() -> gymnasium.Env:
    """One PushCube of ManiSkill, by its wrapper for one environment on the CPU; it goes on after success."""
    registered_tasks()
    if not has_vulkan_device():
        disable_visuals()
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    env = gymnasium.make(
        "PushCube-v1",
        obs_mode="state",
        sim_backend="physx_cpu",
        render_backend="none",
        control_mode="pd_joint_delta_pos",
        reward_mode="normalized_dense",
    )
    return CPUGymWrapper(env, ignore_terminations=True)


def _tower(num_inputs: int, num_outputs: int) -> nn.Sequential:
    sizes = (num_inputs, 128, 128, 128)
    layers = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], num_outputs))


class PlainPpo:
    """One side of a comparison: `step` collects and learns from `NUM_STEPS` of every environment.

    Args:
        vector: makes the vectorised environments out of the makers.
    """

    def __init__(self, vector: Callable[[list[Callable[[], gymnasium.Env]]], Any]) -> None:
        torch.manual_seed(0)
        self.envs = vector([make_env] * NUM_ENVS)
        num_inputs = self.envs.single_observation_space.shape[0]
        (num_actions,) = self.envs.single_action_space.shape
        self.policy, self.value = _tower(num_inputs, num_actions), _tower(num_inputs, 1)
        self.log_std = nn.Parameter(torch.full((num_actions,), -1.0))
        self.parameters = [*self.policy.parameters(), *self.value.parameters(), self.log_std]
        self.adam = torch.optim.Adam(self.parameters, lr=LEARNING_RATE, eps=1e-5)
        self.count, self.mean, self.square = 1e-4, torch.zeros(num_inputs), torch.ones(num_inputs)
        self.seed = 0

    def step(self, index: int) -> float:
        """Seconds."""
        began_s = time.perf_counter()
        self._learn(*self._collect())
        return time.perf_counter() - began_s

    def _normalize(self, states: Tensor) -> Tensor:
        deviation = (self.square - self.mean**2).clamp(min=1e-8).sqrt()
        return ((states - self.mean) / deviation).clamp(-10, 10)

    @torch.no_grad()
    def _collect(self) -> tuple[Tensor, ...]:
        """States, actions, log-probabilities, advantages and returns, flat; an episode is a segment and is cut at its
        end, where the value goes on."""
        self.seed += NUM_ENVS
        state = torch.as_tensor(self.envs.reset(seed=self.seed)[0])
        trajectory: dict[str, list[Tensor]] = {name: [] for name in ("state", "action", "logprob", "value", "reward")}
        for _ in range(NUM_STEPS):
            seen = self._normalize(state)
            normal = torch.distributions.Normal(self.policy(seen), self.log_std.exp())
            action = normal.sample()
            values = (state, action, normal.log_prob(action).sum(-1), self.value(seen)[:, 0])
            observation, reward, _, _, _ = self.envs.step(action.clamp(-1, 1).numpy())
            for name, value in zip(trajectory, (*values, torch.as_tensor(reward).float()), strict=True):
                trajectory[name].append(value)
            state = torch.as_tensor(observation)
        states, actions, logprobs, values, rewards = (torch.stack(parts) for parts in trajectory.values())
        last = self.value(self._normalize(state))[:, 0]
        advantages, running = torch.zeros_like(rewards), torch.zeros(NUM_ENVS)
        for time_index in reversed(range(NUM_STEPS)):
            following = last if time_index == NUM_STEPS - 1 else values[time_index + 1]
            running = rewards[time_index] + GAMMA * following - values[time_index] + GAMMA * LAMBDA * running
            advantages[time_index] = running
        flat = states.flatten(0, 1)
        total = self.count + len(flat)
        self.mean += (flat.mean(0) - self.mean) * len(flat) / total
        self.square += (flat.square().mean(0) - self.square) * len(flat) / total
        self.count = total
        return flat, actions.flatten(0, 1), logprobs.flatten(), advantages.flatten(), (advantages + values).flatten()

    def _learn(self, states: Tensor, actions: Tensor, logprobs: Tensor, advantages: Tensor, returns: Tensor) -> None:
        seen = self._normalize(states)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(seen)).chunk(MINIBATCHES):
                normal = torch.distributions.Normal(self.policy(seen[rows]), self.log_std.exp())
                ratio = (normal.log_prob(actions[rows]).sum(-1) - logprobs[rows]).exp()
                gain = advantages[rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
                value_loss = 0.5 * (self.value(seen[rows])[:, 0] - returns[rows]).square().mean()
                self.adam.zero_grad()
                (policy_loss + 0.5 * value_loss).backward()
                nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
                self.adam.step()
