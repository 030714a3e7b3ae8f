"""Groups of episodes that began in one state, compared step by step. Legend: T steps, N environments.

An advantage for a whole episode is one of `groups`, from the sums of rewards under `first_episode_mask`.
"""

import torch
from torch import Tensor

from rlinf_algos.advantages.groups import grpo_advantages
from rlinf_algos.advantages.reinforce_plus_plus import rewards_to_go
from rlinf_algos.checks import as_mask
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
