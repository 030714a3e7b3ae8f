"""An environment that shows numbers alone and cannot be drawn."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Blind(gymnasium.Env):
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    observation_space = spaces.Box(-9.0, 9.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place = self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32)
        return self._place, {}

    def step(self, action):
        self._place = np.clip(self._place + action, -9.0, 9.0).astype(np.float32)
        return self._place, -float(abs(self._place[0])), False, False, {}
