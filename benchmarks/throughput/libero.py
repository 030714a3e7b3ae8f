"""LIBERO with two pictures: environment steps a second through the flow against LIBERO itself in Gymnasium's
AsyncVectorEnv, on as many processes, in the same run.

    RLINF_LIBERO_ASSETS=FOLDER python -m benchmarks.throughput.libero

The flow is that of training without its trainer (simulators.py). The peers step with random actions that are there
already. One draws without antialiasing, shadows and reflections and resets softly, as rlinf-envs does; the other is
LIBERO as it comes. A segment begins with a reset to a shipped state for all of them, and no side waits for objects to
settle. Needs LIBERO, its scenes and EGL.
"""

from __future__ import annotations

import argparse
import importlib
import os
from functools import partial
from typing import Any

os.environ.setdefault("MUJOCO_GL", "egl")  # before MuJoCo is imported
if not os.environ.get("CUDA_VISIBLE_DEVICES"):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # robosuite's renderer cannot read an empty one

import gymnasium
import numpy as np
from benchmarks.harness import Step
from benchmarks.throughput.simulators import bare_segments, compare_with_flow, simulator_arguments

from rlinf_envs.adapters.libero.assets import assets_folder
from rlinf_envs.adapters.libero.importing import environment_class, libero_module
from rlinf_envs.adapters.libero.tasks import init_states, tasks_of

CAMERAS = ("agentview_image", "robot0_eye_in_hand_image")
SAME, STOCK = "same quality", "as it comes"


class Bare(gymnasium.Env):
    """LIBERO's environment of a task that shows the hand's position and two pictures."""

    def __init__(self, suite: str, number: int, size: int, assets: str, *, is_fast: bool) -> None:
        libero_module().__dict__["_assets_path_cache"] = assets
        if is_fast:
            _draw_cheaply()
        (self._task,) = tasks_of(suite, [number])
        self._is_fast = is_fast
        self._env = environment_class()(
            bddl_file_name=str(self._task.goal_file),
            camera_heights=size,
            camera_widths=size,
            hard_reset=not is_fast,
        )
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (7,), np.float32)
        spaces: dict[str, gymnasium.Space[Any]] = {"state": gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)}
        spaces |= {name: gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8) for name in CAMERAS}
        self.observation_space = gymnasium.spaces.Dict(spaces)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._env.env.reset()
        if self._is_fast:
            self._env.sim._render_context_offscreen.scn.flags[[0, 2]] = 0  # mjRND_SHADOW, mjRND_REFLECTION
        observation = self._env.set_init_state(init_states(self._task)[(seed or 0) % 50])
        return self._of(observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, _, _ = self._env.step(action.astype(np.float64))
        return self._of(observation), float(reward), False, False, {}

    def _of(self, observation: Any) -> dict[str, np.ndarray]:
        return {"state": observation["robot0_eef_pos"], **{name: observation[name] for name in CAMERAS}}


def _draw_cheaply() -> None:
    """robosuite draws into a buffer without antialiasing."""
    context: Any = importlib.import_module("robosuite.utils.binding_utils").MjRenderContext
    make = context._set_mujoco_context_and_buffers

    def cheaply(self: Any) -> None:
        self.model._model.vis.quality.offsamples = 0
        make(self)

    context._set_mujoco_context_and_buffers = cheaply


def main() -> None:
    parser = simulator_arguments(__doc__)
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--peers", nargs="+", choices=(SAME, STOCK), default=[SAME, STOCK])
    args = parser.parse_args()
    assets = str(assets_folder())
    compare_with_flow(
        "libero",
        args,
        {
            "env.kind": "libero",
            "env.id": args.suite,
            "env.options": f"{{tasks: {args.task}, cameras: [agentview, wrist], image_size: {args.size}, "
            f"num_wait_steps: 0, assets: {assets}}}",
        },
        {peer: partial(_bare, args, assets, is_fast=peer == SAME) for peer in args.peers},
        {"scenes": "some meshes and textures of LIBERO's scenes are stand-ins here"},
    )


def _bare(args: argparse.Namespace, assets: str, *, is_fast: bool) -> Step:
    make = lambda: Bare(args.suite, args.task, args.size, assets, is_fast=is_fast)  # noqa: E731  pickled by value
    return bare_segments(make, num_steps=args.steps, action_size=7)


if __name__ == "__main__":
    main()
