"""What every policy loss shares: its record, the checks of its inputs, and the clipped surrogate."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, check_finite, check_range, check_shape, masked
from rlinf_algos.errors import AlgosError


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Terms to aggregate (see `rlinf_algos.aggregation`) and metrics to log; created by `measured_loss`.

    `loss_terms` has the shape of the log-probabilities and carries the gradient. The other fields are scalar metrics
    without gradient: `num_terms`, `clip_fraction` and `approx_kl`. Their means are over the terms of this call; to
    average over micro-batches, weight them by `num_terms`.
    """

    loss_terms: Tensor
    """The shape of policy_logprobs, unreduced, 0 outside the mask, with gradient."""
    num_terms: Tensor
    """Scalar int64: elements inside the mask."""
    clip_fraction: Tensor
    """Scalar: share of the terms that were clipped. They have no gradient, except in CISPO, which bounds the weight of
    the gradient; 0 for a loss without a clip."""
    approx_kl: Tensor
    """Scalar, nats: estimate k3 of KL(proximal || policy), `mean(r - 1 - log r)`, never negative."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedInputs:
    """The four inputs of a policy loss after its checks, at least float32, 0 outside the mask, of one shape:
    `policy_logprobs` and `log_ratio` with gradient, `advantages`, and `mask`, which is bool."""

    policy_logprobs: Tensor
    """Log-probabilities by the policy, nats, with gradient."""
    log_ratio: Tensor
    """`policy_logprobs - proximal_logprobs`, nats, with gradient."""
    advantages: Tensor
    mask: Tensor
    """bool, True inside."""


def check_inputs(
    policy_logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor | None
) -> CheckedInputs:
    """Raises `ShapeError` or `NonFiniteError`; advantages [B] become [B, T] for log-probabilities [B, T]."""
    check_shape("proximal_logprobs", proximal_logprobs, policy_logprobs.shape, "policy_logprobs")
    mask = as_mask("loss_mask", loss_mask, "policy_logprobs", policy_logprobs)
    if policy_logprobs.ndim == 2 and advantages.shape == policy_logprobs.shape[:1]:
        advantages = advantages.unsqueeze(-1).expand(policy_logprobs.shape)
    check_shape("advantages", advantages, policy_logprobs.shape, "policy_logprobs")
    advantages = masked("advantages", advantages.detach(), mask)
    policy_logprobs = masked("policy_logprobs", policy_logprobs, mask)
    proximal_logprobs = masked("proximal_logprobs", proximal_logprobs.detach(), mask)
    return CheckedInputs(
        policy_logprobs=policy_logprobs,
        log_ratio=policy_logprobs - proximal_logprobs,
        advantages=advantages,
        mask=mask,
    )


def checked_ratio(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)`; raises `NonFiniteError` where it overflows."""
    ratio = log_ratio.exp()
    check_finite("exp(policy_logprobs - proximal_logprobs)", ratio)
    return ratio


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Raises `AlgosError` unless 0 <= clip_low <= 1, 0 <= clip_high and 1 < dual_clip."""
    check_range("clip_low", clip_low, low=0.0, high=1.0, why="a probability ratio is not negative")
    check_range("clip_high", clip_high, low=0.0, why="the range must contain the ratio 1")
    if dual_clip is not None and not dual_clip > 1.0:
        raise AlgosError(
            f"dual_clip={dual_clip} must be above 1, or None to disable it: it bounds the ratio from above"
        )


def clipped_surrogate(
    inputs: CheckedInputs, ratio: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyLoss:
    """`-min(r A, clip(r) A)` with its dual clip; `ratio`, of the inputs' shape, carries the gradient."""
    weights = -inputs.advantages
    unclipped = weights * ratio
    clipped = weights * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    terms = torch.maximum(unclipped, clipped)
    is_clipped = clipped > unclipped  # never outside the mask: the advantage is 0 there
    if dual_clip is not None:
        bound = weights * dual_clip
        terms = torch.where((weights > 0) & (terms > bound), bound, terms)
    return measured_loss(terms, inputs, is_clipped=is_clipped)


def measured_loss(terms: Tensor, inputs: CheckedInputs, *, is_clipped: Tensor | None = None) -> PolicyLoss:
    """A `PolicyLoss` with the terms and their metrics.

    Args:
        terms: the inputs' shape, 0 outside the mask.
        is_clipped: bool, False outside the mask; None: nothing was clipped.
    """
    with torch.no_grad():
        num_terms = inputs.mask.sum()
        divisor = num_terms.clamp(min=1).to(inputs.log_ratio.dtype)
        return PolicyLoss(
            loss_terms=terms,
            num_terms=num_terms,
            clip_fraction=torch.zeros_like(divisor) if is_clipped is None else is_clipped.sum() / divisor,
            approx_kl=(torch.expm1(inputs.log_ratio) - inputs.log_ratio).sum() / divisor,
        )
