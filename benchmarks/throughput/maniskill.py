"""ManiSkill with a picture: environment steps a second through the flow against ManiSkill's own environments in
Gymnasium's AsyncVectorEnv, on as many processes, in the same run.

    python -m benchmarks.throughput.maniskill

The flow is that of training without its trainer (simulators.py). The peers step with random actions that are there
already: one with robots drawn by their collision shapes, as the flow has them, one as ManiSkill comes. All begin a
segment with a reset. Needs a Vulkan driver.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from benchmarks.harness import Step
from benchmarks.throughput.simulators import bare_segments, compare_with_flow, simulator_arguments

from rlinf_envs.adapters.maniskill.lite_robot import with_lite_robot
from rlinf_envs.adapters.maniskill.tasks import registered_tasks
from rlinf_envs.adapters.maniskill.without_vulkan import require_vulkan_device

SAME, STOCK = "same robot", "as it comes"


class Bare(gymnasium.Env):
    """ManiSkill's environment of a task that shows its state and a picture."""

    def __init__(self, task: str, size: int, *, is_lite: bool) -> None:
        registered = registered_tasks()[task]
        make = with_lite_robot(registered.cls) if is_lite else registered.cls
        self._env = make(
            **registered.default_kwargs,
            obs_mode="rgb+state",
            reward_mode="normalized_dense",
            control_mode="pd_joint_delta_pos",
            sim_backend="physx_cpu",
            render_backend="cpu",
            sensor_configs={"width": size, "height": size},
        )
        self.action_space = self._env.single_action_space
        observation = self.reset(seed=0)[0]
        self.observation_space = gymnasium.spaces.Dict(
            state=gymnasium.spaces.Box(-np.inf, np.inf, observation["state"].shape, np.float32),
            image=gymnasium.spaces.Box(0, 255, observation["image"].shape, np.uint8),
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, _ = self._env.reset(seed=seed)
        return self._of(observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, _, _, _ = self._env.step(action)
        return self._of(observation), float(reward), False, False, {}

    def _of(self, observation: Any) -> dict[str, np.ndarray]:
        (camera,) = observation["sensor_data"].values()
        return {"state": observation["state"][0].float().numpy(), "image": camera["rgb"][0].cpu().numpy()}


def main() -> None:
    parser = simulator_arguments(__doc__)
    parser.add_argument("--task", default="PushCube-v1")
    args = parser.parse_args()
    require_vulkan_device("this benchmark")
    compare_with_flow(
        "maniskill-pictures",
        args,
        {
            "env.id": args.task,
            "env.options": f"{{cameras: base_camera, image_size: {args.size}, lite_robot: true}}",
            "env.ignore_terminations": "true",
        },
        {peer: partial(_bare, args, is_lite=peer == SAME) for peer in (SAME, STOCK)},
        {},
    )


def _bare(args: argparse.Namespace, *, is_lite: bool) -> Step:
    make = lambda: Bare(args.task, args.size, is_lite=is_lite)  # noqa: E731  pickled by value
    return bare_segments(make, num_steps=args.steps, action_size=8)


if __name__ == "__main__":
    main()
