"""The critic's loss: half the squared error or Huber's, with PPO's optional clipping of the value (OpenAI baselines,
ppo2).

`max(f(v - R), f(clip(v, v_old - c, v_old + c) - R))` with `f(e) = e^2 / 2`, or Huber's (1964), which is linear beyond
delta: `f(e) = delta * (|e| - delta / 2)`. Clipping is not in the PPO paper. Engstrom et al. (arXiv:2005.12729) found
that it does not help, Andrychowicz et al. (arXiv:2006.05990) that it hurts, as does Huber's loss: `clip=None` disables
it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, check_range, check_shape, masked
from rlinf_algos.errors import AlgosError
from rlinf_algos.normalization import masked_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss:
    """Terms to aggregate and metrics to log; to average the fraction over micro-batches, weight it by `num_terms`."""

    loss_terms: Tensor
    """The shape of values, unreduced, the factor 0.5 included, 0 outside the mask, with gradient."""
    num_terms: Tensor
    """Scalar int64: elements inside the mask."""
    clip_fraction: Tensor
    """Scalar: share of the terms whose value was clipped."""


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
        old_values: the same shape, its predictions before the update; a constant. Not used if clip is None.
        returns: the same shape, the targets; a constant.
        mask: the same shape, bool or 0/1; None: every element.
        clip: how far, in units of value, a prediction may move from the old one; at least 0. None: no limit.

    Raises:
        ShapeError: shapes differ. NonFiniteError: NaN or infinity inside the mask. AlgosError: a negative clip.
    """
    return _clipped(lambda errors: 0.5 * errors.square(), values, old_values, returns, mask, clip)


def huber_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor | None,
    *,
    delta: float = 10.0,
    clip: float | None = None,
) -> ValueLoss:
    """Huber's loss of the critic, unreduced: squared for small errors and linear for large ones, so that a few outliers
    do not dominate the gradient.

    Args:
        values, old_values, returns, mask, clip: as for `clipped_value_loss`.
        delta: above 0, in units of value: the error at which the loss becomes linear. RLinf: `huber_delta`, 10.

    Raises:
        as `clipped_value_loss`. AlgosError: delta not above 0.
    """
    if not 0.0 < delta < float("inf"):
        raise AlgosError(f"delta={delta} must be above 0 and finite; for the squared error use clipped_value_loss")

    def huber(errors: Tensor) -> Tensor:
        sizes = errors.abs()
        inner = sizes.clamp(max=delta)
        return inner * (sizes - 0.5 * inner)  # e^2 / 2 up to delta, delta * (|e| - delta / 2) beyond

    return _clipped(huber, values, old_values, returns, mask, clip)


def _clipped(
    loss_of: Callable[[Tensor], Tensor],
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor | None,
    clip: float | None,
) -> ValueLoss:
    check_shape("old_values", old_values, values.shape, "values")
    check_shape("returns", returns, values.shape, "values")
    inside = as_mask("mask", mask, "values", values)
    predicted = masked("values", values, inside)
    target = masked("returns", returns.detach(), inside)
    terms = loss_of(predicted - target)
    is_clipped = torch.zeros_like(inside)
    if clip is not None:
        check_range("clip", clip, low=0.0, why="it is a distance")
        old = masked("old_values", old_values.detach(), inside)
        clipped_terms = loss_of(predicted.clamp(old - clip, old + clip) - target)
        is_clipped = inside & (clipped_terms > terms)
        terms = torch.maximum(terms, clipped_terms)
    return ValueLoss(
        loss_terms=terms.masked_fill(~inside, 0.0),
        num_terms=inside.sum(),
        clip_fraction=masked_mean(is_clipped.to(terms.dtype), inside),
    )
