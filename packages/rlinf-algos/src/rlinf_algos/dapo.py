"""DAPO (arXiv:2503.14476) outside of the loss: which groups have a learning signal, and overlong completions.

The rest of DAPO is elsewhere: clip-higher in `ppo_clip_loss(clip_high=0.28)`, the token-level mean in `token_mean`.
"""

import torch
from torch import Tensor

from rlinf_algos.advantages.groups import Groups
from rlinf_algos.checks import as_mask, at_least_float32, check_finite, check_range, check_shape
from rlinf_algos.errors import AlgosError, ShapeError


@torch.no_grad()
def has_signal(rewards: Tensor) -> Tensor:
    """True for the samples of groups whose rewards differ: the others have advantages of 0 (eq. 11's condition).

    Args:
        rewards: [P, G], one row for each prompt. Where rewards are shaped (length penalties make all of them differ),
            pass what was right and wrong instead, as verl's `filter_groups.metric=acc`.

    Returns:
        [P, G], bool; `has_signal(rewards).any(dim=1)` is per prompt.

    Raises: as `grpo_advantages`.
    """
    groups = Groups.of(rewards)
    return groups.restore(~groups.is_constant[groups.index]) > 0


@torch.no_grad()
def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> Tensor:
    """The reward penalty for a completion's length (eq. 13): 0 up to `max_tokens - buffer_tokens`, then falling
    linearly to -penalty at max_tokens, and -penalty beyond.

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
    """The mask without completions that were truncated at the length limit (section 3.4): truncation says nothing about
    the quality of the reasoning. They still count in their group's baseline unless they are masked there too.

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
