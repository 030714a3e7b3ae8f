"""Executes given actions and keeps what cameras show, to label pictures by the outcome of their episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_envs.core.protocol import BatchedEnv, tensor_field


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutedEpisode:
    """The pictures of an episode of T actions."""

    pictures: dict[str, Tensor]
    """"image.<camera>" -> [T + 1, H, W, C] uint8: at the start, and after each action."""
    success: bool | None
    """Whether the task counted as solved after the last action; None if the environment does not define success."""


def execute_episode(env: BatchedEnv, seed: int, actions: Tensor, cameras: Sequence[str]) -> ExecutedEpisode:
    """Executes actions from a reset on, until they or the episode end.

    Args:
        env: of one row, whose episodes end with success.
        actions: [T, *action shape]
        cameras: fields "image.<camera>".
    """
    observation = env.reset([seed])
    pictures = {name: [tensor_field(observation, name)[0].clone()] for name in cameras}
    success: bool | None = False
    for action in actions:
        result = env.step(action[None])
        for name, values in pictures.items():
            values.append(tensor_field(result.final_observation, name)[0].clone())
        if result.episodes:
            success = result.episodes[0].success_at_end
            break
    return ExecutedEpisode(pictures={name: torch.stack(values) for name, values in pictures.items()}, success=success)
