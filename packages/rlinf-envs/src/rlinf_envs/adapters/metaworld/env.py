"""Meta-World's tasks for a robot arm, one or a suite of them, with states, images and an instruction.

Departs from Meta-World:
* **A seed decides everything.** Meta-World draws 50 goals on creation and picks one at random; here the seed of an
  episode draws its goal and objects from the task's whole range, and chooses the task of a suite.
* **Success ends an episode**, unless `ignore_terminations` is set; Meta-World's continue until the limit.
* **Cheap images**, without antialiasing, shadows, reflections and triangles smaller than a pixel, which dominate
  software rendering.
* **Images are upright.** Four of the seven cameras are upside down in Meta-World's scenes.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch

from rlinf_envs.adapters.metaworld.changes import ChangedScene, SceneChanges
from rlinf_envs.adapters.metaworld.tasks import INSTRUCTIONS, classes, tasks_of
from rlinf_envs.core.names import names_of
from rlinf_envs.core.protocol import ActionSpec, FieldSpec
from rlinf_envs.core.vector import InProcessVector, SingleObservation, SingleStep
from rlinf_envs.errors import EnvError, RenderingUnavailableError
from rlinf_envs.workarounds.mujoco_drawing import Painter

_CHANGES = ("table_color", "floor_color", "camera_shift", "hand_shift", "start_range")
_OPTIONS = (
    *("tasks", "cameras", "image_size", "quality", "state", "reward_mode", "action_repeat", "render"),
    *_CHANGES,
)
_STATES = {"full": 39, "no_goal": 36, "robot": 4}
"""State option -> number of Meta-World's 39 values: gripper position and opening (4), objects (14), the same 18 of the
previous step, the goal (3)."""
_REWARD_MODES = ("normalized_dense", "dense", "sparse", "progress", "random")
_RANDOM_SHARE = 0.1
"""Share of steps with a random reward."""
_QUALITIES = ("fast", "full")
_UPSIDE_DOWN = frozenset({"corner", "corner2", "corner3", "corner4"})
_RENDER_CAMERA = "corner3"
_RENDER_SIZE = 256
_MAX_SCENES = 10
"""Simulations that a row keeps, about 25 MB each; enough for MT10."""


def make_metaworld(
    env_id: str,
    num_envs: int,
    *,
    max_episode_steps: int | None = None,
    ignore_terminations: bool = False,
    **options: Any,
) -> InProcessVector:
    """Creates `num_envs` environments of a Meta-World task (for example "reach-v3") or suite ("MT10", "MT25", "MT50").

    `max_episode_steps=None` takes Meta-World's limit, 500. Options:
        tasks=None               some of the suite's tasks; None: all. An episode with seed s has task number
                                 s modulo their number: seeds that count up sweep them, drawn seeds sample them
        cameras=()               pictures "image.<camera>": topview, corner, corner2, corner3, corner4, behindGripper,
                                 gripperPOV
        image_size=64            side of the pictures in pixels
        quality="fast"           "full": antialiasing, shadows, reflections and every triangle, far slower in software
        state="full"             "no_goal": without the goal, for policies that have to see it; "robot": gripper
                                 position and opening alone
        reward_mode="normalized_dense"   Meta-World's reward / 10, in 0..1; "dense": in 0..10; "sparse": 1.0 on success;
                                 "progress": what an action adds to Meta-World's reward / 10, and 1.0 on success
                                 (potential-based shaping, Ng et al., ICML 1999); "random": 1.0 or 0.0 by chance, a
                                 control from which nothing can be learned
        action_repeat=1          Meta-World's steps (1/80 s) that an action lasts; the reward is their mean (progress:
                                 their sum), and success counts after the last
        render=False             whether `render()` works
        table_color=None, floor_color=None, camera_shift=0.0, hand_shift=0.0, start_range=1.0
                                 changes of the scene, see `metaworld_changes.SceneChanges`
    Raises EnvError for an unknown task (with close matches), camera or option and for a missing package;
    RenderingUnavailableError if rendering is not possible.
    """
    tasks, limit = described(env_id, max_episode_steps, options)
    row_options = {name: value for name, value in options.items() if name != "tasks"}
    return InProcessVector(
        lambda: MetaworldEnv(tasks, **row_options),
        num_envs,
        max_episode_steps=limit,
        ignore_terminations=ignore_terminations,
    )


def described(env_id: str, max_episode_steps: int | None, options: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """Returns the tasks and the time limit that `make_metaworld` uses. EnvError as there."""
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise EnvError(f"Meta-World has no option {', '.join(unknown)}; it has {', '.join(_OPTIONS)}")
    tasks = tasks_of(env_id, names_of(options.get("tasks"), "tasks"))
    return tasks, max_episode_steps if max_episode_steps is not None else classes()[tasks[0]].max_path_length


class MetaworldEnv:
    """One row (`SingleEnv`) with one of several tasks at a time; options as for `make_metaworld`.

    A task's simulation is built when an episode needs it (30 ms); the ten most recently used are kept.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        cameras: Sequence[str] | str = (),
        image_size: int = 64,
        quality: str = "fast",
        state: str = "full",
        reward_mode: str = "normalized_dense",
        action_repeat: int = 1,
        render: bool = False,
        **changes: Any,
    ) -> None:
        for name, value, allowed in (
            ("quality", quality, _QUALITIES),
            ("state", state, tuple(_STATES)),
            ("reward_mode", reward_mode, _REWARD_MODES),
        ):
            if value not in allowed:
                raise EnvError(f"options.{name}={value!r}; allowed: {', '.join(allowed)}")
        for name, number in (("image_size", image_size), ("action_repeat", action_repeat)):
            if number < 1:
                raise EnvError(f"options.{name}={number}; it must be at least 1")
        self._tasks = tuple(tasks)
        self._cameras = names_of(cameras, "cameras") or ()
        self._image_size = image_size
        self._is_fast = quality == "fast"
        self._state_size = _STATES[state]
        self._reward_mode = reward_mode
        self._action_repeat = action_repeat
        self._can_render = render
        self._changes = SceneChanges(**changes)
        self._scenes: OrderedDict[str, _Scene] = OrderedDict()
        self._task = self._tasks[0]
        self._raw = np.zeros(39)
        self._potential: float | None = None
        self._chance = np.random.default_rng(0)
        self._require_cameras(self._scene())
        self.action_spec = ActionSpec(kind="continuous", shape=(4,), low=-torch.ones(4), high=torch.ones(4))
        self.observation_spec = self._spec()

    def reset(self, seed: int) -> None:
        self._task = self._tasks[seed % len(self._tasks)]
        scene = self._scene()
        scene.changed.begin(seed)
        scene.env.seed(seed)
        self._chance = np.random.default_rng(seed)
        self._raw, _ = scene.env.reset()
        self._potential = None

    def step(self, action: np.ndarray) -> SingleStep:
        env, total, success = self._scene().env, 0.0, False
        for _ in range(self._action_repeat):
            self._raw, reward, _, _, outcome = env.step(action)
            success = bool(outcome["success"])
            total += self._reward(float(reward), success)
        is_sum = self._reward_mode == "progress"
        return SingleStep(
            reward=total + success if is_sum else total / self._action_repeat,
            terminated=success,
            truncated=False,  # the vector applies the time limit
            success=success,
            task=self._task if len(self._tasks) > 1 else None,
        )

    def observe(self) -> SingleObservation:
        scene = self._scene()
        return {
            "state": self._raw[: self._state_size].astype(np.float32),
            **{f"image.{camera}": scene.picture(camera, self._image_size) for camera in self._cameras},
            "instruction": INSTRUCTIONS[self._task],
        }

    @property
    def task(self) -> str:
        """The task of the current episode."""
        return self._task

    def expert_actions(self, num_actions: int) -> np.ndarray:
        """[C, 4], what the task's script does from here on. It reads Meta-World's whole observation, whatever the
        options show; actions after the first are those of a copy of the simulation."""
        scene, actions = self._scene(), [self._scripted(self._raw)]
        if num_actions > 1:
            with scene.looking_ahead():
                while len(actions) < num_actions:
                    state, success = self._simulate(scene.env, actions[-1])
                    if success:
                        break
                    actions.append(self._scripted(state))
        return np.stack([*actions, *[actions[-1]] * (num_actions - len(actions))])

    def _scripted(self, state: np.ndarray) -> np.ndarray:
        """[4], the script's action in a state [39], in whose copy some scripts write."""
        from metaworld.policies import ENV_POLICY_MAP

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about actions larger than 1, which are clipped here
            return np.clip(ENV_POLICY_MAP[self._task]().get_action(state.copy()), -1.0, 1.0).astype(np.float32)

    def _simulate(self, env: Any, action: np.ndarray) -> tuple[np.ndarray, bool]:
        """Executes an action; returns the whole observation, and whether the task counts as solved then."""
        for _ in range(self._action_repeat - 1):
            env.step(action)
        state, _, _, _, outcome = env.step(action)
        return state, bool(outcome["success"])

    def render(self) -> np.ndarray:
        if not self._can_render:
            raise RenderingUnavailableError("this environment was made without render=True; pass it as an option")
        return self._scene().picture(_RENDER_CAMERA, _RENDER_SIZE)

    def close(self) -> None:
        self._scenes.clear()

    def _scene(self) -> _Scene:
        """The scene of the current task."""
        if self._task not in self._scenes:
            self._scenes[self._task] = _Scene(self._task, self._changes, is_fast=self._is_fast)
            if len(self._scenes) > _MAX_SCENES:
                self._scenes.popitem(last=False)
        self._scenes.move_to_end(self._task)
        return self._scenes[self._task]

    def _require_cameras(self, scene: _Scene) -> None:
        for camera in self._cameras:
            if camera not in scene.cameras:
                raise EnvError(f"options.cameras: there is no camera {camera!r}; there are {', '.join(scene.cameras)}")
        # Rendered once now, so that missing requirements are reported now.
        if self._cameras:
            scene.picture(self._cameras[0], self._image_size)
        if self._can_render:
            scene.picture(_RENDER_CAMERA, _RENDER_SIZE)

    def _spec(self) -> Mapping[str, FieldSpec]:
        size = self._image_size
        pictures = {f"image.{name}": FieldSpec(shape=(size, size, 3), dtype="uint8") for name in self._cameras}
        return {
            "state": FieldSpec(shape=(self._state_size,), dtype="float32"),
            **pictures,
            "instruction": FieldSpec(shape=(), dtype="text", texts=tuple(INSTRUCTIONS[task] for task in self._tasks)),
        }

    def _reward(self, dense: float, success: bool) -> float:
        if self._reward_mode == "sparse":
            return float(success)
        if self._reward_mode == "progress":
            before, self._potential = self._potential, dense / 10
            return 0.0 if before is None else self._potential - before  # the first step sets the baseline
        if self._reward_mode == "random":
            return float(self._chance.random() < _RANDOM_SHARE)
        return dense / 10 if self._reward_mode == "normalized_dense" else dense


class _Scene:
    """The simulation of one task and its renderer."""

    def __init__(self, task: str, changes: SceneChanges, *, is_fast: bool) -> None:
        self.env = _built(task)
        self.changed = ChangedScene(self.env, changes)
        self._name = f"{task}{changes.look}"
        self._is_fast = is_fast
        self._painters: dict[int, Painter] = {}
        model = self.env.model
        self.cameras = tuple(model.camera(index).name for index in range(model.ncam))

    @contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """Lets the environment simulate copies of its MuJoCo data and of its arrays, so that no bit of them changes.
        Afterwards it has its own again, among them arrays that show live data (`obj_init_pos` of door-lock-v3)."""
        before = dict(vars(self.env))
        self.env.data = copy(self.env.data)
        vars(self.env).update({name: value.copy() for name, value in before.items() if isinstance(value, np.ndarray)})
        try:
            yield
        finally:
            vars(self.env).clear()
            vars(self.env).update(before)

    def picture(self, camera: str, size: int) -> np.ndarray:
        """Renders [size, size, 3] uint8, a view as `Painter.picture` returns it."""
        if size not in self._painters:
            self._painters[size] = Painter(self._name, self.env.model, size=size, is_fast=self._is_fast)
        picture = self._painters[size].picture(self.env.data, camera)
        return picture[::-1, ::-1] if camera in _UPSIDE_DOWN else picture


def _built(task: str) -> Any:
    """Creates Meta-World's environment of a task; its seed draws the goal and the objects, and the goal is observed."""
    env = classes()[task]()
    env.max_path_length = np.iinfo(np.int64).max  # the vector applies the time limit
    # As set by Meta-World's factories, and by `set_task` for a goal of its list.
    env.seeded_rand_vec = True
    env._freeze_rand_vec = False
    env._set_task_called = True
    env._partially_observable = False
    env.__dict__.pop("sawyer_observation_space", None)  # cached before the goal was made observable
    return env
