"""A custom policy loss in one file: a tanh bends the ratio into its range, where PPO clips it.

cd docs/examples
rlinf train sort-grpo --algorithm.num_minibatches 2 --algorithm.policy_loss custom_loss:soft_clip
"""

from torch import Tensor

from rlinf_algos import PolicyLoss, check_inputs, measured_loss, register_policy_loss


@register_policy_loss("soft_clip")
def soft_clip(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    width: float = 0.2,
) -> PolicyLoss:
    """`-A (1 + width tanh((r - 1) / width))` of each token; at r = 1 the gradient is that of the policy gradient."""
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    ratio = inputs.log_ratio.exp()
    bent = 1.0 + width * ((ratio - 1.0) / width).tanh()
    return measured_loss(-inputs.advantages * bent, inputs, is_clipped=(ratio - bent).abs() > width)
