"""Decoupled PPO for asynchronous training (AReaL, arXiv:2505.24298, 5.2; the objective of arXiv:2110.00641).

Samples come from a behaviour policy that is some versions old, or from several versions. The clip is around the
proximal policy, the one before this update, and a constant weight corrects for the behaviour policy:

    w = exp(proximal_logprobs - rollout_logprobs),   loss = -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

As in AReaL's code (`behav_imp_weight_cap`) and RLinf's (`behave_weight_threshold`), tokens whose w exceeds a cap are
dropped. A dropped token adds 0 and still counts in `num_terms`, so that the number of terms in an update is known
before its losses are computed.
"""

from dataclasses import replace

import torch
from torch import Tensor

from rlinf_algos.checks import check_finite, check_shape, masked
from rlinf_algos.errors import AlgosError
from rlinf_algos.policy_loss.base import PolicyLoss, check_clip, check_inputs, checked_ratio, clipped_surrogate


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
) -> PolicyLoss:
    """The clipped surrogate loss around the proximal policy, weighted for the behaviour policy, unreduced.

    Args:
        policy_logprobs, proximal_logprobs, advantages, loss_mask, clip_low, clip_high, dual_clip: as for
            `ppo_clip_loss`.
        rollout_logprobs: the shape of policy_logprobs, nats, by the engine and policy version that sampled; a constant.
        weight_cap: None, or at least 1: the largest weight; terms with a larger one are dropped.

    Returns and raises: as `ppo_clip_loss`; the metrics are unweighted. NonFiniteError: a weight that overflows.
        AlgosError: a cap below 1.
    """
    check_clip(clip_low, clip_high, dual_clip)
    if weight_cap is not None and not weight_cap >= 1.0:
        raise AlgosError(f"weight_cap={weight_cap} must be at least 1, or None to disable it: on-policy weights are 1")
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    ratio = checked_ratio(inputs.log_ratio)
    check_shape("rollout_logprobs", rollout_logprobs, policy_logprobs.shape, "policy_logprobs")
    loss = clipped_surrogate(inputs, ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    with torch.no_grad():
        behaviour = masked("rollout_logprobs", rollout_logprobs, inputs.mask)
        weights = (masked("proximal_logprobs", proximal_logprobs, inputs.mask) - behaviour).exp()
        check_finite("exp(proximal_logprobs - rollout_logprobs)", weights)
        is_beyond = weights > (float("inf") if weight_cap is None else weight_cap)
        weights = weights.masked_fill(~inputs.mask | is_beyond, 0.0)
    return replace(loss, loss_terms=loss.loss_terms * weights)
