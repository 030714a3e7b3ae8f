"""PPO's clip applied to the ratio of a whole completion: the objective of RLOO over several optimizer steps.

`loss = -min(R A, clip(R, 1 - clip_low, 1 + clip_high) A)` with `R = exp(sum over its tokens of the log-ratio)`, the
probability ratio of the completion (arXiv:2402.14740, section 3, treats a completion as one action). TRL's
`RLOOTrainer` has this loss. GSPO uses the geometric mean of the tokens' ratios; this loss uses their product, which
leaves the clip range sooner the longer the completion is. Every token carries its completion's term, so that
`sequence_mean_token_mean` gives the mean over completions.
"""

import torch
from torch import Tensor

from rlinf_algos.aggregation import check_rows
from rlinf_algos.policy_loss.base import PolicyLoss, check_clip, check_inputs, checked_ratio, clipped_surrogate


def sequence_clip_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """The clipped surrogate loss of whole completions, unreduced.

    Args:
        policy_logprobs, proximal_logprobs, loss_mask: as for `gspo_loss`.
        advantages: [B, T], or [B]. If they differ within a sequence, each token's term combines the ratio of the
            sequence with its own advantage.
        clip_low, clip_high: as for `ppo_clip_loss`, but for a product over tokens.

    Returns and raises: as `gspo_loss`.
    """
    check_clip(clip_low, clip_high)
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    check_rows(inputs.mask)
    ratio = torch.where(inputs.mask, checked_ratio(inputs.log_ratio.sum(dim=1))[:, None], 1.0)
    return clipped_surrogate(inputs, ratio, clip_low=clip_low, clip_high=clip_high)
