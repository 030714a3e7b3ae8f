"""Changes to Meta-World's scenes for out-of-distribution evaluation: colours, cameras, initial positions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf_envs.errors import EnvError

MATERIALS = {"table_color": "table_wood", "floor_color": "basic_floor"}
"""Option -> the material in Meta-World's scenes."""
_CAMERAS, _HAND = 0, 1
"""Purposes of random draws."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneChanges:
    """Options of `make_metaworld`; the defaults change no bit. Raises: EnvError on creation."""

    table_color: str | None = None
    """"#rrggbb" in place of wood."""
    floor_color: str | None = None
    camera_shift: float = 0.0
    """Shift of each camera in metres, in a direction drawn with the episode's seed."""
    hand_shift: float = 0.0
    """Shift of the gripper's initial position in metres, in such a direction."""
    start_range: float = 1.0
    """Side lengths of the box from which objects and goals are drawn, as multiples of Meta-World's."""

    def __post_init__(self) -> None:
        for name in MATERIALS:
            color = getattr(self, name)
            if color is not None and not re.fullmatch(r"#[0-9a-fA-F]{6}", str(color)):
                raise EnvError(f"options.{name}={color!r}; a colour is #rrggbb in quotes, '#2060a0' for example")
        for name in ("camera_shift", "hand_shift", "start_range"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 10:
                raise EnvError(f"options.{name}={value!r}; it must be a number in 0..10")

    @property
    def look(self) -> str:
        """Key of the scene's materials; scenes with different materials need separate rendering data."""
        return "".join(f"|{name}={getattr(self, name)}" for name in MATERIALS if getattr(self, name))


class ChangedScene:
    """Applies the changes to the simulation of one task."""

    def __init__(self, env: Any, changes: SceneChanges) -> None:
        self._env, self._changes = env, changes
        self._cameras = env.model.cam_pos.copy()
        self._hand = np.array(env.hand_init_pos)
        for option, material in MATERIALS.items():
            if (color := getattr(changes, option)) is not None:
                number = env.model.material(material).id
                env.model.mat_texid[number] = -1
                env.model.mat_rgba[number, :3] = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        if changes.start_range != 1.0:
            for box in ("_random_reset_space", "goal_space"):  # Meta-World clips the observed goal to the second
                setattr(env, box, _scaled(getattr(env, box), changes.start_range))
            env.__dict__.pop("sawyer_observation_space", None)  # which is cached

    def begin(self, seed: int) -> None:
        """Call before the reset of an episode with this seed."""
        changes = self._changes
        if changes.camera_shift:
            directions = _directions(seed, _CAMERAS, len(self._cameras))
            self._env.model.cam_pos[:] = self._cameras + changes.camera_shift * directions
        if changes.hand_shift:
            self._env.hand_init_pos = self._hand + changes.hand_shift * _directions(seed, _HAND, 1)[0]


def _scaled(box: Any, factor: float) -> Any:
    """Scales a Gymnasium box around its centre; None stays None."""
    if box is None:
        return None
    middle, half = (box.low + box.high) / 2, (box.high - box.low) / 2 * factor
    return type(box)(middle - half, middle + half, dtype=box.dtype)


def _directions(seed: int, purpose: int, count: int) -> np.ndarray:
    """Returns uniformly distributed unit vectors, [count, 3]."""
    drawn = np.random.default_rng([seed, purpose]).standard_normal((count, 3))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
