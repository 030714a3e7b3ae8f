"""KL(policy || ref): estimates from samples of the policy, one for each token (J. Schulman, "Approximating KL
divergence", 2020, joschu.net/blog/kl-approx.html), and the KL as part of the reward.

With `d = policy_logprobs - ref_logprobs`:
    k1 = d                 unbiased, may be negative, noisy; for rewards (as a loss, its gradient averages to 0)
    k2 = d^2 / 2           biased, low variance; its gradient is that of the KL
    k3 = exp(-d) - 1 + d   unbiased, never negative, low variance; GRPO's term in the loss (arXiv:2402.03300, eq. 4)
    abs = |d|              biased, never negative; a bound on how far a token may go
    k1+, k3+               the value of k1 or k3 with the gradient of k2: both unbiased (verl's names)

Departs from verl, which always clamps k3 to 10 and its exponent to 20: here that is an option, and without it an
overflow raises.
"""

import math

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, at_least_float32, check_finite, check_range, check_shape, masked
from rlinf_algos.errors import AlgosError, ShapeError


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


def kl_k3(
    policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None, *, clamp: float | None = None
) -> Tensor:
    """`exp(-d) - 1 + d`; arguments, result and errors as for `kl_k1`, and NonFiniteError where it overflows.

    Args:
        clamp: above 0, the largest value of an element, which has no gradient there; None: no bound. A token that the
            reference finds e^50 times likelier than the policy owns a whole step without it; verl's is 10.
    """
    d = _log_ratio(policy_logprobs, ref_logprobs, mask)
    if clamp is not None:
        if not 0.0 < clamp < float("inf"):
            raise AlgosError(f"clamp={clamp} must be above 0 and finite, or None for no bound")
        # At -d = log(2 clamp + 4) k3 is beyond the clamp already; further out the exponential could overflow.
        log_ratio = (-d).clamp(max=math.log(2.0 * clamp + 4.0))
        return (torch.expm1(log_ratio) - log_ratio).clamp(max=clamp)
    k3 = torch.expm1(-d) + d  # expm1: near d = 0 the 1 would swallow the digits
    check_finite("exp(ref_logprobs - policy_logprobs)", k3)
    return k3


def kl_abs(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """`|policy_logprobs - ref_logprobs|`; arguments, result and errors as for `kl_k1`."""
    return _log_ratio(policy_logprobs, ref_logprobs, mask).abs()


def kl_k1_plus(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """The value of `kl_k1`, the gradient of `kl_k2`; arguments, result and errors as for `kl_k1`."""
    return _with_gradient_of(
        kl_k2(policy_logprobs, ref_logprobs, mask), kl_k1(policy_logprobs.detach(), ref_logprobs.detach(), mask)
    )


def kl_k3_plus(
    policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None, *, clamp: float | None = None
) -> Tensor:
    """The value of `kl_k3`, the gradient of `kl_k2`; arguments, result and errors as for `kl_k3`. The clamp bounds the
    value alone."""
    values = kl_k3(policy_logprobs.detach(), ref_logprobs.detach(), mask, clamp=clamp)
    return _with_gradient_of(kl_k2(policy_logprobs, ref_logprobs, mask), values)


def ratio_weighted_kl(
    kl: Tensor, policy_logprobs: Tensor, proximal_logprobs: Tensor, mask: Tensor | None = None
) -> Tensor:
    """`exp(policy_logprobs - proximal_logprobs) * kl`: the estimate for samples of another policy, with the ratio's
    gradient (DeepSeek-V3.2, arXiv:2512.02556, eq. 7; TRL's `use_bias_correction_kl`).

    Value and gradient of k3 are then unbiased. On-policy too: k3 alone has the gradient of the KL the other way round,
    with the ratio that of KL(policy || ref).

    Args:
        kl: any shape, an estimate of each token with its gradient.
        policy_logprobs, proximal_logprobs: the same shape, nats; the second is a constant.
        mask: the same shape, bool or 0/1; None: every element.

    Returns and raises: as `kl_k3`.
    """
    check_shape("kl", kl, policy_logprobs.shape, "policy_logprobs")
    ratio = _log_ratio(policy_logprobs, proximal_logprobs.detach(), mask).exp()
    check_finite("exp(policy_logprobs - proximal_logprobs)", ratio)
    return ratio * masked("kl", kl, as_mask("mask", mask, "kl", kl))


@torch.no_grad()
def mixed_reference(reference: Tensor, policy: Tensor, weight: float) -> Tensor:
    """`(1 - weight) * reference + weight * policy`: a tensor of a reference that follows the policy (TR-DPO,
    arXiv:2404.09656, eq. 4 and 5; TRL's `sync_ref_model` with `ref_model_mixup_alpha`).

    Args:
        reference: any shape.
        policy: the same shape.
        weight: in [0, 1]; 1 makes the policy the reference.

    Returns:
        the dtype of reference, computed in at least float32.

    Raises: ShapeError. AlgosError: weight.
    """
    check_range("weight", weight, low=0.0, high=1.0, why="it is the policy's share")
    check_shape("policy", policy, reference.shape, "reference")
    old, new = at_least_float32(reference), at_least_float32(policy)
    return (old + weight * (new.to(old.device, old.dtype) - old)).to(reference.dtype)


@torch.no_grad()
def rewards_at_last_token(scores: Tensor, loss_mask: Tensor) -> Tensor:
    """The score of each completion at its last token inside the mask, 0 elsewhere.

    Args:
        scores: [B].
        loss_mask: [B, T], bool or 0/1. A completion without a token has nowhere to put its score: a row of 0.

    Returns:
        [B, T], at least float32.

    Raises:
        ShapeError. NonFiniteError: the score of a completion with tokens.
    """
    if loss_mask.ndim != 2:
        raise ShapeError(f"loss_mask has shape {list(loss_mask.shape)}; expected [B, T]")
    check_shape("scores", scores, loss_mask.shape[:1], "loss_mask[:, 0]")
    mask = as_mask("loss_mask", loss_mask, "loss_mask", loss_mask)
    is_last = mask & (mask.flip(1).cumsum(dim=1).flip(1) == 1)
    return masked("scores", scores, mask.any(dim=1))[:, None] * is_last


def adapted_kl_coef(kl_coef: float, measured_kl: float, *, target_kl: float, num_samples: int, horizon: int) -> float:
    """The next coefficient of a controller that steers the KL to a target (arXiv:1909.08593, section 2.2).

    `kl_coef * (1 + clip(measured_kl / target_kl - 1, -0.2, 0.2) * num_samples / horizon)`. A fixed controller is to not
    call this. The coefficient is the only state: keep it in the checkpoint.

    Args:
        kl_coef: the present one, above 0.
        measured_kl: mean over the step, nats, in the unit of the target: a completion's in the paper.
        target_kl: above 0.
        num_samples: completions of the step.
        horizon: completions in which the coefficient may change by a fifth; at least num_samples, else it could turn
            over at once.

    Raises: AlgosError: a number out of range, NaN included.
    """
    check_range("measured_kl", measured_kl, low=-float("inf"), high=1e30, why="a controller needs a number")
    check_range("num_samples", num_samples, low=0, why="it counts completions")
    check_range("horizon", horizon, low=max(1, num_samples), why="one step must not change the coefficient by more")
    for name, value in (("kl_coef", kl_coef), ("target_kl", target_kl)):
        if not 0.0 < value < float("inf"):
            raise AlgosError(f"{name}={value} must be above 0 and finite: the coefficient changes by a factor")
    error = min(0.2, max(-0.2, measured_kl / target_kl - 1.0))
    return kl_coef * (1.0 + error * num_samples / horizon)


def _log_ratio(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    check_shape("ref_logprobs", ref_logprobs, policy_logprobs.shape, "policy_logprobs")
    inside = as_mask("mask", mask, "policy_logprobs", policy_logprobs)
    return masked("policy_logprobs", policy_logprobs, inside) - masked("ref_logprobs", ref_logprobs, inside)


def _with_gradient_of(differentiable: Tensor, values: Tensor) -> Tensor:
    """The straight-through form: exactly `values` forward, the first one's gradient backward."""
    return values + (differentiable - differentiable.detach())
