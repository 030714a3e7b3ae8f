"""The plain policy gradient, REINFORCE (Williams, 1992): `loss = -A policy_logprobs`.

Right for one optimizer step on samples of the current policy, where PPO's gradient is the same. The proximal
log-probabilities only measure how far that still holds.
"""

from torch import Tensor

from rlinf_algos.policy_loss.base import PolicyLoss, check_inputs, checked_ratio, measured_loss


def policy_gradient_loss(
    policy_logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor | None
) -> PolicyLoss:
    """The loss whose gradient is the policy gradient, unreduced. Its value means nothing.

    Args:
        policy_logprobs, proximal_logprobs, advantages, loss_mask: as for `ppo_clip_loss`. The proximal ones do not
            touch the terms.

    Returns and raises: as `ppo_clip_loss`; clip_fraction is 0.
    """
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    checked_ratio(inputs.log_ratio.detach())
    terms = -inputs.advantages * inputs.policy_logprobs
    return measured_loss(terms, inputs)
