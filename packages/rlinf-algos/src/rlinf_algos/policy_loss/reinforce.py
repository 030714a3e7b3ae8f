"""The plain policy gradient, REINFORCE (Williams, 1992): `loss = -A policy_logprobs`.

Correct for one optimizer step on samples of the current policy, where PPO has the same gradient. The proximal
log-probabilities are used only for `approx_kl`, which measures how far off-policy the samples are.
"""

from torch import Tensor

from rlinf_algos.policy_loss.base import PolicyLoss, check_inputs, checked_ratio, measured_loss


def policy_gradient_loss(
    policy_logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor | None
) -> PolicyLoss:
    """The loss whose gradient is the policy gradient, unreduced. Its value has no meaning.

    Args:
        policy_logprobs, proximal_logprobs, advantages, loss_mask: as for `ppo_clip_loss`. proximal_logprobs do not
            affect the terms.

    Returns and raises: as `ppo_clip_loss`; clip_fraction is 0.
    """
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    checked_ratio(inputs.log_ratio.detach())
    terms = -inputs.advantages * inputs.policy_logprobs
    return measured_loss(terms, inputs)
