"""Groups of episodes in an environment that began in one state. Legend: T steps, N environments.

An episode has one advantage, from the sum of its rewards, or one for each step, from the rewards still to come.
"""

import torch
from torch import Tensor

from rlinf_algos.advantages.groups import grpo_advantages
from rlinf_algos.advantages.reinforce_plus_plus import rewards_to_go
from rlinf_algos.checks import as_mask, check_shape, masked
from rlinf_algos.errors import ShapeError


@torch.no_grad()
def first_episode_mask(terminated: Tensor, truncated: Tensor) -> Tensor:
    """[T, N] bool: True up to and including the step at which an environment's first episode ended; all True where none
    did. What follows an automatic reset is another episode, and no part of this one's group.

    Args:
        terminated, truncated: [T, N], bool or 0/1.
    """
    if terminated.ndim != 2:
        raise ShapeError(f"terminated has shape {list(terminated.shape)}; expected [T, N], time first")
    ended = as_mask("terminated", terminated, "terminated", terminated)
    ended = ended | as_mask("truncated", truncated, "terminated", terminated)
    return (ended.long().cumsum(dim=0) - ended.long()) == 0


@torch.no_grad()
def episode_group_advantages(
    rewards: Tensor,
    mask: Tensor | None,
    group_ids: Tensor,
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-4,
) -> Tensor:
    """One advantage for all steps of an episode, from the sum of its rewards: GRPO for control (RLinf's embodied GRPO).

    Args:
        rewards: [T, N].
        mask: [T, N], bool or 0/1, steps of the episode (`first_episode_mask`); None: all.
        group_ids: [N] integers; equal ones began in the same state of the same task.
        normalize_std, epsilon: as for `grpo_advantages`.

    Returns:
        [T, N], at least float32, 0 outside the mask.

    Raises: as `grpo_advantages`.
    """
    if rewards.ndim != 2:
        raise ShapeError(f"rewards has shape {list(rewards.shape)}; expected [T, N], time first")
    check_shape("group_ids", group_ids, rewards.shape[1:], "rewards[0]")
    inside = as_mask("mask", mask, "rewards", rewards)
    filled = masked("rewards", rewards, inside)
    returns = filled.double().sum(dim=0).to(filled.dtype)
    advantages = grpo_advantages(returns, group_ids, inside.any(dim=0), normalize_std=normalize_std, epsilon=epsilon)
    return advantages.expand(rewards.shape).masked_fill(~inside, 0.0)


def step_group_advantages(
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-4,
) -> Tensor:
    """The discounted rewards still to come, against those of the other environments at the same step: one group of
    environments, whose first episodes began in the same state.

    Args:
        rewards, terminated, truncated: [T, N].
        gamma: discount, in [0, 1].
        normalize_std, epsilon: as for `grpo_advantages`.

    Returns:
        [T, N], at least float32, 0 after an environment's first episode.

    Raises: as `rewards_to_go` and `grpo_advantages`.
    """
    mask = first_episode_mask(terminated, truncated)
    to_go = rewards_to_go(rewards, mask, gamma, dim=0)
    return grpo_advantages(to_go, mask=mask, normalize_std=normalize_std, epsilon=epsilon)
