"""Means, whitening and explained variance under a mask.

Statistics are those of the tensor given: to normalise over a whole batch, call this before splitting it into
micro-batches (CleanRL normalises each minibatch, verl the batch; the caller chooses by what it passes).
"""

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, check_range, check_shape, masked


def masked_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of the elements inside the mask; 0 where there is none.

    Args:
        values: any shape.
        mask: the same shape, bool or 0/1; None: every element.

    Returns:
        a scalar tensor, at least float32, differentiable.
    """
    inside = as_mask("mask", mask, "values", values)
    return masked("values", values, inside).sum() / inside.sum().clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor | None = None, *, epsilon: float = 1e-8) -> Tensor:
    """`(values - mean) / (std + epsilon)` over the elements inside the mask, with the unbiased deviation.

    Elements outside the mask, and all of them where those inside are equal (or there is only one), become exactly 0.

    Args:
        values: any shape.
        mask: the same shape, bool or 0/1; None: every element.
        epsilon: added to the standard deviation (as in CleanRL; verl adds it to the variance).

    Returns:
        the same shape, at least float32, differentiable.
    """
    check_range("epsilon", epsilon, low=0.0, why="it is added to a standard deviation")
    inside = as_mask("mask", mask, "values", values)
    filled = masked("values", values, inside)
    chosen = filled[inside]
    if chosen.numel() < 2 or bool((chosen == chosen[0]).all()):
        return filled * 0.0
    return ((filled - chosen.mean()) / (chosen.std() + epsilon)).masked_fill(~inside, 0.0)


@torch.no_grad()
def normalize_advantages(advantages: Tensor, mask: Tensor | None = None, *, epsilon: float = 1e-8) -> Tensor:
    """`masked_whiten` of advantages, as a constant without gradient."""
    return masked_whiten(advantages, mask, epsilon=epsilon)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """`1 - var(returns - values) / var(returns)`: 1 is a perfect critic, 0 no better than a constant, below 0 worse.

    Args:
        values: the critic's predictions, any shape.
        returns: what they should have been, the same shape.
        mask: the same shape, bool or 0/1; None: every element.

    Returns:
        a scalar tensor; NaN where it is undefined: returns that are all equal, or none.
    """
    check_shape("returns", returns, values.shape, "values")
    inside = as_mask("mask", mask, "values", values)
    chosen_returns = masked("returns", returns, inside)[inside]
    errors = chosen_returns - masked("values", values, inside)[inside]
    if chosen_returns.numel() == 0 or bool((chosen_returns == chosen_returns[0]).all()):
        return torch.full((), float("nan"), dtype=errors.dtype, device=errors.device)
    return 1.0 - errors.var(correction=0) / chosen_returns.var(correction=0)
