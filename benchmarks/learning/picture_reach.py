"""A point is driven to a goal; a picture shows both, and the state says which way to go.

The smallest task for a success classifier: random actions reach the goal now and then, so success alone teaches it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlinf_envs import ActionSpec, BatchedEnv, Demonstration, EnvSpec, FieldSpec, KindSpec
from rlinf_envs.core.vector import InProcessVector, SingleObservation, SingleStep
from rlinf_envs.demonstrations.base import stacked

SIZE = 36
SPEED = 0.2
RADIUS = 0.2
"""Distance to the goal below which the task is solved."""
LIMIT = 15


class PictureReach:
    """One row (`rlinf_envs.core.vector.SingleEnv`)."""

    notes: tuple[str, ...] = ()
    action_spec = ActionSpec(kind="continuous", shape=(2,), low=-torch.ones(2), high=torch.ones(2))

    def __init__(self) -> None:
        self.observation_spec = {
            "state": FieldSpec(shape=(2,), dtype="float32"),
            "image.top": FieldSpec(shape=(SIZE, SIZE, 3), dtype="uint8"),
        }
        self.reset(0)

    def reset(self, seed: int) -> None:
        self._point, self._goal = np.random.default_rng(seed).uniform(-1.0, 1.0, (2, 2))

    def step(self, action: np.ndarray) -> SingleStep:
        self._point = np.clip(self._point + SPEED * action, -1.0, 1.0)
        success = bool(np.linalg.norm(self._goal - self._point) < RADIUS)
        return SingleStep(reward=float(success), terminated=success, truncated=False, success=success)

    def expert(self) -> np.ndarray:
        return np.clip((self._goal - self._point) / SPEED, -1.0, 1.0).astype(np.float32)

    def observe(self) -> SingleObservation:
        return {"state": (self._goal - self._point).astype(np.float32), "image.top": self.render()}

    def render(self) -> np.ndarray:
        picture = np.zeros((SIZE, SIZE, 3), np.uint8)
        for place, channel in ((self._goal, 1), (self._point, 0)):
            column, row = (SIZE / 2 + (SIZE / 2 - 3) * place).astype(int)
            picture[row - 2 : row + 3, column - 2 : column + 3, channel] = 255
        return picture

    def close(self) -> None:
        return


def make_reach(
    env_id: str, num_envs: int, *, max_episode_steps: int | None = None, ignore_terminations: bool = False, **_: Any
) -> BatchedEnv:
    limit = max_episode_steps or LIMIT
    return InProcessVector(PictureReach, num_envs, max_episode_steps=limit, ignore_terminations=ignore_terminations)


def record(spec: EnvSpec, seed: int) -> Demonstration:
    """An episode of the expert, who drives straight to the goal."""
    row = PictureReach()
    row.reset(seed)
    rows: list[SingleObservation] = []
    actions: list[np.ndarray] = []
    success = False
    while len(actions) < (spec.max_episode_steps or LIMIT) and not success:
        action = row.expert()
        rows.append(row.observe())
        actions.append(action)
        success = bool(row.step(action).success)
    return Demonstration(
        task="reach",
        seed=seed,
        observations=stacked(rows),
        actions=torch.from_numpy(np.stack(actions)),
        rewards=torch.tensor([0.0] * (len(actions) - 1) + [float(success)]),
        success=success,
    )


KIND = KindSpec(name="picture_reach", make=make_reach, expert=f"{__name__}:record", picture_size=SIZE)
