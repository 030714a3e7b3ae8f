"""Discounted rewards to go. Whitened over the tokens of a batch (`Moments`), they are the advantages of REINFORCE++
(arXiv:2501.03262), which needs no critic."""

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, check_range, masked
from rlinf_algos.errors import ShapeError
from rlinf_algos.recurrence import backward_recurrence


@torch.no_grad()
def rewards_to_go(rewards: Tensor, mask: Tensor | None, gamma: float, *, dim: int = 1) -> Tensor:
    """`R[t] = rewards[t] + gamma * R[t + 1]`, over the positions inside the mask only, as if the others were not there.

    Args:
        rewards: any shape.
        mask: the same shape, bool or 0/1; None: every element.
        gamma: discount for each position inside the mask, in [0, 1].
        dim: which dimension is time: 1 for [B, T] tokens, 0 for [T, N] steps.

    Returns:
        the shape of rewards, at least float32, 0 outside the mask.

    Raises:
        ShapeError, NonFiniteError. AlgosError: gamma out of range.
    """
    check_range("gamma", gamma, low=0.0, high=1.0, why="it is a discount")
    if not -rewards.ndim <= dim < rewards.ndim:
        raise ShapeError(f"rewards has shape {list(rewards.shape)}, which has no dimension {dim}")
    inside = as_mask("mask", mask, "rewards", rewards)
    terms = masked("rewards", rewards, inside)
    decay = torch.full_like(terms, gamma).masked_fill(~inside, 1.0)
    return backward_recurrence(terms, decay, dim).masked_fill(~inside, 0.0)
