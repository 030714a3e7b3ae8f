"""Estimates of KL(policy || ref) from samples of the policy, one for each token (J. Schulman, "Approximating KL
divergence", 2020, joschu.net/blog/kl-approx.html).

With `d = policy_logprobs - ref_logprobs`:
    k1 = d                 unbiased, may be negative, noisy; for rewards (as a loss, its gradient averages to 0)
    k2 = d^2 / 2           biased, low variance; its gradient is that of the KL
    k3 = exp(-d) - 1 + d   unbiased, never negative, low variance; GRPO's term in the loss (arXiv:2402.03300, eq. 4)

Departs from verl, which clamps k3 to [-10, 10] and its exponent to [-20, 20]: here an overflow raises.
"""

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, check_finite, check_shape, masked


def kl_k1(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """`policy_logprobs - ref_logprobs`.

    Args:
        policy_logprobs: any shape, nats; may carry gradient.
        ref_logprobs: the same shape; may carry gradient.
        mask: the same shape, bool or 0/1; None: every element.

    Returns:
        nats, the same shape, at least float32, 0 outside the mask.

    Raises:
        ShapeError: shapes differ. NonFiniteError: NaN or infinity inside the mask.
    """
    return _log_ratio(policy_logprobs, ref_logprobs, mask)


def kl_k2(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Half the squared log-ratio; arguments, result and errors as for `kl_k1`."""
    return 0.5 * _log_ratio(policy_logprobs, ref_logprobs, mask).square()


def kl_k3(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """`exp(-d) - 1 + d`; arguments, result and errors as for `kl_k1`, and NonFiniteError where it overflows."""
    d = _log_ratio(policy_logprobs, ref_logprobs, mask)
    k3 = torch.expm1(-d) + d  # expm1: near d = 0 the 1 would swallow the digits
    check_finite("exp(ref_logprobs - policy_logprobs)", k3)
    return k3


def _log_ratio(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    check_shape("ref_logprobs", ref_logprobs, policy_logprobs.shape, "policy_logprobs")
    inside = as_mask("mask", mask, "policy_logprobs", policy_logprobs)
    return masked("policy_logprobs", policy_logprobs, inside) - masked("ref_logprobs", ref_logprobs, inside)
