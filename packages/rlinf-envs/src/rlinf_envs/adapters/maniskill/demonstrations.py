"""Reads ManiSkill's trajectories: an HDF5 file `<name>.h5` beside `<name>.json`, as recorded or downloaded.

The JSON file has `env_info` (`env_id`, `env_kwargs`) and `episodes` (`episode_id`, `episode_seed`, `success`, ...); the
HDF5 file a group `traj_<episode_id>` with `actions` [T, A], `success` [T], perhaps `rewards` [T], and `obs` of T + 1
moments: an array of states (obs_mode state), or a group with `state` and `sensor_data/<camera>/rgb`. (Layout:
ManiSkill's documentation, "Demonstrations", section "Format".) Trajectories without observations have to be replayed by
ManiSkill's tool first.

Files contain no instruction, so the environment's is used. A state is the robot's numbers followed by the task's
(`BaseEnv._get_obs_state_dict`); an environment with `state: robot` returns only the first part. For files with images
but no `state`, that part comes from the group `agent`, if it holds only joints (`qpos`, `qvel`): files do not preserve
the order of numbers that controllers add, nor that of the task's numbers (`extra`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from rlinf_envs.adapters.maniskill.tasks import CONTROL_MODE, instruction_of, named_tasks
from rlinf_envs.core.names import names_of
from rlinf_envs.core.protocol import Observation
from rlinf_envs.demonstrations.base import Demonstration, DemonstrationFiles, RunEnvironment
from rlinf_envs.errors import EnvError

_JOINTS = ("qpos", "qvel")
"""The robot's joint values, in ManiSkill's order (`BaseAgent.get_proprioception`)."""
_OWN_ROBOT_NUMBERS = ("SO100GraspCube-v1",)
"""Tasks that record other numbers of the robot, because they override `_get_obs_agent`."""
_REPLAY = (
    "replay them with python -m mani_skill.trajectory.replay_trajectory --traj-path FILE.h5 --save-traj --obs-mode "
    "state (or rgb+state)"
)


class ManiSkillDemonstrations(DemonstrationFiles):
    """The episodes of a file that succeeded according to its JSON.

    Raises: EnvError for unexpected content.
    """

    defaults = MappingProxyType({"control_mode": CONTROL_MODE})

    def __init__(self, path: Path, rename: Mapping[str, str], environment: RunEnvironment) -> None:
        self._path, self._rename = path, rename
        if path.suffix != ".h5":
            raise EnvError(f"{path}: give the .h5 file of a trajectory, with its .json beside it")
        described = path.with_suffix(".json")
        if not described.is_file():
            raise EnvError(f"{described} is missing: it says which episodes of {path.name} succeeded")
        metadata = json.loads(described.read_text(encoding="utf-8"))
        self.env_id = self._task = str(metadata["env_info"]["env_id"])
        made_with = metadata["env_info"].get("env_kwargs", {})
        self.options = {name: made_with[name] for name in ("control_mode",) if name in made_with}
        self._instruction = instruction_of(self._task, environment.options.get("instruction"))
        shows_robot_alone = environment.options.get("state") == "robot"
        if shows_robot_alone and self._task in _OWN_ROBOT_NUMBERS:
            raise EnvError(f"{path}: states of {self._task} do not hold what options.state=robot shows; use state=full")
        self._robot_numbers = _state_size(path, environment) if shows_robot_alone else None
        self._episodes = [episode for episode in metadata["episodes"] if episode.get("success")]

    def are_of(self, env_id: str, options: Mapping[str, Any]) -> bool:
        """For a suite, checks its tasks, or the chosen ones."""
        return self._task in named_tasks(env_id, names_of(options.get("tasks"), "tasks"))

    def __len__(self) -> int:
        return len(self._episodes)

    def read(self, number: int) -> Demonstration:
        episode = self._episodes[number]
        with _h5py().File(self._path, "r") as file:
            group = file[f"traj_{episode['episode_id']}"]
            actions = torch.from_numpy(np.asarray(group["actions"]))
            rewards = np.asarray(group["rewards"]) if "rewards" in group else np.zeros(len(actions))
            return Demonstration(
                task=self._task,
                seed=episode.get("episode_seed"),
                observations=self._observations(group, len(actions)),
                actions=actions.long() if actions.dtype == torch.int64 else actions.float(),
                rewards=torch.from_numpy(rewards).float(),
                success=True,
            )

    def _observations(self, group: Any, num_actions: int) -> Observation:
        """Returns the observations before each action, without the one after the last action."""
        arrays = self._arrays(group["obs"]) if "obs" in group else {}
        read: Observation = {self._rename.get(name, name): array[:num_actions] for name, array in arrays.items()}
        if not read:
            raise EnvError(f"{self._path} was recorded without observations; {_REPLAY}")
        if self._instruction is not None:
            read["instruction"] = [self._instruction] * num_actions
        return read

    def _arrays(self, obs: Any) -> dict[str, torch.Tensor]:
        """Reads all fields: field -> [T + 1, ...]."""
        state = self._state(obs)
        return ({} if state is None else {"state": state}) | _pictures(obs)

    def _state(self, obs: Any) -> torch.Tensor | None:
        """Returns the state as the environment returns it, [T + 1, D]; None if the file does not contain it."""
        whole = obs if not hasattr(obs, "keys") else obs.get("state")
        if whole is not None:
            return torch.from_numpy(np.asarray(whole)).float()[:, : self._robot_numbers]
        if self._robot_numbers is None or set(obs.get("agent", ())) != set(_JOINTS):
            return None
        return torch.cat([torch.from_numpy(np.asarray(obs["agent"][name])).float() for name in _JOINTS], dim=1)


def _state_size(path: Path, environment: RunEnvironment) -> int:
    """Returns the size of the environment's state. Raises: EnvError if it has none."""
    if (state := environment.fields.get("state")) is None:
        there = ", ".join(sorted(environment.fields)) or "none"
        raise EnvError(
            f"{path}: options.state=robot shows the first numbers of a recorded state, and the field 'state' of the "
            f"environment says how many; its fields are {there}. Give its observation_spec as fields"
        )
    return state.shape[0]


def _pictures(obs: Any) -> dict[str, torch.Tensor]:
    """Reads the images: field -> [T + 1, H, W, 3]."""
    fields: dict[str, torch.Tensor] = {}
    if not hasattr(obs, "keys"):
        return fields
    for camera, pictures in obs["sensor_data"].items() if "sensor_data" in obs else ():
        if "rgb" in pictures:
            fields[f"image.{camera}"] = torch.from_numpy(np.asarray(pictures["rgb"]))
    return fields


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise EnvError(f"HDF5 files are read by h5py, which is missing ({error}); pip install h5py") from error
    return h5py
