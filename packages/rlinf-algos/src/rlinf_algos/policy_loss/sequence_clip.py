"""PPO's clip of the ratio of a whole completion: the objective of RLOO over several optimizer steps.

`loss = -min(R A, clip(R, 1 - clip_low, 1 + clip_high) A)` with `R = exp(sum over its tokens of the log-ratio)`, the
probability ratio of the completion (arXiv:2402.14740, section 3, takes a completion for one action). TRL's
`RLOOTrainer` has this loss. GSPO takes the geometric mean of the tokens' ratios, this their product, which leaves the
range after fewer steps the longer the completion is. Every token carries its completion's term:
`sequence_mean_token_mean` gives the mean over completions.
"""

import torch
from torch import Tensor

from rlinf_algos.errors import ShapeError
from rlinf_algos.packing import index_sequences
from rlinf_algos.policy_loss.base import PolicyLoss, check_clip, check_inputs, checked_ratio, clipped_surrogate


def sequence_clip_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    sequence_ids: Tensor | None = None,
) -> PolicyLoss:
    """The clipped surrogate loss of whole completions, unreduced.

    Args:
        policy_logprobs, proximal_logprobs, loss_mask, sequence_ids: as for `gspo_loss`.
        advantages: [B, T], or [B] where a row is a sequence. Where they differ within a sequence, each token's term is
            that of the sequence's ratio and its own advantage.
        clip_low, clip_high: as for `ppo_clip_loss`, but of a product over tokens.

    Returns and raises: as `gspo_loss`.
    """
    check_clip(clip_low, clip_high)
    if sequence_ids is not None and advantages.ndim < 2:
        raise ShapeError(
            f"advantages has shape {list(advantages.shape)}, but a packed row holds several sequences; expected [B, T]"
        )
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    sequences = index_sequences(inputs.mask, sequence_ids)
    ratio = sequences.spread(checked_ratio(sequences.sum(inputs.log_ratio)))
    return clipped_surrogate(inputs, torch.where(inputs.mask, ratio, 1.0), clip_low=clip_low, clip_high=clip_high)
