"""The clipped policy loss of PPO (arXiv:1707.06347, eq. 7), with DAPO's asymmetric range and the dual clip.

`loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(policy_logprobs - proximal_logprobs)`, for each
token or action. clip_high > clip_low is "clip higher" of DAPO (arXiv:2503.14476). The dual clip
(arXiv:1912.09729) bounds the loss of a negative advantage by `-dual_clip * A`.

Unlike verl, this does not clamp the log-ratio to [-20, 20]: a ratio that overflows raises, since a token 10^38 times
likelier than before the update is a bug that clamping would hide.
"""

from torch import Tensor

from rlinf_algos.policy_loss.base import PolicyLoss, check_clip, check_inputs, checked_ratio, clipped_surrogate


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
        clip_high: the ratio is clipped above at 1 + clip_high; at least 0. DAPO: 0.28.
        dual_clip: None, or more than 1: bounds the loss where the advantage is negative. verl: 3.0.

    Returns:
        `PolicyLoss`; aggregate its loss_terms and minimise.

    Raises:
        ShapeError: shapes differ. NonFiniteError: NaN or infinity inside the mask, or a ratio that overflows.
        AlgosError: a clip range out of bounds.
    """
    check_clip(clip_low, clip_high, dual_clip)
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    ratio = checked_ratio(inputs.log_ratio)
    return clipped_surrogate(inputs, ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
