"""Meta-World with pictures: environment steps a second through rlinf-envs against Meta-World itself in Gymnasium's
AsyncVectorEnv, on as many processes, in the same run.

    python -m benchmarks.throughput.metaworld

The peer draws with Gymnasium's own renderer, once without antialiasing, shadows and reflections as rlinf-envs does, and
once as Meta-World comes. Needs rlinf-envs[metaworld] and EGL.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "egl")  # before MuJoCo is imported

import gymnasium
import numpy as np
import torch
from benchmarks.harness import Step, compare, interleave, report

from rlinf_envs import EnvSpec, make_env

CAMERA = "corner2"


class Bare(gymnasium.Wrapper):
    """Meta-World's environment of a task that shows its state and one picture."""

    def __init__(self, task: str, size: int, *, is_fast: bool) -> None:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        env: Any = ALL_V3_ENVIRONMENTS[task](render_mode="rgb_array", camera_name=CAMERA, width=size, height=size)
        env.seeded_rand_vec, env._freeze_rand_vec, env._set_task_called = True, False, True
        env._partially_observable = False
        env.__dict__.pop("sawyer_observation_space", None)
        super().__init__(env)
        self._bare = env
        self._is_fast = is_fast
        if is_fast:
            env.model.vis.quality.offsamples = 0
        self.observation_space = gymnasium.spaces.Dict(
            state=gymnasium.spaces.Box(-np.inf, np.inf, (39,), np.float64),
            image=gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8),
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._bare.seed(seed or 0)
        state, info = self._bare.reset()
        return self._shown(state), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        state, reward, terminated, truncated, info = self._bare.step(action)
        return self._shown(state), reward, terminated, truncated, info

    def _shown(self, state: np.ndarray) -> dict[str, np.ndarray]:
        if self._is_fast:
            viewer = self._bare.mujoco_renderer._get_viewer("rgb_array")
            viewer.scn.flags[[0, 2]] = 0  # mjRND_SHADOW, mjRND_REFLECTION
        return {"state": state, "image": self._bare.render()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="reach-v3")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    sides: dict[str, Step] = {}
    generator = torch.Generator().manual_seed(0)
    actions = torch.rand(args.steps, args.processes, 4, generator=generator) * 2 - 1
    for size in args.sizes:
        for name, step in _sides(args.task, size, args.processes).items():
            sides[f"{name}, {size} px"] = _timed(step, actions)
    samples_s = interleave(sides, num_warmup=1, num_rounds=args.rounds)
    comparisons = [
        compare(samples_s, f"{peer}, {size} px", f"rlinf-envs, {size} px")
        for size in args.sizes
        for peer in ("same quality", "as it comes")
    ]
    num_steps = args.steps * args.processes
    rates = {name: num_steps / float(np.median(seconds)) for name, seconds in samples_s.items()}
    settings = {key: value for key, value in vars(args).items() if key != "output"}
    report(
        "metaworld",
        settings=settings,
        samples_s=samples_s,
        comparisons=comparisons,
        findings={"env_steps_per_s": rates},
        output=args.output,
    )


def _sides(task: str, size: int, num_processes: int) -> dict[str, Any]:
    """Name -> a call that steps all environments once."""
    env = make_env(
        EnvSpec(
            kind="metaworld",
            id=task,
            num_envs=num_processes,
            num_processes=num_processes,
            ignore_terminations=True,
            options={"cameras": (CAMERA,), "image_size": size},
        )
    )
    env.reset(range(num_processes))
    sides: dict[str, Any] = {"rlinf-envs": env.step}
    for name, is_fast in (("same quality", True), ("as it comes", False)):
        makers = [lambda is_fast=is_fast: Bare(task, size, is_fast=is_fast)] * num_processes
        vector = gymnasium.vector.AsyncVectorEnv(makers, context="spawn")
        vector.reset(seed=0)
        sides[name] = lambda actions, vector=vector: vector.step(actions.numpy())
    return sides


def _timed(step: Any, actions: torch.Tensor) -> Step:
    """Seconds of all the actions."""

    def run(round_index: int) -> float:
        began_s = time.perf_counter()
        for step_actions in actions:
            step(step_actions)
        return time.perf_counter() - began_s

    return run


if __name__ == "__main__":
    main()
