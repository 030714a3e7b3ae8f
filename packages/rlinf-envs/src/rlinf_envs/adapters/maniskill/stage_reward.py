"""The reward of the stages of a pick-and-place task: grasped, held, placed.

The numbers are those with which RL4VLA (arXiv:2505.19789, `simpler_wrapper.get_reward`) and RLinf's research code
(`maniskill_env.py`) train OpenVLA in ManiSkill. The value of a state is 0.1 if the object is grasped, plus 0.1 if it
has been held for five steps, plus 1 if the task is solved; the reward is its change. In ManiSkill's release the first
two flags stay set for the rest of an episode, so a lost grasp is not punished.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlinf_envs.errors import EnvError

STAGES = "stages"
"""Value of the option `reward_mode`."""
GRASPED, HELD, SOLVED = "is_src_obj_grasped", "consecutive_grasp", "success"
"""ManiSkill's flags of a row, in the `info` of a step."""


class StageReward:
    """Computes the rewards of `num_envs` rows."""

    def __init__(self, task: str, num_envs: int) -> None:
        self._task = task
        self._value = torch.zeros(num_envs)

    def reset(self, rows: Tensor | None) -> None:
        """Begins episodes in these rows; None: in all."""
        self._value = self._value.clone()
        self._value[slice(None) if rows is None else rows.to(self._value.device)] = 0.0

    def step(self, info: Mapping[str, Any]) -> Tensor:
        """Returns the rewards of a step, [N], on the device of the flags.

        Raises: EnvError if the task does not report these flags.
        """
        if missing := [flag for flag in (GRASPED, HELD, SOLVED) if flag not in info]:
            raise EnvError(
                f"options.reward_mode={STAGES}: {self._task} does not report {', '.join(missing)}; it is for the tasks "
                "of the suite bridge"
            )
        grasped, held, solved = (torch.as_tensor(info[flag]).bool() for flag in (GRASPED, HELD, SOLVED))
        value = 0.1 * grasped + 0.1 * held + 1.0 * (solved & grasped)
        reward = value - self._value.to(value.device)
        self._value = value
        return reward
