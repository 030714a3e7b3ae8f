"""A ManiSkill environment with our options: one row on the CPU, or many rows on the GPU.

Departs from ManiSkill:
* **Images are rendered only for returned observations**, not in every step.
* **No Vulkan needed** for state observations (`without_vulkan`).
* **No prompts.** Missing assets are an error with download instructions, not a prompt on stdin.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_envs.adapters.maniskill import without_vulkan
from rlinf_envs.adapters.maniskill.lite_robot import with_lite_robot
from rlinf_envs.adapters.maniskill.stage_reward import STAGES, StageReward
from rlinf_envs.adapters.maniskill.tasks import CONTROL_MODE, instruction_of, registered_tasks
from rlinf_envs.core.names import close_to, names_of
from rlinf_envs.core.protocol import ActionSpec, FieldSpec
from rlinf_envs.errors import EnvError, RenderingUnavailableError

_SHADERS = {"fast": "minimal", "full": "default"}
"""Quality -> ManiSkill's shader pack."""
REWARD_MODE = "normalized_dense"
"""Default of the option `reward_mode`."""
_ASSETS_VARIABLE = "MS_SKIP_ASSET_DOWNLOAD_PROMPT"  # ManiSkill's; 1 means "download without asking"


class ManiSkillSimulation:
    """A ManiSkill environment with a leading dimension of rows; options as for `make_maniskill`.

    Everything runs in torch's inference mode: a step is a hundred tiny tensor operations, which are 14 % faster without
    autograd's bookkeeping. Inference-mode tensors are of little use outside of it, so this package returns only arrays.

    Args:
        on_gpu: simulate with PhysX on the CUDA device; otherwise on the CPU, which ManiSkill supports for one row only.
    """

    def __init__(
        self,
        task: str,
        *,
        num_envs: int = 1,
        on_gpu: bool = False,
        obs_mode: str = "state",
        reward_mode: str = REWARD_MODE,
        control_mode: str = CONTROL_MODE,
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
        **task_options: Any,
    ) -> None:
        registered = registered_tasks()[task]
        for option, value, allowed in (("quality", quality, tuple(_SHADERS)), ("state", state, ("full", "robot"))):
            if value not in allowed:
                raise EnvError(f"options.{option}={value!r}; allowed: {', '.join(allowed)}")
        self.instruction = instruction_of(task, instruction)
        """The instruction of every row; None: no instruction."""
        self._shows_robot_alone = state == "robot"
        self._cameras = names_of(cameras, "cameras")
        if self._cameras and obs_mode == "state":
            obs_mode = "rgb+state"
        obs_mode = _offered(obs_mode, registered.cls.SUPPORTED_OBS_MODES)
        self._rewards_success = reward_mode == "sparse" and "sparse" not in registered.cls.SUPPORTED_REWARD_MODES
        self._stages = StageReward(task, num_envs) if reward_mode == STAGES else None
        self._can_render = render
        draws = render or "rgb" in obs_mode
        if draws:
            wanted_by = "render=True" if render else f"cameras={cameras!r}" if cameras else f"obs_mode={obs_mode!r}"
            without_vulkan.require_vulkan_device(f"{task}: {wanted_by}")
        elif obs_mode != "state":
            raise EnvError(f'{task}: obs_mode={obs_mode!r} is unknown; use "state", "rgb" or "rgb+state"')
        self.notes: tuple[str, ...] = ()
        if not draws and not without_vulkan.has_vulkan_device():
            without_vulkan.disable_visuals()
            self.notes += (without_vulkan.NOTE,)
        arguments: dict[str, Any] = dict(registered.default_kwargs)
        arguments |= {
            "num_envs": num_envs,
            "obs_mode": obs_mode,
            "reward_mode": "none" if self._rewards_success or self._stages else reward_mode,
            "control_mode": control_mode,
            "sim_backend": "physx_cuda" if on_gpu else "physx_cpu",
            "render_backend": _render_backend(render_backend) if draws else "none",
            "render_mode": "rgb_array" if render else None,
        }
        sim_config = {"sim_freq": sim_freq, "control_freq": control_freq}
        if frequencies := {name: value for name, value in sim_config.items() if value is not None}:
            arguments["sim_config"] = frequencies
        size = {} if image_size is None else {"width": image_size, "height": image_size}
        if sensors := size | ({} if quality == "fast" else {"shader_pack": _SHADERS[quality]}):
            arguments["sensor_configs"] = sensors
        with torch.inference_mode():
            make = with_lite_robot(registered.cls) if lite_robot and draws else registered.cls
            self.env = _built(task, make, registered.asset_download_ids or [], arguments | task_options)
        # ManiSkill renders in every step; here only returned observations are rendered.
        self._draw = self.env._get_obs_sensor_data
        self.env._get_obs_sensor_data = lambda *_: {}
        self._draws_observations = "rgb" in obs_mode
        self._require_cameras(task)
        self._observation: Any = None
        self.action_spec = _action_spec(task, self.env.single_action_space)

    @torch.inference_mode()
    def reset(self, seed: int | list[int], options: Mapping[str, Any]) -> None:
        self._observation, _ = self.env.reset(seed=seed, options=dict(options))
        if self._stages is not None:
            self._stages.reset(options.get("env_idx"))

    @torch.inference_mode()
    def look_again(self) -> None:
        """Updates the observation after the state was changed from outside."""
        self._observation = self.env.get_obs()

    @torch.inference_mode()
    def step(self, action: np.ndarray) -> tuple[Any, Any, Any]:
        """Steps all rows. Returns, on the simulation's device: [N] rewards, [N] bool whether the task ended, [N] bool
        whether it counts as solved (None if ManiSkill does not define it)."""
        self._observation, reward, terminated, _, outcome = self.env.step(action)
        if self._rewards_success:
            reward = self.env.compute_sparse_reward(obs=self._observation, action=action, info=outcome)
        elif self._stages is not None:
            reward = self._stages.step(outcome)
        return reward, terminated, outcome.get("success")

    @torch.inference_mode()
    def observe(self) -> dict[str, Tensor]:
        """Returns the current observation on the simulation's device: "state" [N, D] float32 and "image.<camera>" [N,
        H, W, 3] uint8."""
        obs = self._observation
        if self._shows_robot_alone:
            fields = {"state": self._flat(self.env.agent.get_proprioception())}
        elif isinstance(obs, Tensor):
            fields = {"state": obs}
        else:
            state = obs.get("state")
            is_flat = state is not None
            fields = {"state": state if is_flat else self._flat({part: obs[part] for part in ("agent", "extra")})}
        fields["state"] = fields["state"].float()
        if self._draws_observations:
            for camera, textures in self._draw().items():
                if self._cameras is None or camera in self._cameras:
                    fields[f"image.{camera}"] = textures["rgb"]
        return fields

    def spec_of(self, fields: Mapping[str, Tensor]) -> dict[str, FieldSpec]:
        """Returns the specs of the fields that `observe` returns, and of the instruction."""
        spec = {
            name: FieldSpec(shape=tuple(value.shape[1:]), dtype="uint8" if name.startswith("image.") else "float32")
            for name, value in fields.items()
        }
        if self.instruction is not None:
            spec["instruction"] = FieldSpec(shape=(), dtype="text", texts=(self.instruction,))
        return spec

    @torch.inference_mode()
    def render(self) -> np.ndarray:
        """Renders all rows, [N, H, W, 3] uint8."""
        if not self._can_render:
            raise RenderingUnavailableError("this environment was made without render=True; pass it as an option")
        return self.env.render().cpu().numpy()

    def close(self) -> None:
        self.env.close()

    def _require_cameras(self, task: str) -> None:
        there = tuple(self.env._sensors)
        for camera in self._cameras or ():
            if camera not in there:
                raise EnvError(f"options.cameras: {task} has no camera {camera!r}; {close_to(camera, there)}")

    def _flat(self, parts: Mapping[str, Any]) -> Tensor:
        """Flattens nested tensors of N rows to [N, D]."""
        from mani_skill.utils import common

        flat: Any = common.flatten_state_dict(dict(parts), use_torch=True, device=self.env.device)
        return flat


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


def _offered(obs_mode: str, offered: Sequence[str]) -> str:
    """Returns `obs_mode`, or an equivalent for tasks that only have special modes, such as digital twins, which need
    segmentation for their backgrounds."""
    if obs_mode in offered or "any_textures" in offered or "rgb" not in obs_mode:
        return obs_mode
    return next((mode for mode in offered if "rgb" in mode.split("+")), obs_mode)


def _render_backend(backend: str) -> str:
    if backend == "auto":
        return "gpu" if torch.cuda.is_available() else "cpu"
    return backend


def _built(task: str, cls: Any, asset_ids: list[str], arguments: Mapping[str, Any]) -> Any:
    """Creates the environment; converts all user errors to EnvError."""
    with _no_asset_prompt(task):
        require_assets(task, asset_ids)
        try:
            return cls(**arguments)
        except NotImplementedError as error:  # ManiSkill's error for modes that a task lacks
            raise EnvError(
                f"{task}: {error}; reward modes: {', '.join(cls.SUPPORTED_REWARD_MODES)}; "
                f"obs modes: {', '.join(cls.SUPPORTED_OBS_MODES)}"
            ) from error
        except (TypeError, KeyError, AssertionError, RuntimeError, AttributeError, OSError, ImportError) as error:
            message = f"{task} could not be built with {_listed(arguments)}: {error}"
            if isinstance(error, AttributeError) and not without_vulkan.has_vulkan_device():
                message += f"; it may be a task that needs its visuals: {without_vulkan.DRIVER_HINT}"
            raise EnvError(message) from error


def _listed(arguments: Mapping[str, Any]) -> str:
    internal = ("sim_backend", "render_backend", "render_mode")
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items() if name not in internal)


def require_assets(task: str, asset_ids: list[str]) -> None:
    """Raises: EnvError for missing assets, with the command that downloads them."""
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
    """Turns ManiSkill's yes/no prompt for a robot's assets into an error (its env var still answers yes)."""
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
