"""ManiSkill3 tasks on the CPU: one PhysX scene per environment, N of them in a process.

ManiSkill's own batching (`num_envs > 1`) exists on CUDA only; on the CPU it advises one process per environment.
Several environments in one process are as fast per core and start in a fraction of the time; so that is done here.

Departs from ManiSkill in three things:
* **Exact reset.** PhysX keeps contacts, friction anchors and the order of its pairs from before a reset, so that the
  same seed and actions give slightly other numbers in an environment that has lived than in a new one, as soon as
  something touches. Rebuilding everything (`reconfigure`) cures that for about 100 ms a reset; here the bodies are
  moved into a new, empty physics scene instead, with the same effect for 0.3 ms (`exact_reset=False` turns it off).
* **No Vulkan needed** for state observations (`maniskill_novulkan`).
* **No questions.** A task whose assets are missing is an error that says how to get them, not a prompt on stdin.

Trajectories are a function of seed and actions on one machine and build; other processors may round differently.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlinf_envs import maniskill_novulkan
from rlinf_envs.errors import EnvError, RenderingUnavailableError
from rlinf_envs.maniskill_lite import with_lite_robot
from rlinf_envs.maniskill_tasks import INSTRUCTIONS, registered_tasks, tasks_of
from rlinf_envs.names import close_to, names_of
from rlinf_envs.protocol import ActionSpec, FieldSpec
from rlinf_envs.vector import InProcessVector, SingleEnv, SingleObservation, SingleStep

_SHADERS = {"fast": "minimal", "full": "default"}
"""ManiSkill's packs of shaders."""
_ASSETS_VARIABLE = "MS_SKIP_ASSET_DOWNLOAD_PROMPT"  # ManiSkill's own: 1 means "download without asking"


def make_maniskill(
    task: str,
    num_envs: int,
    *,
    max_episode_steps: int | None = None,
    ignore_terminations: bool = False,
    **options: Any,
) -> InProcessVector:
    """`num_envs` environments of a ManiSkill task (for example "PushCube-v1") or suite (`maniskill_tasks.SUITES`).

    `max_episode_steps=None` takes the task's own limit, of a suite the longest. Options:
        tasks=None               some of the suite's tasks; None: all. An episode with seed s has task number
                                 s modulo their number: seeds that count up sweep them, drawn seeds sample them
        cameras=None             pictures "image.<camera>" of these of the task's cameras, beside the state
        state="full"             "robot": the positions and velocities of the joints alone, for policies that have to
                                 see the rest; the only one that the tasks of a suite have in common
        obs_mode="state"         the full state as one vector; "rgb": the pictures of all cameras, the robot's own state
                                 and what the task adds; "rgb+state": the same pictures and the full state
        reward_mode="normalized_dense"   or "dense", "sparse", "none", where the task has them
        control_mode="pd_joint_delta_pos"
        image_size=None          side of the observation images in pixels; None: the task's own
        quality="fast"           "full": ManiSkill's default shader instead of its minimal one
        lite_robot=False         robots are drawn by their collision shapes, grey, at a fraction of the time
        render=False             whether `render()` works (it needs a Vulkan device, as images do)
        render_backend="auto"    where to draw: "gpu", "cpu", "auto" (CUDA if torch has it, else the CPU)
        sim_freq, control_freq   Hz; None: the task's own
        instruction=None         a text handed out as observation "instruction"; None: ours (`maniskill_tasks`)
        exact_reset=True         see the module's text
    Every other option goes to the task's constructor (for example robot_uids="fetch").
    Raises EnvError for an unknown task (with close matches), for missing assets and for what the task does not accept;
    RenderingUnavailableError where images are wanted and nothing can draw.
    """
    tasks = tasks_of(task, names_of(options.pop("tasks", None), "tasks"))
    first = tasks[0]
    limits = [registered_tasks()[name].max_episode_steps for name in tasks]
    limit = max_episode_steps if max_episode_steps is not None or None in limits else max(limits)
    if len(tasks) > 1:
        from rlinf_envs.maniskill_suite import ManiSkillSuite

        make: Callable[[], SingleEnv] = lambda: ManiSkillSuite(tasks, **options)  # noqa: E731
    else:
        make = lambda: ManiSkillEnv(first, **options)  # noqa: E731
    return InProcessVector(
        make,
        num_envs,
        max_episode_steps=limit,
        ignore_terminations=ignore_terminations,
    )


class ManiSkillEnv:
    """One ManiSkill environment on the CPU (`rlinf_envs.vector.SingleEnv`); options as for `make_maniskill`.

    Everything runs in torch's inference mode: a step is a hundred tiny tensor operations, which are 14 % faster without
    autograd's bookkeeping. Tensors made in it are of little use outside of it; so none leaves, only arrays do.
    """

    def __init__(
        self,
        task: str,
        *,
        obs_mode: str = "state",
        reward_mode: str = "normalized_dense",
        control_mode: str = "pd_joint_delta_pos",
        cameras: Sequence[str] | str | None = None,
        state: str = "full",
        image_size: int | None = None,
        quality: str = "fast",
        lite_robot: bool = False,
        render: bool = False,
        render_backend: str = "auto",
        sim_freq: int | None = None,
        control_freq: int | None = None,
        instruction: str | None = None,
        exact_reset: bool = True,
        **task_options: Any,
    ) -> None:
        registered = registered_tasks()[task]
        for option, value, allowed in (("quality", quality, tuple(_SHADERS)), ("state", state, ("full", "robot"))):
            if value not in allowed:
                raise EnvError(f"options.{option}={value!r}; allowed: {', '.join(allowed)}")
        self._instruction = instruction if instruction is not None else INSTRUCTIONS.get(task)
        self._shows_robot_alone = state == "robot"
        self._cameras = names_of(cameras, "cameras")
        if self._cameras and obs_mode == "state":
            obs_mode = "rgb+state"
        self._exact_reset = exact_reset
        self._can_render = render
        draws = render or "rgb" in obs_mode
        if draws:
            wanted_by = "render=True" if render else f"cameras={cameras!r}" if cameras else f"obs_mode={obs_mode!r}"
            maniskill_novulkan.require_vulkan_device(f"{task}: {wanted_by}")
        elif obs_mode != "state":
            raise EnvError(f'{task}: obs_mode={obs_mode!r} is unknown; use "state", "rgb" or "rgb+state"')
        self.notes: tuple[str, ...] = ()
        if not draws and not maniskill_novulkan.has_vulkan_device():
            maniskill_novulkan.disable_visuals()
            self.notes += (maniskill_novulkan.NOTE,)
        if not exact_reset:
            self.notes += ("exact_reset=False: an episode also depends on what its environment ran before",)
        arguments: dict[str, Any] = dict(registered.default_kwargs)
        arguments |= {
            "obs_mode": obs_mode,
            "reward_mode": reward_mode,
            "control_mode": control_mode,
            "sim_backend": "physx_cpu",
            "render_backend": _render_backend(render_backend) if draws else "none",
            "render_mode": "rgb_array" if render else None,
        }
        sim_config = {"sim_freq": sim_freq, "control_freq": control_freq}
        if given := {name: value for name, value in sim_config.items() if value is not None}:
            arguments["sim_config"] = given
        size = {} if image_size is None else {"width": image_size, "height": image_size}
        if sensors := size | ({} if quality == "fast" else {"shader_pack": _SHADERS[quality]}):
            arguments["sensor_configs"] = sensors
        with torch.inference_mode():
            make = with_lite_robot(registered.cls) if lite_robot and draws else registered.cls
            self._env = _built(task, make, registered.asset_download_ids or [], arguments | task_options)
            self._first_state = _cloned(self._env.get_state_dict())
        # ManiSkill draws in every step; here pictures are drawn where they are shown.
        self._draw = self._env._get_obs_sensor_data
        self._env._get_obs_sensor_data = lambda *_: {}
        self._draws_observations = "rgb" in obs_mode
        self._require_cameras(task)
        self._shown: Any = None
        self.action_spec = _action_spec(task, self._env.single_action_space)
        self.reset(0)
        self.observation_spec = self._spec_of(self.observe())

    @torch.inference_mode()
    def reset(self, seed: int) -> None:
        options: dict[str, bool] = {}
        if self._exact_reset and self._env.reconfiguration_freq:
            options["reconfigure"] = True  # else the objects would be those of an earlier seed
        elif self._exact_reset:
            _move_to_new_physics_scene(self._env)
            self._env.set_state_dict(self._first_state)  # some tasks leave parts as they find them (Empty: the robot)
        self._shown, _ = self._env.reset(seed=seed, options=options)

    @torch.inference_mode()
    def step(self, action: np.ndarray) -> SingleStep:
        self._shown, reward, terminated, _, outcome = self._env.step(action)
        success = outcome.get("success")
        return SingleStep(
            reward=float(reward),
            terminated=bool(terminated),
            truncated=False,  # the time limit is the vector's
            success=None if success is None else bool(success),
        )

    @torch.inference_mode()
    def observe(self) -> SingleObservation:
        """ManiSkill's batch of one as a row."""
        shown = self._shown
        row: dict[str, np.ndarray | str] = {}
        if self._shows_robot_alone:
            row["state"] = _flat(self._env.agent.get_proprioception())
        else:
            row["state"] = shown[0].float().numpy() if isinstance(shown, torch.Tensor) else _flat_state(shown)
        if self._draws_observations:
            for camera, textures in self._draw().items():
                if self._cameras is None or camera in self._cameras:
                    row[f"image.{camera}"] = textures["rgb"][0].cpu().numpy()
        if self._instruction is not None:
            row["instruction"] = self._instruction
        return row

    @torch.inference_mode()
    def render(self) -> np.ndarray:
        if not self._can_render:
            raise RenderingUnavailableError("this environment was made without render=True; pass it as an option")
        return self._env.render()[0].cpu().numpy()

    def close(self) -> None:
        self._env.close()

    def _require_cameras(self, task: str) -> None:
        there = tuple(self._env._sensors)
        for camera in self._cameras or ():
            if camera not in there:
                raise EnvError(f"options.cameras: {task} has no camera {camera!r}; {close_to(camera, there)}")

    def _spec_of(self, row: SingleObservation) -> Mapping[str, FieldSpec]:
        spec: dict[str, FieldSpec] = {}
        for name, value in row.items():
            if isinstance(value, str):
                spec[name] = FieldSpec(shape=(), dtype="text")
            else:
                spec[name] = FieldSpec(shape=value.shape, dtype="uint8" if name.startswith("image.") else "float32")
        return spec


def _move_to_new_physics_scene(env: Any) -> None:
    """Leave PhysX's memory of the past behind: take every body out of its scene and add it to a new, empty one.

    Added in their first order, so that PhysX numbers and pairs them as in a newly built environment. Poses, velocities
    and targets are set by the reset that follows. A render system, where there is one, moves along.
    """
    import sapien
    from sapien import physx

    env._set_scene_config()  # a physics scene takes process-wide settings, which another task may have changed
    wrapper = env.scene
    old = wrapper.sub_scenes[0]
    system = physx.PhysxCpuSystem()
    system.timestep = wrapper.px.timestep
    systems: list[Any] = [system]
    if wrapper.can_render():
        systems.append(old.render_system)
    entities = list(old.entities)
    for entity in reversed(entities):
        old.remove_entity(entity)
    new = sapien.Scene(systems)
    for entity in entities:
        new.add_entity(entity)
    wrapper.sub_scenes[0] = new
    wrapper.px = system


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _cloned(part) if isinstance(part, Mapping) else part.clone() for name, part in state.items()}


def _flat_state(observation: Mapping[str, Any]) -> np.ndarray:
    state = observation.get("state")
    if state is None:
        return _flat({"agent": observation["agent"], "extra": observation["extra"]})
    return state[0].float().cpu().numpy()


def _flat(parts: Mapping[str, Any]) -> np.ndarray:
    """The first row of nested tensors as one vector."""
    from mani_skill.utils import common

    state: Any = common.flatten_state_dict(dict(parts), use_torch=True, device=torch.device("cpu"))
    return state[0].float().cpu().numpy()


def _action_spec(task: str, space: Any) -> ActionSpec:
    import gymnasium

    if not isinstance(space, gymnasium.spaces.Box):
        raise EnvError(f"{task}: its action space is {space}; only one vector of numbers (Box) is supported")
    return ActionSpec(
        kind="continuous",
        shape=space.shape,
        low=torch.from_numpy(space.low.astype(np.float32)),
        high=torch.from_numpy(space.high.astype(np.float32)),
    )


def _render_backend(wanted: str) -> str:
    if wanted == "auto":
        return "gpu" if torch.cuda.is_available() else "cpu"
    return wanted


def _built(task: str, cls: Any, asset_ids: list[str], arguments: Mapping[str, Any]) -> Any:
    """The environment itself, with everything a user may have got wrong told as EnvError."""
    with _no_asset_prompt(task):
        _require_assets(task, asset_ids)
        try:
            return cls(**arguments)
        except NotImplementedError as error:  # ManiSkill's answer to modes that a task lacks
            raise EnvError(
                f"{task}: {error}; reward modes: {', '.join(cls.SUPPORTED_REWARD_MODES)}; "
                f"obs modes: {', '.join(cls.SUPPORTED_OBS_MODES)}"
            ) from error
        except (TypeError, KeyError, AssertionError, RuntimeError, AttributeError, OSError, ImportError) as error:
            told = f"{task} could not be built with {_told(arguments)}: {error}"
            if isinstance(error, AttributeError) and not maniskill_novulkan.has_vulkan_device():
                told += f"; it may be a task that needs its visuals: {maniskill_novulkan.DRIVER_HINT}"
            raise EnvError(told) from error


def _told(arguments: Mapping[str, Any]) -> str:
    internal = ("sim_backend", "render_backend", "render_mode")
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items() if name not in internal)


def _require_assets(task: str, asset_ids: list[str]) -> None:
    from mani_skill.utils import assets

    missing = []
    for asset_id in asset_ids:
        is_group = asset_id in assets.DATA_GROUPS
        sources = assets.expand_data_group_into_individual_data_source_ids(asset_id) if is_group else [asset_id]
        missing += [source for source in sources if not assets.is_data_source_downloaded(source)]
    if missing and os.environ.get(_ASSETS_VARIABLE) != "1":
        raise EnvError(
            f"{task} needs assets that are not on this machine ({', '.join(sorted(missing)[:5])}); get them with "
            f"`python -m mani_skill.utils.download_asset {task}`, or set {_ASSETS_VARIABLE}=1 to have them fetched now"
        )


@contextlib.contextmanager
def _no_asset_prompt(task: str) -> Iterator[None]:
    """Turn ManiSkill's yes/no question about a robot's assets into an error (its own variable still answers yes)."""
    from mani_skill.utils import download_asset

    original = download_asset.prompt_yes_no

    def refuse(message: str) -> bool:
        if os.environ.get(_ASSETS_VARIABLE) == "1":
            return True
        statement = message.partition(" Would you like")[0].rstrip(".")
        raise EnvError(f"{task}: {statement}; set {_ASSETS_VARIABLE}=1 to have them fetched now")

    download_asset.prompt_yes_no = refuse
    try:
        yield
    finally:
        download_asset.prompt_yes_no = original
