"""Clip-Cov and KL-Cov (arXiv:2505.22617): the few tokens that make the entropy collapse are held back.

A step changes the entropy by the covariance of log-probability and advantage: tokens that are likely already and are
rewarded sharpen the policy most. With `cov = (A - mean A) (policy_logprobs - mean policy_logprobs)` of each token,

    Clip-Cov   some tokens with a covariance within bounds get no gradient
    KL-Cov     the tokens of the largest covariance are penalised for leaving the proximal policy

Means and shares are over the call's tokens, a micro-batch for the actor, as in verl. Departs from it in the choice of
Clip-Cov's tokens: it is random in the paper, and here drawn by a generator whose seed is the number of candidates, so
that the same tokens give the same loss on any device and under any plan.
"""

import torch
from torch import Tensor

from rlinf_algos.checks import check_range
from rlinf_algos.errors import AlgosError
from rlinf_algos.policy_loss.base import (
    CheckedInputs,
    PolicyLoss,
    check_clip,
    check_inputs,
    checked_ratio,
    clipped_surrogate,
    measured_loss,
)


def clip_cov_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> PolicyLoss:
    """PPO's clipped surrogate loss without the chosen tokens, unreduced.

    Args:
        policy_logprobs, proximal_logprobs, advantages, loss_mask, clip_low, clip_high: as for `ppo_clip_loss`.
        cov_fraction: above 0, at most 1: the share of the tokens to choose, rounded down, at least one of them.
        cov_low, cov_high: the covariance of a candidate lies between them; verl's bounds. One that PPO clips is none.

    Returns and raises: as `ppo_clip_loss`; clip_fraction counts the chosen tokens too. AlgosError: the share, or bounds
        in the wrong order.
    """
    check_clip(clip_low, clip_high)
    _check_fraction(cov_fraction)
    if not cov_low < cov_high:
        raise AlgosError(f"cov_low={cov_low} must be below cov_high={cov_high}: candidates lie between them")
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    ratio = checked_ratio(inputs.log_ratio)
    loss = clipped_surrogate(inputs, ratio, clip_low=clip_low, clip_high=clip_high)
    with torch.no_grad():
        is_clipped = loss.loss_terms > -inputs.advantages * ratio
        covariances = _covariances(inputs)
        candidates = inputs.mask & ~is_clipped & (covariances > cov_low) & (covariances < cov_high)
        chosen = _drawn(candidates, _num_chosen(inputs, cov_fraction))
    return measured_loss(loss.loss_terms.masked_fill(chosen, 0.0), inputs, ratio, is_clipped=is_clipped | chosen)


def kl_cov_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    cov_fraction: float = 2e-4,
    cov_kl_coef: float = 1.0,
) -> PolicyLoss:
    """`-r A`, and `cov_kl_coef * |log r|` more for the chosen tokens, unreduced. On-policy the penalty has no gradient:
    it needs several optimizer steps on a batch.

    Args:
        policy_logprobs, proximal_logprobs, advantages, loss_mask: as for `ppo_clip_loss`.
        cov_fraction: above 0, at most 1: the share of the tokens to choose, rounded down, at least one of them.
        cov_kl_coef: weight of the penalty, at least 0; verl: `ppo_kl_coef`.

    Returns and raises: as `ppo_clip_loss`; clip_fraction is the share of the chosen tokens. AlgosError: the share or
        the weight.
    """
    _check_fraction(cov_fraction)
    check_range("cov_kl_coef", cov_kl_coef, low=0.0, why="a reward for leaving the proximal policy is no penalty")
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    ratio = checked_ratio(inputs.log_ratio)
    with torch.no_grad():
        ranked = _covariances(inputs).masked_fill(~inputs.mask, -float("inf")).flatten()
        chosen = torch.zeros_like(inputs.mask).flatten()
        if inputs.mask.any():
            chosen[ranked.topk(_num_chosen(inputs, cov_fraction)).indices] = True
        chosen = chosen.view(inputs.mask.shape)
    penalty = cov_kl_coef * inputs.log_ratio.abs().masked_fill(~chosen, 0.0)
    return measured_loss(-inputs.advantages * ratio + penalty, inputs, ratio, is_clipped=chosen)


def _check_fraction(cov_fraction: float) -> None:
    if not 0.0 < cov_fraction <= 1.0:
        raise AlgosError(f"cov_fraction={cov_fraction} must be above 0 and at most 1: it is a share of the tokens")


def _num_chosen(inputs: CheckedInputs, fraction: float) -> int:
    return max(1, int(fraction * int(inputs.mask.sum())))


@torch.no_grad()
def _covariances(inputs: CheckedInputs) -> Tensor:
    """Each token's part of the covariance; arbitrary outside the mask."""
    count = inputs.mask.sum().clamp(min=1)
    logprobs = inputs.policy_logprobs.detach()  # 0 outside the mask, as the advantages are
    return (inputs.advantages - inputs.advantages.sum() / count) * (logprobs - logprobs.sum() / count)


def _drawn(candidates: Tensor, num_wanted: int) -> Tensor:
    """Bool, the same shape: at most so many of the candidates."""
    places = candidates.flatten().nonzero()[:, 0]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(len(places)))[:num_wanted]
    chosen = torch.zeros(candidates.numel(), dtype=torch.bool, device=candidates.device)
    chosen[places[order.to(places.device)]] = True
    return chosen.view(candidates.shape)
