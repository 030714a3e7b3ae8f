"""The clipped policy loss of PPO (arXiv:1707.06347, eq. 7), with DAPO's asymmetric range and the dual clip.

`loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(policy_logprobs - proximal_logprobs)`, for each
token or action. clip_high > clip_low is "clip higher" of DAPO (arXiv:2503.14476). The dual clip
(arXiv:1912.09729) bounds the loss of a negative advantage by `-dual_clip * A`.

Departs from verl in not clamping the log-ratio to [-20, 20]: a ratio that overflows raises, since a policy 10^38 times
likelier than the one that sampled is a fault to be found and not a number to be clamped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, check_finite, check_range, check_shape, masked
from rlinf_algos.errors import AlgosError
from rlinf_algos.normalization import masked_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Terms to aggregate (see `rlinf_algos.aggregation`) and what to log about them.

    The means are over this call's terms: over micro-batches, weigh them by `num_terms`.
    """

    loss_terms: Tensor
    """The shape of policy_logprobs, unreduced, 0 outside the mask, with gradient."""
    num_terms: Tensor
    """Scalar int64: elements inside the mask."""
    clip_fraction: Tensor
    """Scalar: share of the terms where the clipped branch decided, so that no gradient passes."""
    dual_clip_fraction: Tensor
    """Scalar: share of the terms that the dual clip bounded; 0 without it."""
    approx_kl: Tensor
    """Scalar, nats: estimate k3 of KL(proximal || policy), `mean(r - 1 - log r)`, never negative."""
    ratio_mean: Tensor
    """Scalar: mean of r; far from 1 the proximal log-probabilities do not belong to these samples."""
    ratio_max: Tensor
    """Scalar: largest r; 0 where the mask is empty."""


def ppo_clip_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate loss, unreduced.

    Args:
        policy_logprobs: any shape ([B, T] tokens, [T, N] actions), nats, of the policy in training, with gradient.
        proximal_logprobs: the same shape, by the policy before the update; a constant.
        advantages: the same shape, or [B] for logprobs [B, T]: one for a whole sequence. A constant.
        loss_mask: the shape of policy_logprobs, bool or 0/1; None: every element.
        clip_low: the ratio is clipped below at 1 - clip_low; in [0, 1].
        clip_high: and above at 1 + clip_high; at least 0. DAPO: 0.28.
        dual_clip: None, or more than 1: bounds the loss where the advantage is negative. verl: 3.0.

    Returns:
        `PolicyLoss`; aggregate its loss_terms and minimise.

    Raises:
        ShapeError: shapes differ. NonFiniteError: NaN or infinity inside the mask, or a ratio that overflows.
        AlgosError: a clip range out of bounds.
    """
    check_range("clip_low", clip_low, low=0.0, high=1.0, why="a probability ratio is not negative")
    check_range("clip_high", clip_high, low=0.0, why="the range must hold the ratio 1")
    if dual_clip is not None and not dual_clip > 1.0:
        raise AlgosError(
            f"dual_clip={dual_clip} must be above 1, or None to leave it out: it bounds the ratio from above"
        )
    check_shape("proximal_logprobs", proximal_logprobs, policy_logprobs.shape, "policy_logprobs")
    mask = as_mask("loss_mask", loss_mask, "policy_logprobs", policy_logprobs)
    if policy_logprobs.ndim == 2 and advantages.shape == policy_logprobs.shape[:1]:
        advantages = advantages.unsqueeze(-1).expand(policy_logprobs.shape)
    check_shape("advantages", advantages, policy_logprobs.shape, "policy_logprobs")

    advantages = masked("advantages", advantages.detach(), mask)
    log_ratio = masked("policy_logprobs", policy_logprobs, mask) - masked(
        "proximal_logprobs", proximal_logprobs.detach(), mask
    )
    ratio = log_ratio.exp()
    check_finite("exp(policy_logprobs - proximal_logprobs)", ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    terms = torch.maximum(unclipped, clipped)
    is_bounded = torch.zeros_like(mask)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        is_bounded = mask & (advantages < 0) & (terms > bound)
        terms = torch.where(is_bounded, bound, terms)
    terms = terms.masked_fill(~mask, 0.0)
    with torch.no_grad():
        is_clipped = mask & (clipped > unclipped)
        return PolicyLoss(
            loss_terms=terms,
            num_terms=mask.sum(),
            clip_fraction=masked_mean(is_clipped.to(ratio.dtype), mask),
            dual_clip_fraction=masked_mean(is_bounded.to(ratio.dtype), mask),
            approx_kl=masked_mean(torch.expm1(log_ratio) - log_ratio, mask),
            ratio_mean=masked_mean(ratio, mask),
            ratio_max=ratio.masked_fill(~mask, 0.0).amax() if mask.numel() else ratio.sum(),
        )
