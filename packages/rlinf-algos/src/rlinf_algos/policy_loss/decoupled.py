"""Decoupled PPO for asynchronous training (AReaL, arXiv:2505.24298, 5.2; the objective of arXiv:2110.00641).

Samples come from a behaviour policy that is some versions old, or from several. The clip anchors to the proximal
policy, the one before this update, and a constant corrects for who sampled:

    w = exp(proximal_logprobs - rollout_logprobs),   loss = -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

AReaL's code drops the tokens whose w exceeds a cap (`behav_imp_weight_cap`), and RLinf's (`behave_weight_threshold`)
does too; "truncate" keeps them with the cap as their weight. A dropped token adds 0 and still counts in `num_terms`, so
that the totals of an update can be counted before its losses are known.
"""

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from rlinf_algos.checks import check_finite, check_shape, masked
from rlinf_algos.errors import AlgosError
from rlinf_algos.policy_loss.base import PolicyLoss, check_clip, check_inputs, checked_ratio, clipped_surrogate


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoupledPolicyLoss(PolicyLoss):
    """A `PolicyLoss` whose terms hold the weights of the behaviour policy; its other fields do not."""

    weight_mean: Tensor
    """Scalar: mean of w before the cap; far from 1 the samples are stale, or from another engine."""
    weight_max: Tensor
    """Scalar: largest w before the cap; 0 where the mask is empty."""
    capped_fraction: Tensor
    """Scalar: share of the terms beyond the cap."""


def decoupled_ppo_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    rollout_logprobs: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weight_cap: float | None = 5.0,
    beyond_cap: Literal["drop", "truncate"] = "drop",
) -> DecoupledPolicyLoss:
    """The clipped surrogate loss around the proximal policy, weighted for the one that sampled, unreduced.

    Args:
        policy_logprobs, proximal_logprobs, advantages, loss_mask, clip_low, clip_high, dual_clip: as for
            `ppo_clip_loss`.
        rollout_logprobs: the shape of policy_logprobs, nats, by the engine and version that sampled; a constant.
        weight_cap: None, or at least 1: the largest weight.
        beyond_cap: what becomes of a term whose weight is larger.

    Raises:
        as `ppo_clip_loss`. NonFiniteError: a weight that overflows. AlgosError: a cap below 1, another word.
    """
    check_clip(clip_low, clip_high, dual_clip)
    if weight_cap is not None and not weight_cap >= 1.0:
        raise AlgosError(
            f"weight_cap={weight_cap} must be at least 1, or None to leave it out: on-policy weights are 1"
        )
    if beyond_cap not in ("drop", "truncate"):
        raise AlgosError(f"beyond_cap={beyond_cap!r} is not known; use 'drop' or 'truncate'")
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    ratio = checked_ratio(inputs.log_ratio)
    check_shape("rollout_logprobs", rollout_logprobs, policy_logprobs.shape, "policy_logprobs")
    loss = clipped_surrogate(inputs, ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    with torch.no_grad():
        behaviour = masked("rollout_logprobs", rollout_logprobs, inputs.mask)
        weights = (masked("proximal_logprobs", proximal_logprobs, inputs.mask) - behaviour).exp()
        check_finite("exp(proximal_logprobs - rollout_logprobs)", weights)
        weights = weights.masked_fill(~inputs.mask, 0.0)
        cap = float("inf") if weight_cap is None else weight_cap
        is_beyond = weights > cap
        applied = weights.clamp(max=cap) if beyond_cap == "truncate" else weights.masked_fill(is_beyond, 0.0)
        divisor = loss.num_terms.clamp(min=1).to(weights.dtype)
    unweighted = {field.name: getattr(loss, field.name) for field in fields(loss)}
    return DecoupledPolicyLoss(
        **unweighted | {"loss_terms": loss.loss_terms * applied},
        weight_mean=weights.sum() / divisor,
        weight_max=weights.amax() if weights.numel() else torch.zeros_like(divisor),
        capped_fraction=is_beyond.sum() / divisor,
    )
