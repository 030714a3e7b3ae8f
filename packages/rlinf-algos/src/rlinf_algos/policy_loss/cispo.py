"""CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): the clip bounds the weight of the gradient and never zeroes it.

`loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A policy_logprobs`, where sg stops the gradient. A token far from the
proximal policy keeps its gradient; PPO's clip would drop it.

The paper leaves out the lower bound and does not publish the upper one. Here too there is none by default, and the
upper one is 5, as ScaleRL (arXiv:2510.13786) has it. TRL's `epsilon_high` is the bound itself, `1 + clip_high`.
"""

from torch import Tensor

from rlinf_algos.policy_loss.base import PolicyLoss, check_clip, check_inputs, checked_ratio, measured_loss


def cispo_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> PolicyLoss:
    """A policy gradient weighted by the clipped ratio, unreduced; the paper aggregates it by `token_mean`.

    Args:
        policy_logprobs, proximal_logprobs, advantages, loss_mask: as for `ppo_clip_loss`.
        clip_low: the weight is at least 1 - clip_low; in [0, 1]. 1: no lower bound.
        clip_high: the weight is at most 1 + clip_high; at least 0.

    Returns and raises: as `ppo_clip_loss`; clip_fraction is the share of the weights that were clipped.
    """
    check_clip(clip_low, clip_high)
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    ratio = checked_ratio(inputs.log_ratio.detach())
    weights = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    terms = -(weights * inputs.advantages) * inputs.policy_logprobs
    return measured_loss(terms, inputs, is_clipped=weights != ratio)
