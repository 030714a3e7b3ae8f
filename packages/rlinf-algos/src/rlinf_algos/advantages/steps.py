"""Groups of episodes that began in one state, compared step by step (at one time, in one state: GiGPO, or all with
all). Legend: T steps, N environments. A step may be a turn of a language model, and an environment an episode of it.

An advantage for a whole episode is one of `groups`, from the sums of rewards under `first_episode_mask`.
"""

from typing import Any

import torch
from torch import Tensor

from rlinf_algos.advantages.groups import grpo_advantages
from rlinf_algos.advantages.returns import rewards_to_go
from rlinf_algos.checks import as_mask, check_range, check_shape, masked
from rlinf_algos.errors import ShapeError


@torch.no_grad()
def first_episode_mask(terminated: Tensor, truncated: Tensor) -> Tensor:
    """[T, N] bool: True up to and including the step at which an environment's first episode ended; all True if none
    ended. After an automatic reset another episode begins, which does not belong to this group.

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
    """The discounted rewards to go, against those of the other environments at the same step: one group of
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


def gigpo_advantages(
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    state_ids: Tensor,
    gamma: float,
    *,
    step_weight: float = 1.0,
    normalize_std: bool = True,
    epsilon: float = 1e-4,
) -> Tensor:
    """GiGPO (arXiv:2505.10978, eq. 3 to 8): an episode against its group, plus `step_weight` times a step against all
    steps of the group that were taken in the same state.

    `A[t, n] = grpo(sum of rewards of n) + step_weight * grpo(discounted rewards to go of the steps with the state of
    [t, n])`. A state that was met once adds 0, and without any state that was met twice this is GRPO. The authors' code
    leaves a lone step its raw reward.

    Args:
        rewards, terminated, truncated: [T, N]: one group of environments, whose first episodes began in one state.
        state_ids: [T, N] integers, of the observation that step t acted on: equal ones are one state.
        gamma: discount of the rewards to go, in [0, 1]; the paper: 0.95.
        step_weight: omega of the paper, at least 0.
        normalize_std, epsilon: as for `grpo_advantages`, of both parts; False is the paper's other form.

    Returns:
        [T, N], at least float32, 0 after an environment's first episode.

    Raises: as `rewards_to_go` and `grpo_advantages`. AlgosError: a negative step_weight.
    """
    check_range("step_weight", step_weight, low=0.0, why="a negative one would teach the opposite")
    mask = first_episode_mask(terminated, truncated)
    check_shape("rewards", rewards, mask.shape, "terminated")
    options: dict[str, Any] = {"normalize_std": normalize_std, "epsilon": epsilon}
    sums = masked("rewards", rewards, mask).double().sum(dim=0, keepdim=True).to(rewards.dtype)
    episodes = grpo_advantages(sums, **options).expand(mask.shape).masked_fill(~mask, 0.0)
    to_go = rewards_to_go(rewards, mask, gamma, dim=0)
    return episodes + step_weight * grpo_advantages(to_go, state_ids, mask, **options)


def turn_return_advantages(
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-4,
) -> Tensor:
    """The discounted rewards to go of a turn, against those of all turns of the group.

    `A[t, n] = (R[t, n] - mean) / (std + epsilon)` with `R[t, n] = sum over k >= t of gamma^(k - t) rewards[k, n]`; mean
    and deviation are over all turns of all episodes. StarPO (arXiv:2504.20073) normalises the accumulated reward of an
    episode within its group; here each turn has the part of it that it could still change. With episodes of one turn
    this is GRPO. If only last turns have a reward, episodes with more turns weigh more in the mean than in GRPO.

    Arguments, result and errors as for `step_group_advantages`.
    """
    mask = first_episode_mask(terminated, truncated)
    to_go = rewards_to_go(rewards, mask, gamma, dim=0)
    one_group = torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
    return grpo_advantages(to_go, one_group, mask, normalize_std=normalize_std, epsilon=epsilon)
