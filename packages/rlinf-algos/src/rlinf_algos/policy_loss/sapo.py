"""SAPO (arXiv:2511.20347): a soft gate instead of the clip, whose slope falls smoothly as the ratio leaves 1.

`loss = -A (4 / tau) sigmoid(tau (r - 1))`, with one tau for positive advantages and another for all others. At r = 1
this is the policy gradient; a larger tau closes the gate sooner. Negative advantages have the larger tau, since they
raise many unsampled tokens at once.
"""

import torch
from torch import Tensor

from rlinf_algos.errors import AlgosError
from rlinf_algos.policy_loss.base import PolicyLoss, check_inputs, checked_ratio, measured_loss


def sapo_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> PolicyLoss:
    """The softly gated surrogate loss, unreduced; the paper aggregates it by `sequence_mean_token_mean`.

    Args:
        policy_logprobs, proximal_logprobs, advantages, loss_mask: as for `ppo_clip_loss`.
        tau_positive, tau_negative: above 0; the gate's temperature if the advantage is above 0, and otherwise.

    Returns and raises: as `ppo_clip_loss`; clip_fraction is 0. AlgosError: a temperature not above 0.
    """
    for name, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if not 0.0 < tau < float("inf"):
            raise AlgosError(f"{name}={tau} must be above 0 and finite: it is the steepness of a gate")
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    ratio = checked_ratio(inputs.log_ratio)
    tau = torch.full_like(ratio, tau_negative).masked_fill(inputs.advantages > 0, tau_positive)
    gated = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return measured_loss(-inputs.advantages * gated, inputs)
