"""A chaotic environment: a difference in the last bit of an action decides success after some forty steps."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Chaos(gymnasium.Env):
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)

    def __init__(self, growth: float = 3.99, render_mode: str | None = None):
        self._growth = growth
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._numbers = self.np_random.uniform(0.1, 0.9, 3)
        return self._numbers.astype(np.float32), {}

    def step(self, action):
        shifted = np.clip(self._numbers + 0.05 * float(action[0]), 0.01, 0.99)
        self._numbers = self._growth * shifted * (1 - shifted)
        is_high = bool(self._numbers[0] > 0.5)
        return self._numbers.astype(np.float32), float(self._numbers[1]), False, False, {"success": is_high}

    def render(self):
        return np.full((16, 16, 3), 255 * self._numbers, np.uint8)
