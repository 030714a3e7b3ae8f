"""Groups of steps and turns: episodes of several turns with a language model, and of steps in an environment.

Legend: B episodes, K turns (or steps) of each, T tokens, N environments.

One advantage for a whole episode comes from a group of episodes (`episode_group_advantages`). Credit for single turns
comes from groups of turns: the same turn of all episodes of a prompt (`turn_group_ids`), or turns that began in one
state (`state_group_ids`, GiGPO). Ids alone say what a group is, so every function of `advantages.groups` takes them.
"""

import torch
from torch import Tensor

from rlinf_algos.advantages.groups import grpo_advantages
from rlinf_algos.advantages.reinforce_plus_plus import rewards_to_go
from rlinf_algos.checks import as_mask, check_range, check_shape, masked
from rlinf_algos.errors import AlgosError, ShapeError


@torch.no_grad()
def gigpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    state_ids: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    normalize_std: bool = True,
    epsilon: float = 1e-4,
) -> Tensor:
    """The episode's advantage plus that of the step among all steps from the same state (GiGPO, arXiv:2505.10978).

        A[b, k] = grpo(sum over k of rewards[b, k]) + step_weight * grpo(rewards to go[b, k])

    The first group is the episodes of one prompt, the second the steps of these episodes that began in one state. A
    state that was met once adds nothing.

    Args:
        rewards: [B, K], of each step.
        group_ids: [B] integers; equal ones are episodes of one prompt (or of one initial state).
        state_ids: [B, K] integers; equal ones began in the same state (a hash of the observation).
        mask: [B, K], bool or 0/1, steps that were taken; None: all.
        gamma: discount of the rewards to go, in [0, 1].
        step_weight: at least 0; 0 is GRPO with one advantage for an episode.
        normalize_std, epsilon: as for `grpo_advantages`, in both groups; False as in the paper's second form.

    Returns:
        [B, K], at least float32, 0 outside the mask. For tokens: `spread_over_tokens`.

    Raises:
        ShapeError, NonFiniteError, AlgosError: as `grpo_advantages`; gamma or step_weight out of range.
    """
    check_range("step_weight", step_weight, low=0.0, why="it weighs the advantages of steps")
    if rewards.ndim != 2:
        raise ShapeError(f"rewards has shape {list(rewards.shape)}; expected [B, K], one for each turn")
    inside = as_mask("mask", mask, "rewards", rewards)
    filled = masked("rewards", rewards, inside)
    options = {"normalize_std": normalize_std, "epsilon": epsilon}
    # Summed in float64 and rounded, so that equal sums in another order stay equal.
    returns = filled.double().sum(dim=1).to(filled.dtype)
    to_go = rewards_to_go(filled.double(), inside, gamma).to(filled.dtype)
    episodes = grpo_advantages(returns, group_ids, inside.any(dim=1), **options)
    steps = grpo_advantages(to_go, state_group_ids(group_ids, state_ids), inside, **options)
    return (episodes[:, None] + step_weight * steps).masked_fill(~inside, 0.0)


def turn_group_ids(group_ids: Tensor, num_turns: int) -> Tensor:
    """[B] groups of episodes -> [B, K] groups of turns: turn k of every episode of a prompt."""
    if group_ids.ndim != 1:
        raise ShapeError(f"group_ids has shape {list(group_ids.shape)}; expected [B], one for each episode")
    return _pair_ids(group_ids, torch.arange(num_turns, device=group_ids.device).expand(len(group_ids), -1))


def state_group_ids(group_ids: Tensor, state_ids: Tensor) -> Tensor:
    """[B] groups of episodes and [B, K] states -> [B, K] groups of turns of one prompt that began in one state."""
    if state_ids.ndim != 2 or group_ids.shape != state_ids.shape[:1]:
        raise ShapeError(
            f"state_ids has shape {list(state_ids.shape)}, group_ids {list(group_ids.shape)}; expected [B, K] and [B]"
        )
    return _pair_ids(group_ids, state_ids)


@torch.no_grad()
def spread_over_tokens(turn_advantages: Tensor, turn_index: Tensor, loss_mask: Tensor) -> Tensor:
    """The advantage of each token's turn.

    Args:
        turn_advantages: [B, K].
        turn_index: [B, T] integers in 0 ... K - 1, the turn that wrote each token; not looked at outside the mask.
        loss_mask: [B, T], bool or 0/1.

    Returns:
        [B, T], at least float32, 0 outside the mask.

    Raises:
        ShapeError. AlgosError: a turn out of range. NonFiniteError: the advantage of a turn that wrote a token.
    """
    if turn_advantages.ndim != 2 or len(turn_advantages) != len(turn_index):
        raise ShapeError(
            f"turn_advantages has shape {list(turn_advantages.shape)}, turn_index {list(turn_index.shape)}; "
            "expected [B, K] and [B, T]"
        )
    inside = as_mask("loss_mask", loss_mask, "turn_index", turn_index)
    index = turn_index.masked_fill(~inside, 0).long()
    outside = ((index < 0) | (index >= turn_advantages.shape[1])) & inside
    if bool(outside.any()):
        place = outside.nonzero()[0].tolist()
        raise AlgosError(
            f"turn_index{place}={int(index[tuple(place)])}, but turn_advantages has turns 0 ... "
            f"{turn_advantages.shape[1] - 1}"
        )
    if turn_advantages.shape[1] == 0:
        return torch.zeros(turn_index.shape, device=turn_index.device)
    is_used = torch.zeros(turn_advantages.shape, dtype=torch.int32, device=index.device)
    is_used.scatter_add_(1, index, inside.to(torch.int32))
    return masked("turn_advantages", turn_advantages, is_used > 0).gather(1, index).masked_fill(~inside, 0.0)


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


def _pair_ids(group_ids: Tensor, others: Tensor) -> Tensor:
    """One id for each pair (group_ids[b], others[b, k]), numbered from 0, so that no product can overflow."""
    for name, ids in (("group_ids", group_ids), ("state_ids", others)):
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise AlgosError(f"{name} has dtype {ids.dtype}; expected integers")
    if others.numel() == 0:
        return torch.zeros(others.shape, dtype=torch.int64, device=others.device)
    groups = torch.unique(group_ids, return_inverse=True)[1]
    values, inverse = torch.unique(others, return_inverse=True)
    return groups[:, None] * len(values) + inverse
