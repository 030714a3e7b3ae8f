"""A toy for policies that look and read: a point on a plane moves to the spot whose colour the instruction names."""

import gymnasium
import numpy as np
from gymnasium import spaces

COLOURS = {"red": 0, "green": 1}
SIZE = 28
"""Pixels of a side."""
SPEED = 0.4
REACHED = 0.3


class Spots(gymnasium.Env):
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, size: int = SIZE, render_mode: str | None = None):
        self._size = size
        self.render_mode = render_mode
        self.observation_space = spaces.Dict(
            {
                "place": spaces.Box(-np.inf, np.inf, (2,), np.float32),
                "above": spaces.Box(0, 255, (size, size, 3), np.uint8),
                "instruction": spaces.Text(64),
            }
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place = np.zeros(2, np.float32)
        angle = self.np_random.uniform(0, 2 * np.pi)
        spot = np.array([np.cos(angle), np.sin(angle)], np.float32)
        self._spots = {"red": 0.7 * spot, "green": -0.7 * spot}
        self._wanted = str(self.np_random.choice(list(COLOURS)))
        return self._seen(), {}

    def step(self, action):
        self._place = np.clip(self._place + SPEED * np.clip(action, -1, 1), -1, 1).astype(np.float32)
        distance = float(np.linalg.norm(self._place - self._spots[self._wanted]))
        return self._seen(), -distance, False, False, {"success": distance < REACHED}

    def render(self):
        return self._picture()

    def _seen(self):
        return {"place": self._place, "above": self._picture(), "instruction": f"go to the {self._wanted} spot"}

    def _picture(self):
        picture = np.zeros((self._size, self._size, 3), np.uint8)
        for name, spot in self._spots.items():
            row, column = ((spot + 1) / 2 * (self._size - 1)).astype(int)
            picture[max(row - 2, 0) : row + 3, max(column - 2, 0) : column + 3, COLOURS[name]] = 255
        return picture
