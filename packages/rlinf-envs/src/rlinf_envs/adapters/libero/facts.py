"""What decides the numbers of an episode in LIBERO besides its seed and its actions."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf_envs.adapters.libero.assets import assets_folder
from rlinf_envs.adapters.libero.env import LiberoOptions, chosen_tasks_of
from rlinf_envs.core.names import names_of

_PLACES = ("assets", "render", "task_classification")
"""Options that change no number."""
_BLOCK_BYTES = 1 << 22


def libero_facts(env_id: str, options: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the tasks, all options with their defaults, how pictures are drawn, and digests of the files of the tasks
    and of the scenes.

    Raises: EnvError as `make_libero`.
    """
    left = dict(options)
    tasks = chosen_tasks_of(env_id, left)
    cameras = names_of(left.pop("cameras", None), "cameras") or ()
    resolved = LiberoOptions(cameras=cameras, **left)
    values = {name: value for name, value in asdict(resolved).items() if name not in _PLACES}
    values["cameras"] = ", ".join(cameras)
    files = dict.fromkeys(file for task in tasks for file in (task.goal_file, task.states_file))
    drawing = os.environ.get("MUJOCO_GL") or "window"
    return {
        "tasks": ", ".join(task.name for task in tasks),
        **{f"option.{name}": str(value) for name, value in values.items()},
        **({"drawing": drawing} if cameras else {}),
        "digest.tasks": _digest((file.name, file) for file in files),
        "digest.scenes": scenes_digest(assets_folder(resolved.assets)),
    }


@functools.cache
def scenes_digest(assets: Path) -> str:
    """Returns a digest of the folder's scenes, meshes and textures; files at its top, such as a README, are ignored."""
    files = sorted(path for path in assets.rglob("*") if path.is_file() and path.parent != assets)
    return _digest((path.relative_to(assets).as_posix(), path) for path in files)


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(f"{name} {path.stat().st_size}\n".encode())
        with path.open("rb") as opened:
            while block := opened.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()
