"""What DAPO (arXiv:2503.14476) adds around the loss: which groups to train on, what to do with overlong completions.

The rest of DAPO is elsewhere: clip-higher in `ppo_clip_loss(clip_high=0.28)`, the token-level mean in `token_mean`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_algos.advantages.groups import Groups
from rlinf_algos.checks import as_mask, at_least_float32, check_finite, check_range, check_shape
from rlinf_algos.errors import AlgosError, ShapeError


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupChoice:
    """Which samples to train on, and whether more are needed."""

    keep: Tensor
    """The shape of the rewards, bool: samples of the groups chosen."""
    num_groups: int
    """Groups that were looked at."""
    num_with_signal: int
    """Groups, among those looked at, whose rewards differ."""
    num_chosen: int
    """Groups in `keep`: at most as many as wanted."""
    num_missing: int
    """Groups that are wanted beyond those chosen."""
    num_more_prompts: int
    """Prompts to sample next so that, at the share of groups with signal seen here, they give the missing groups; 0 if
    none is missing. The share is taken as (with signal + 1) / (groups + 2), so that a poor start asks for many prompts,
    not for infinitely many."""


@torch.no_grad()
def has_signal(rewards: Tensor, group_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """True for the samples of groups whose rewards differ: the others have advantages of 0 (eq. 11's condition).

    Args:
        rewards, group_ids, mask: as for `grpo_advantages`: [P, G], or any shape with group_ids. Where rewards are
            shaped (length penalties make all of them differ), pass what was right and wrong instead, as verl's
            `filter_groups.metric=acc`.

    Returns:
        the shape of rewards, bool; False outside the mask. For [P, G], `has_signal(rewards).any(dim=1)` is per prompt.

    Raises: as `grpo_advantages`.
    """
    groups = Groups.of(rewards, group_ids, mask)
    return groups.restore(~groups.is_constant[groups.index]) > 0


@torch.no_grad()
def choose_groups(
    rewards: Tensor,
    group_ids: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    num_wanted: int,
) -> GroupChoice:
    """Dynamic sampling: keeps the groups that carry signal, in the order in which their first samples come, until there
    are enough; says how many prompts to sample if there are not.

    Args:
        rewards, group_ids, mask: as for `has_signal`.
        num_wanted: groups to train on, at least 1.

    Raises: as `grpo_advantages`. AlgosError: num_wanted below 1.
    """
    check_range("num_wanted", num_wanted, low=1, why="an update needs a group")
    groups = Groups.of(rewards, group_ids, mask)
    candidates = (~groups.is_constant).nonzero().squeeze(1)
    num_groups, num_with_signal = len(groups.sizes), len(candidates)
    chosen = torch.zeros_like(groups.is_constant)
    chosen[candidates[groups.first_places()[candidates].argsort()[:num_wanted]]] = True
    num_missing = max(0, num_wanted - num_with_signal)
    return GroupChoice(
        keep=groups.restore(chosen[groups.index]) > 0,
        num_groups=num_groups,
        num_with_signal=num_with_signal,
        num_chosen=min(num_wanted, num_with_signal),
        num_missing=num_missing,
        num_more_prompts=math.ceil(num_missing * (num_groups + 2) / (num_with_signal + 1)),
    )


@torch.no_grad()
def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> Tensor:
    """What to add to the reward of a completion for its length (eq. 13): 0 up to `max_tokens - buffer_tokens`, then
    falling in a straight line to -penalty at max_tokens, and -penalty beyond.

    Args:
        lengths: any shape, tokens of each completion, at least 0.
        max_tokens: the length at which the penalty is whole; the limit of generation, or below it.
        buffer_tokens: tokens over which the reward falls, from 1 to max_tokens. The paper has 4,096 of 20,480.
        penalty: most that the reward falls, at least 0; the paper has 1. verl: `overlong_buffer.penalty_factor`.

    Returns:
        the shape of lengths, at least float32, in [-penalty, 0].

    Raises: AlgosError: a number out of range. NonFiniteError: a length that is none.
    """
    check_range("penalty", penalty, low=0.0, high=1e30, why="a negative one would reward length")
    check_range("max_tokens", max_tokens, low=1, why="a completion needs a token")
    check_range("buffer_tokens", buffer_tokens, low=1, high=max_tokens, why="it is a part of max_tokens")
    check_finite("lengths", lengths)
    if bool((lengths < 0).any()):
        raise AlgosError(f"lengths holds {float(lengths.min()):g}; a completion has at least 0 tokens")
    beyond = at_least_float32(lengths - (max_tokens - buffer_tokens)) / buffer_tokens
    return -penalty * beyond.clamp(0.0, 1.0)


@torch.no_grad()
def overlong_filter(loss_mask: Tensor, truncated: Tensor) -> Tensor:
    """The mask without the completions that were cut at the length limit (section 3.4): a cut says nothing about
    whether the reasoning was sound. They still count in their group's baseline unless they are masked there too.

    Args:
        loss_mask: [B, T], bool or 0/1.
        truncated: [B], bool or 0/1.

    Returns:
        [B, T] bool. All False where all were cut: the update then has no token.

    Raises: ShapeError, AlgosError.
    """
    if loss_mask.ndim != 2:
        raise ShapeError(f"loss_mask has shape {list(loss_mask.shape)}; expected [B, T]")
    mask = as_mask("loss_mask", loss_mask, "loss_mask", loss_mask)
    check_shape("truncated", truncated, loss_mask.shape[:1], "loss_mask[:, 0]")
    return mask & ~as_mask("truncated", truncated, "truncated", truncated)[:, None]
