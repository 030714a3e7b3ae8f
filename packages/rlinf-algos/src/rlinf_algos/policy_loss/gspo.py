"""GSPO (arXiv:2507.18071): one clipped ratio per sequence, the geometric mean of the ratios of its tokens (eq. 7).

The form is that of GSPO-token (eq. 13 and 14): the ratio of token t is `s * policy / sg(policy)`, where s is the ratio
of its sequence as a constant. Its value is s and its gradient passes through each token, so that advantages may differ
within a sequence. With one advantage per sequence and `sequence_mean_token_mean`, value and gradient are those of GSPO
(eq. 5).

verl bounds the exponent by 10; here an overflow raises.
"""

import torch
from torch import Tensor

from rlinf_algos.aggregation import sequence_means
from rlinf_algos.policy_loss.base import PolicyLoss, check_clip, check_inputs, checked_ratio, clipped_surrogate


def gspo_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """The sequence-level clipped surrogate loss, unreduced.

    Args:
        policy_logprobs: [B, T], nats, of the policy in training, with gradient; a row is a whole sequence.
        proximal_logprobs: [B, T], by the policy before the update; a constant.
        advantages: [B, T], or [B]; a constant.
        loss_mask: [B, T], bool or 0/1; None: every element.
        clip_low, clip_high: as for `ppo_clip_loss`, but for a mean over tokens, hence small; defaults from the paper
            (5.1).
        dual_clip: None, or more than 1; not in the paper.

    Returns and raises: as `ppo_clip_loss`; clip_fraction is the share of clipped sequences, weighted by their numbers
        of tokens; approx_kl is per token.
    """
    check_clip(clip_low, clip_high, dual_clip)
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    means = sequence_means(inputs.log_ratio.detach(), inputs.mask)
    mean_log_ratio = torch.where(inputs.mask, means[:, None], 0.0)
    through_token = (inputs.log_ratio - inputs.log_ratio.detach()).exp()  # exactly 1
    ratio = checked_ratio(mean_log_ratio) * through_token
    return clipped_surrogate(inputs, ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
