"""DPPO (arXiv:2602.04879): a trust region on the divergence of a token's probability instead of a clip of its ratio.

A ratio of 100 moves almost no probability mass if the token has probability 1e-5; a ratio of 0.8 moves a fifth of the
mass if it has 0.99. Let p and q be the token's probability by the proximal policy and by the policy. The divergence of
the two-point distributions (this token, any other) is

    TV   |q - p|
    KL   p log(p / q) + (1 - p) log((1 - p) / (1 - q))

A token that moves in the direction of its advantage and whose divergence exceeds the threshold has no gradient. The
others have the gradient of `-min(r, ratio_cap) A log q` with the ratio as a constant. The paper measures the divergence
from the policy that sampled (`proximal_policy: rollout`).

As in verl (`dppo_tv`, `dppo_kl`) the thresholds are those of a clip: clip_high where the advantage is positive,
clip_low elsewhere.
"""

import torch
from torch import Tensor

from rlinf_algos.errors import AlgosError
from rlinf_algos.policy_loss.base import (
    CheckedInputs,
    PolicyLoss,
    check_clip,
    check_inputs,
    checked_ratio,
    measured_loss,
)

_TINY = 1e-8
"""Lower bound of a probability, as in verl: keeps its logarithm finite if it rounds to 0."""


def dppo_tv_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    clip_low: float = 0.15,
    clip_high: float = 0.15,
    ratio_cap: float = 20.0,
) -> PolicyLoss:
    """The policy gradient of the tokens inside a trust region of total variation, unreduced.

    Args:
        policy_logprobs, proximal_logprobs, advantages, loss_mask: as for `ppo_clip_loss`.
        clip_low: the largest decrease of a probability if the advantage is not positive; in [0, 1].
        clip_high: the largest increase of a probability if the advantage is positive; at least 0.
        ratio_cap: the largest weight of a token, at least 1.

    Returns and raises: as `ppo_clip_loss`; clip_fraction is the share of tokens outside the region. AlgosError:
        ratio_cap.
    """
    inputs = _checked(policy_logprobs, proximal_logprobs, advantages, loss_mask, clip_low, clip_high, ratio_cap)
    with torch.no_grad():
        policy, proximal = _probabilities(inputs)
        is_outside = torch.where(inputs.advantages > 0, policy - proximal > clip_high, policy - proximal < -clip_low)
    return _loss(inputs, is_outside, ratio_cap)


def dppo_kl_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    ratio_cap: float = 20.0,
) -> PolicyLoss:
    """The policy gradient of the tokens inside a trust region of the KL, unreduced.

    Args:
        policy_logprobs, proximal_logprobs, advantages, loss_mask, ratio_cap: as for `dppo_tv_loss`.
        clip_low: the largest KL of a token that became less likely and whose advantage is not positive, nats.
        clip_high: the largest KL of a token that became likelier and whose advantage is positive, nats.

    Returns and raises: as `dppo_tv_loss`.
    """
    inputs = _checked(policy_logprobs, proximal_logprobs, advantages, loss_mask, clip_low, clip_high, ratio_cap)
    with torch.no_grad():
        policy, proximal = _probabilities(inputs)
        others = ((1.0 - proximal + _TINY) / (1.0 - policy + _TINY)).log()
        divergence = -proximal * inputs.log_ratio + (1.0 - proximal) * others
        is_outside = torch.where(
            inputs.advantages > 0,
            (divergence > clip_high) & (policy > proximal),
            (divergence > clip_low) & (policy < proximal),
        )
    return _loss(inputs, is_outside, ratio_cap)


def _checked(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> CheckedInputs:
    check_clip(clip_low, clip_high)
    if not ratio_cap >= 1.0:
        raise AlgosError(f"ratio_cap={ratio_cap} must be at least 1: on-policy ratios are 1")
    return check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)


def _probabilities(inputs: CheckedInputs) -> tuple[Tensor, Tensor]:
    """Probabilities by the policy and by the proximal policy; 1 outside the mask."""
    policy = inputs.policy_logprobs.detach()
    return policy.exp(), (policy - inputs.log_ratio.detach()).exp()


def _loss(inputs: CheckedInputs, is_outside: Tensor, ratio_cap: float) -> PolicyLoss:
    ratio = checked_ratio(inputs.log_ratio.detach())
    is_outside = is_outside & inputs.mask
    weights = ratio.clamp(max=ratio_cap).masked_fill(is_outside, 0.0)
    terms = -(weights * inputs.advantages) * inputs.policy_logprobs
    return measured_loss(terms, inputs, is_clipped=is_outside)
