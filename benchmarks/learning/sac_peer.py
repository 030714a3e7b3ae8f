"""stable-baselines3's SAC, unmodified, doing what a line on stdin says. Started by sac_comparison.py.

arguments: name of the task, seed, file with demonstrated transitions or -
stdin:     "round" or "evaluate", one a line
stdout:    {"ready": versions} once, then {"seconds": ..., "cpu_s": ...} or {"return": ..., "success": ...} a line
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

import gymnasium
import numpy as np
import torch
from benchmarks.learning.sac_tasks import HIDDEN_SIZE, NUM_LAYERS, TASKS, Task, evaluate
from torch import Tensor

from rlinf_envs import make_env


class OneEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """One environment of rlinf-envs as Gymnasium's interface has it, for tasks that Gymnasium does not register."""

    def __init__(self, task: Task) -> None:
        self._env = make_env(task.spec(1))
        spec = self._env.action_spec
        self.action_space = gymnasium.spaces.Box(spec.low.numpy(), spec.high.numpy(), dtype=np.float32)
        shape = self._env.observation_spec["state"].shape
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, dtype=np.float32)
        self._first: np.ndarray | None = None
        """The first observation of an episode that follows one that has ended."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        if self._first is None or seed is not None:
            self._first = _state(self._env.reset([seed or 0]))
        first, self._first = self._first, None
        return first, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        result = self._env.step(torch.from_numpy(action[None]))
        if result.episodes:
            self._first = _state(result.observation)
        ends = bool(result.terminated[0]), bool(result.truncated[0])
        return _state(result.final_observation), float(result.rewards[0]), *ends, {"TimeLimit.truncated": ends[1]}


def _state(observation: Any) -> np.ndarray:
    return observation["state"][0].numpy().copy()


def make_model(task: Task, seed: int) -> Any:
    from stable_baselines3 import SAC  # type: ignore[import-not-found] - only in the interpreter that runs this file
    from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found]
    from stable_baselines3.common.logger import configure  # type: ignore[import-not-found]

    env_id: Any = task.id if task.kind == "gymnasium" else lambda: OneEnv(task)
    model = SAC(
        "MlpPolicy",
        make_vec_env(env_id, n_envs=task.num_envs, seed=seed),
        learning_rate=task.learning_rate,
        buffer_size=task.buffer_size,
        learning_starts=task.num_random,
        batch_size=task.batch_size,
        gamma=task.gamma,
        train_freq=(task.num_steps, "step"),
        gradient_steps=task.updates,
        policy_kwargs={"net_arch": [HIDDEN_SIZE] * NUM_LAYERS, "n_critics": task.num_critics},
        seed=seed,
        device="cpu",
    )
    model.set_logger(configure(None, []))
    return model


def add_demonstrations(model: Any, task: Task, path: str) -> None:
    """Adds demonstrated transitions to the buffer, which holds `num_envs` in each row; the rest of the last is
    repeated."""
    columns = {name: values.numpy() for name, values in torch.load(path, weights_only=True).items()}
    count = len(columns["rewards"])
    low, high = model.action_space.low, model.action_space.high
    scaled = 2 * (columns["actions"] - low) / (high - low) - 1
    for first in range(0, count, task.num_envs):
        rows = np.arange(first, first + task.num_envs) % count
        model.replay_buffer.add(
            columns["state"][rows],
            columns["next_state"][rows],
            scaled[rows],
            columns["rewards"][rows],
            columns["terminated"][rows],
            [{} for _ in rows],
        )


def main() -> None:
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the library prints goes to stderr
    warnings.filterwarnings("ignore")
    task = TASKS[sys.argv[1]]
    model = make_model(task, int(sys.argv[2]))
    if sys.argv[3] != "-":
        add_demonstrations(model, task, sys.argv[3])

    def act(states: Tensor) -> Tensor:
        return torch.from_numpy(model.predict(states.numpy(), deterministic=True)[0])

    def take_round() -> dict[str, float]:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        is_random = model.num_timesteps + task.env_steps <= task.num_random
        model.learn(task.env_steps, reset_num_timesteps=False)
        if is_random:  # the library does not update while actions are random, and ours does
            model.train(task.updates, task.batch_size)
        return {"seconds": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s}

    import stable_baselines3  # type: ignore[import-not-found]

    lines.write(json.dumps({"ready": {"stable-baselines3": stable_baselines3.__version__}}) + "\n")
    for line in sys.stdin:
        lines.write(json.dumps(take_round() if line.strip() == "round" else evaluate(task, act)) + "\n")


if __name__ == "__main__":
    main()
