"""Clip-Cov and KL-Cov (arXiv:2505.22617): restrain the few tokens that make the entropy collapse.

A step changes the entropy by the covariance of log-probability and advantage: rewarded tokens that are already likely
sharpen the policy most. With `cov = (A - mean A) (policy_logprobs - mean policy_logprobs)` of each token,

    Clip-Cov   some tokens with a covariance within bounds get no gradient
    KL-Cov     the tokens of the largest covariance are penalised for leaving the proximal policy

Means and shares are those of the whole batch of an optimizer step: `clip_cov_choice` and `kl_cov_choice` choose over
all of its micro-batches, shards and ranks, and the losses take that choice as `chosen`. Without it they choose among
their own tokens, as verl does in each micro-batch. The draw of Clip-Cov is random in the paper; here it is a function
of each token's ids, so that it is the same under any plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
from rlinf_algos.selection import SumOverParts, choose_largest, sequence_hash

ROUNDING_NATS = 1e-5
"""Above the rounding error of float32 log-probabilities of the same weights, which is up to 1e-6 if sums are computed
in a different order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTokens:
    """The tokens inside the mask of one part of a batch."""

    policy_logprobs: Tensor
    """[n], nats, of the policy in training."""
    proximal_logprobs: Tensor
    """[n], nats"""
    advantages: Tensor
    """[n]"""
    priorities: Tensor
    """[n] integers between 0 and 2^32 - 1 (`selection.sequence_hash`): a draw takes the tokens with the largest."""


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
    chosen: Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate loss without the chosen tokens, unreduced.

    Args:
        policy_logprobs, proximal_logprobs, advantages, loss_mask, clip_low, clip_high: as for `ppo_clip_loss`.
        cov_fraction, cov_low, cov_high: as for `clip_cov_choice`; not used if `chosen` is given.
        chosen: the shape of policy_logprobs, bool: what `clip_cov_choice` chose over the batch; None: choose among
            these tokens.

    Returns and raises: as `ppo_clip_loss`; clip_fraction counts the chosen tokens too. AlgosError: as
        `clip_cov_choice`.
    """
    check_clip(clip_low, clip_high)
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    ratio = checked_ratio(inputs.log_ratio)
    loss = clipped_surrogate(inputs, ratio, clip_low=clip_low, clip_high=clip_high)
    if chosen is None:
        options = {"cov_fraction": cov_fraction, "cov_low": cov_low, "cov_high": cov_high}
        (choice,) = clip_cov_choice([_tokens(inputs)], _alone, clip_low=clip_low, clip_high=clip_high, **options)
        chosen = torch.zeros_like(inputs.mask).masked_scatter(inputs.mask, choice)
    chosen = chosen & inputs.mask
    is_clipped = loss.loss_terms > -inputs.advantages * ratio
    return measured_loss(loss.loss_terms.masked_fill(chosen, 0.0), inputs, is_clipped=is_clipped | chosen)


def kl_cov_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    cov_fraction: float = 2e-4,
    cov_kl_coef: float = 1.0,
    chosen: Tensor | None = None,
) -> PolicyLoss:
    """`-r A`, plus `cov_kl_coef * |log r|` for the chosen tokens, unreduced. On-policy the penalty has no gradient:
    it takes effect only with several optimizer steps per batch. Below `ROUNDING_NATS` it is 0, since otherwise the sign
    of a rounding error between two forward passes would become a gradient.

    Args:
        policy_logprobs, proximal_logprobs, advantages, loss_mask: as for `ppo_clip_loss`.
        cov_fraction: as for `kl_cov_choice`; not used if `chosen` is given.
        cov_kl_coef: weight of the penalty, at least 0; verl: `ppo_kl_coef`.
        chosen: as for `clip_cov_loss`, by `kl_cov_choice`.

    Returns and raises: as `ppo_clip_loss`; clip_fraction is the share of the chosen tokens. AlgosError: the share or
        the weight.
    """
    check_range("cov_kl_coef", cov_kl_coef, low=0.0, why="a reward for leaving the proximal policy is no penalty")
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    ratio = checked_ratio(inputs.log_ratio)
    if chosen is None:
        (choice,) = kl_cov_choice([_tokens(inputs)], _alone, cov_fraction=cov_fraction)
        chosen = torch.zeros_like(inputs.mask).masked_scatter(inputs.mask, choice)
    chosen = chosen & inputs.mask
    distance = inputs.log_ratio.abs()
    penalty = cov_kl_coef * distance.masked_fill(~chosen | (distance < ROUNDING_NATS), 0.0)
    return measured_loss(-inputs.advantages * ratio + penalty, inputs, is_clipped=chosen)


@torch.no_grad()
def clip_cov_choice(
    parts: Sequence[BatchTokens],
    sum_over_parts: SumOverParts,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> list[Tensor]:
    """The tokens of a batch whose gradient Clip-Cov drops, drawn from those with a covariance within bounds.

    Args:
        parts: this rank's parts of the batch.
        sum_over_parts: as for `rlinf_algos.selection.choose_largest`.
        clip_low, clip_high: as for `ppo_clip_loss`; a token that PPO clips is not a candidate.
        cov_fraction: above 0, at most 1: the share of the batch's tokens, rounded down, at least one of them.
        cov_low, cov_high: the covariance of a candidate lies between them; verl's bounds.

    Returns:
        bool, [n] for each part.

    Raises: AlgosError: the share, or bounds in the wrong order.
    """
    if not cov_low < cov_high:
        raise AlgosError(f"cov_low={cov_low} must be below cov_high={cov_high}: candidates lie between them")
    num_chosen, covariances = _covariances(parts, sum_over_parts, cov_fraction)
    candidates = []
    for part, covariance in zip(parts, covariances, strict=True):
        ratio = (part.policy_logprobs - part.proximal_logprobs).double().exp()
        by_sign = torch.where(part.advantages > 0, ratio > 1.0 + clip_high, ratio < 1.0 - clip_low)
        is_clipped = by_sign & (part.advantages != 0)
        candidates.append(~is_clipped & (covariance > cov_low) & (covariance < cov_high))
    drawn = choose_largest(
        [part.priorities[mask] for part, mask in zip(parts, candidates, strict=True)], num_chosen, sum_over_parts
    )
    return [mask.masked_scatter(mask, one) for mask, one in zip(candidates, drawn, strict=True)]


@torch.no_grad()
def kl_cov_choice(
    parts: Sequence[BatchTokens], sum_over_parts: SumOverParts, *, cov_fraction: float = 2e-4
) -> list[Tensor]:
    """The tokens of a batch that KL-Cov penalises: those of the largest covariance.

    Args, returns: as `clip_cov_choice`. Raises: AlgosError: the share.
    """
    num_chosen, covariances = _covariances(parts, sum_over_parts, cov_fraction)
    return choose_largest(covariances, num_chosen, sum_over_parts)


def _covariances(
    parts: Sequence[BatchTokens], sum_over_parts: SumOverParts, fraction: float
) -> tuple[int, list[Tensor]]:
    """The number of tokens of the batch to choose, and each token's covariance term, [n] float64."""
    if not 0.0 < fraction <= 1.0:
        raise AlgosError(f"cov_fraction={fraction} must be above 0 and at most 1: it is a share of the tokens")
    pairs = [torch.stack([part.advantages.double(), part.policy_logprobs.double()]) for part in parts]
    sums = [torch.cat([pair.sum(1).cpu(), torch.tensor([float(pair.shape[1])]).double()]) for pair in pairs]
    *totals, count = sum_over_parts(torch.stack(sums)).tolist()
    of_advantages, of_logprobs = (total / max(count, 1.0) for total in totals)
    covariances = [(advantages - of_advantages) * (logprobs - of_logprobs) for advantages, logprobs in pairs]
    return (max(1, int(fraction * count)) if count else 0), covariances


def _tokens(inputs: CheckedInputs) -> BatchTokens:
    """All tokens of a call as one part; their positions are the ids of the draw."""
    mask, policy = inputs.mask, inputs.policy_logprobs.detach()
    return BatchTokens(
        policy_logprobs=policy[mask],
        proximal_logprobs=(policy - inputs.log_ratio.detach())[mask],
        advantages=inputs.advantages[mask],
        priorities=sequence_hash([torch.arange(int(mask.sum()), device=mask.device)]),
    )


def _alone(rows: Tensor) -> Tensor:
    return rows.sum(0)
