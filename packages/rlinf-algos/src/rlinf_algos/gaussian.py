"""The diagonal normal policy of continuous control: log-probability and entropy.

The action's dimensions are independent, so log-probabilities and entropies are sums over them. Shapes: [..., A] with A
the dimensions of one action; for chunks of actions [N, C, A] the result is [N, C], one for each step of the chunk.
"""

import math

import torch
from torch import Tensor

from rlinf_algos.checks import at_least_float32, check_finite, check_shape
from rlinf_algos.errors import ShapeError

_LOG_2_PI = math.log(2.0 * math.pi)


def gaussian_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of the actions.

    Args:
        actions: [..., A].
        mean: [..., A], the same shape.
        log_std: the same shape, or [A]: one for all.

    Returns:
        [...], nats, at least float32, differentiable in all three.

    Raises:
        ShapeError: shapes differ. NonFiniteError: NaN or infinity in any of the three.
    """
    check_shape("actions", actions, mean.shape, "mean")
    log_std = _expanded(mean, log_std)
    check_finite("actions", actions)
    z = (at_least_float32(actions) - at_least_float32(mean)) * torch.exp(-log_std)
    return (-0.5 * z.square() - log_std - 0.5 * _LOG_2_PI).sum(dim=-1)


def gaussian_entropy(mean: Tensor, log_std: Tensor) -> Tensor:
    """Differential entropy, `sum(log_std + (1 + log 2 pi) / 2)`.

    Args:
        mean: [..., A]; only its shape counts.
        log_std: the same shape, or [A].

    Returns:
        [...], nats, at least float32.
    """
    return (_expanded(mean, log_std) + 0.5 * (1.0 + _LOG_2_PI)).sum(dim=-1)


def _expanded(mean: Tensor, log_std: Tensor) -> Tensor:
    if mean.ndim == 0:
        raise ShapeError("mean has no dimensions; expected [..., A], the action's dimensions last")
    if log_std.shape == mean.shape[-1:]:
        log_std = log_std.expand(mean.shape)
    check_shape("log_std", log_std, mean.shape, "mean")
    check_finite("mean", mean)
    check_finite("log_std", log_std)
    return at_least_float32(log_std)
