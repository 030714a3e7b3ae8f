"""GMPO (arXiv:2507.20673): the geometric mean of the ratios of a completion's tokens, each clipped separately.

    loss = -A exp(mean over t of c_t),   c_t = min(log r_t, clip(log r_t)) where A > 0, max(...) where A < 0

The log-ratio is clipped to [-clip_low, clip_high]; the paper's 0.4 lets a ratio range from 0.67 to 1.49. GSPO clips
the mean, GMPO clips an outlier token before it enters the mean. Every token of a completion gets the completion's term,
so that `sequence_mean_token_mean` gives value and gradient of the paper's objective.
"""

import torch
from torch import Tensor

from rlinf_algos.aggregation import sequence_means
from rlinf_algos.policy_loss.base import PolicyLoss, check_clip, check_inputs, checked_ratio, measured_loss


def gmpo_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> PolicyLoss:
    """The loss of geometric means, unreduced.

    Args:
        policy_logprobs, proximal_logprobs, loss_mask: as for `gspo_loss`.
        advantages: [B, T], or [B]. If they differ within a sequence, the sequence is weighted by their mean,
            and the clip of each token follows the sign of its own advantage.
        clip_low: the log-ratio is clipped below at -clip_low if the advantage is negative; in [0, 1].
        clip_high: the log-ratio is clipped above at clip_high if the advantage is positive; at least 0.

    Returns and raises: as `ppo_clip_loss`; clip_fraction is the share of clipped tokens.
    """
    check_clip(clip_low, clip_high)
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    too_high = (inputs.log_ratio > clip_high) & (inputs.advantages > 0)
    too_low = (inputs.log_ratio < -clip_low) & (inputs.advantages < 0)
    clipped = inputs.log_ratio.masked_fill(too_high, clip_high).masked_fill(too_low, -clip_low)
    clipped = clipped.masked_fill(inputs.advantages == 0, 0.0)
    ratio = checked_ratio(sequence_means(clipped, inputs.mask))[:, None]
    weight = sequence_means(inputs.advantages, inputs.mask)[:, None]
    terms = torch.where(inputs.mask, -weight * ratio, 0.0)
    return measured_loss(terms, inputs, is_clipped=too_high | too_low)
