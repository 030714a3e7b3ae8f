"""ManiSkill's trajectories: an HDF5 file `<name>.h5` beside `<name>.json`, as its recorder and its downloads have them.

The JSON file has `env_info` (`env_id`, `env_kwargs`) and `episodes` (`episode_id`, `episode_seed`, `success`, ...); the
HDF5 file a group `traj_<episode_id>` with `actions` [T, A], `success` [T], perhaps `rewards` [T], and `obs` of T + 1
moments: an array of states (obs_mode state), or a group with `state` and `sensor_data/<camera>/rgb`. (Layout:
ManiSkill's documentation, "Demonstrations", section "Format".) What is recorded without observations has to be replayed
by ManiSkill's own tool first. Of pictures without `state` the robot's own numbers (`agent`, `extra`) are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf_envs.demonstrations.base import Demonstration, DemonstrationFiles
from rlinf_envs.errors import EnvError
from rlinf_envs.protocol import Observation

_REPLAY = (
    "replay them with python -m mani_skill.trajectory.replay_trajectory --traj-path FILE.h5 --save-traj --obs-mode "
    "state (or rgb+state)"
)


class ManiSkillDemonstrations(DemonstrationFiles):
    """The episodes of a file whose JSON says that they succeeded.

    Raises: EnvError where it is not what it should be.
    """

    def __init__(self, path: Path, rename: Mapping[str, str]) -> None:
        self._path, self._rename = path, rename
        if path.suffix != ".h5":
            raise EnvError(f"{path}: give the .h5 file of a trajectory, with its .json beside it")
        described = path.with_suffix(".json")
        if not described.is_file():
            raise EnvError(f"{described} is missing: it says which episodes of {path.name} succeeded")
        told = json.loads(described.read_text(encoding="utf-8"))
        self.env_id = self._task = str(told["env_info"]["env_id"])
        made_with = told["env_info"].get("env_kwargs", {})
        self.options = {name: made_with[name] for name in ("control_mode",) if name in made_with}
        self._episodes = [episode for episode in told["episodes"] if episode.get("success")]

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
        """Those before each action; the one after the last is left out."""
        found = _arrays(group["obs"]) if "obs" in group else {}
        read: Observation = {self._rename.get(name, name): array[:num_actions] for name, array in found.items()}
        if not read:
            raise EnvError(f"{self._path} was recorded without observations; {_REPLAY}")
        return read


def _arrays(obs: Any) -> dict[str, torch.Tensor]:
    """Field -> [T + 1, ...]"""
    if not hasattr(obs, "keys"):
        return {"state": torch.from_numpy(np.asarray(obs)).float()}
    found = {"state": torch.from_numpy(np.asarray(obs["state"])).float()} if "state" in obs else {}
    for camera, pictures in obs["sensor_data"].items() if "sensor_data" in obs else ():
        if "rgb" in pictures:
            found[f"image.{camera}"] = torch.from_numpy(np.asarray(pictures["rgb"]))
    return found


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise EnvError(f"HDF5 files are read by h5py, which is missing ({error}); pip install h5py") from error
    return h5py
