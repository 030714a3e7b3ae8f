"""The simulation of one LIBERO task: begun from a shipped state, moved by actions, seen by two cameras.

It is LIBERO's own (`ControlEnv`), with these differences, none of which changes a number of an episode:
* **Soft resets.** The model is built once and the simulation set back, instead of built anew (0.03 s, not 0.5 s).
  What a soft reset leaves as it was is put back here: the gripper's last command, and the numbers that place fixtures.
* **Nothing is observed that nobody reads.** LIBERO computes 40 observations in every control step.
* **Drawing** is this package's, shared by the scenes of a process, and happens where a picture is shown.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_envs.adapters.libero.importing import environment_class, libero_module
from rlinf_envs.adapters.libero.tasks import LiberoTask
from rlinf_envs.errors import EnvError
from rlinf_envs.workarounds.mujoco_drawing import Painter

CAMERAS: Mapping[str, str] = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
"""The names of the cameras here, and in LIBERO's scenes."""
GRIPPER_OPEN = -1.0
"""The last number of an action; 1.0 closes."""
_WAIT = np.array([0, 0, 0, 0, 0, 0, GRIPPER_OPEN])
_COLLISION_GROUP = 0
_PLACES = ("qpos", "xpos", "xquat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos", "cam_xmat")
_LIGHTS = ("light_xpos", "light_xdir")
_MAX_PLACEMENTS = 100


class LiberoScene:
    """The simulation of a task, which begins an episode as often as it is asked to.

    Args:
        assets: folder of the scenes.
        is_fast: as `Painter` takes it.
    """

    def __init__(self, task: LiberoTask, *, assets: Path, is_fast: bool) -> None:
        self.task = task
        self.key = (task, assets, is_fast)
        self._is_fast = is_fast
        self._control = _built(task, assets)
        self._env = self._control.env
        self._model = self._env.sim.model._model
        self._drawn = importlib.import_module("mujoco").MjData(self._model)
        self._painters: dict[int, Painter] = {}
        robot = self._env.robots[0]
        self._hand_site = robot.eef_site_id
        self._hand_body = self._env.sim.model.body_name2id(robot.robot_model.eef_name)
        self._fingers = list(robot._ref_gripper_joint_pos_indexes)
        # LIBERO shows what its sensors sampled, which is one or two of the 25 substeps of an action before its end.
        robosuite: Any = importlib.import_module("robosuite.utils.observables")
        sensor = robosuite.sensor(modality="shown")(lambda _: self._sample())
        self._env._observables = {"shown": robosuite.Observable(name="shown", sensor=sensor, sampling_rate=20)}

    def begin(self, state: np.ndarray, seed: int, num_wait_steps: int) -> None:
        """Begin an episode.

        Args:
            state: one of the task's.
            seed: draws what no state holds: where fixtures stand, a centimetre or two from their place.
            num_wait_steps: actions that open the gripper and move nothing, while objects fall to where they lie.
        """
        for robot in self._env.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        with _random_numbers(seed):
            self._place()
        self._control.set_init_state(state)
        for _ in range(num_wait_steps):
            self.step(_WAIT)

    def step(self, action: np.ndarray) -> bool:
        """One action [7] of 0.05 s; whether the goal holds after it."""
        _, _, success, _ = self._env.step(action.astype(np.float64))
        return bool(success)

    def state(self) -> np.ndarray:
        """[8] float32: position of the hand in metres (3), its orientation as axis times angle (3), fingers (2)."""
        data = self._drawn
        turn = _axis_angle(data.xquat[self._hand_body])
        return np.concatenate([data.site_xpos[self._hand_site], turn, data.qpos[self._fingers]]).astype(np.float32)

    def picture(self, camera: str, size: int) -> np.ndarray:
        """[size, size, 3] uint8, upright; `camera` is one of CAMERAS."""
        if size not in self._painters:
            name = f"{self.task.goal_file}:{self.key[1]}"
            self._painters[size] = Painter(
                name, self._model, size=size, is_fast=self._is_fast, hidden_groups=(_COLLISION_GROUP,)
            )
        return self._painters[size].picture(self._drawn, CAMERAS[camera])

    def _place(self) -> None:
        """Set the simulation back and place everything anew; LIBERO gives up where objects find no room."""
        error = importlib.import_module("robosuite.utils.errors").RandomizationError
        for _ in range(_MAX_PLACEMENTS):
            with contextlib.suppress(error):
                self._env.reset()
                return
        raise EnvError(f"{self.task.name}: LIBERO found no room for its objects in {_MAX_PLACEMENTS} trials")

    def _sample(self) -> np.ndarray:
        """Keep what is shown: what pictures and the state are made of."""
        now = self._env.sim.data._data
        for name in (*_PLACES, *_LIGHTS):
            getattr(self._drawn, name)[:] = getattr(now, name)
        return np.zeros(1)


def _built(task: LiberoTask, assets: Path) -> Any:
    make = environment_class()
    libero_module().__dict__["_assets_path_cache"] = str(assets)
    try:
        return make(
            bddl_file_name=str(task.goal_file),
            use_camera_obs=False,
            has_offscreen_renderer=False,
            ignore_done=True,  # the time limit is the vector's
            hard_reset=False,
        )
    except (OSError, ValueError) as error:  # MuJoCo raises ValueError for a file that is not there
        raise EnvError(
            f"{task.suite}: {task.name} cannot be built from the scenes in {assets} ({error}); fetch all of them"
        ) from error


@contextlib.contextmanager
def _random_numbers(seed: int) -> Iterator[None]:
    """LIBERO draws from numpy's global generator, which is left as it was."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


def _axis_angle(wxyz: np.ndarray) -> np.ndarray:
    """[3]: a unit quaternion as axis times angle in 0..2 pi, by robosuite's convention (zeros for no turn)."""
    w = np.clip(wxyz[0], -1.0, 1.0)
    length = np.sqrt(1.0 - w * w)
    return wxyz[1:] * (2.0 * np.arccos(w) / length) if length > 0 else np.zeros(3)
