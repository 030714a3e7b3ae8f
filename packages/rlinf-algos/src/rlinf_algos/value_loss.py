"""The critic's loss: half the squared error, with PPO's optional clipping of the value (OpenAI baselines, ppo2).

`0.5 * max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)`. Not in the PPO paper. Engstrom et al.
(arXiv:2005.12729) found no help in it and Andrychowicz et al. (arXiv:2006.05990) harm: `clip=None` leaves it out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, check_range, check_shape, masked
from rlinf_algos.normalization import masked_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss:
    """Terms to aggregate, and what to log about them; over micro-batches, weigh the fraction by `num_terms`."""

    loss_terms: Tensor
    """The shape of values, unreduced, the factor 0.5 included, 0 outside the mask, with gradient."""
    num_terms: Tensor
    """Scalar int64: elements inside the mask."""
    clip_fraction: Tensor
    """Scalar: share of the terms where the clipped value decided."""


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor | None,
    *,
    clip: float | None = 0.2,
) -> ValueLoss:
    """The clipped squared error of the critic, unreduced.

    Args:
        values: any shape, the critic's predictions, with gradient.
        old_values: the same shape, its predictions before the update; a constant. Not used where clip is None.
        returns: the same shape, what to predict; a constant.
        mask: the same shape, bool or 0/1; None: every element.
        clip: how far, in units of value, a prediction may move from the old one; at least 0. None: as far as it likes.

    Raises:
        ShapeError: shapes differ. NonFiniteError: NaN or infinity inside the mask. AlgosError: a negative clip.
    """
    check_shape("old_values", old_values, values.shape, "values")
    check_shape("returns", returns, values.shape, "values")
    inside = as_mask("mask", mask, "values", values)
    predicted = masked("values", values, inside)
    target = masked("returns", returns.detach(), inside)
    errors = (predicted - target).square()
    is_clipped = torch.zeros_like(inside)
    if clip is not None:
        check_range("clip", clip, low=0.0, why="it is a distance")
        old = masked("old_values", old_values.detach(), inside)
        clipped_errors = (predicted.clamp(old - clip, old + clip) - target).square()
        is_clipped = inside & (clipped_errors > errors)
        errors = torch.maximum(errors, clipped_errors)
    return ValueLoss(
        loss_terms=(0.5 * errors).masked_fill(~inside, 0.0),
        num_terms=inside.sum(),
        clip_fraction=masked_mean(is_clipped.to(errors.dtype), inside),
    )
