"""Corrections for the log-prob mismatch between the engine that sampled and the actor that trains.

An engine with other kernels, another precision or older weights samples from another distribution than the actor
computes. With `r = exp(proximal_logprobs - rollout_logprobs)`, actor over engine, a constant:

    truncated (TIS)   weights min(r, cap)                   F. Yao et al., "Your Efficient RL Framework Secretly Brings
                                                            You Off-Policy RL Training" (2025)
    masked (MIS)      weights r, or out where r is not in   J. Liu et al., "When Speed Kills Stability" (2025)
                      [low, high]
    IcePop            masked, per token, on both sides      arXiv:2510.18855
    rejection         out where a divergence exceeds a      verl's `rollout_rs`
                      limit, the rest with the weight 1

TIS and MIS work per token, per sequence (the product of its ratios: unbiased, with large variance) or on its geometric
mean (the exponential of the mean log-ratio: comparable between lengths). Multiply the weights into `loss_terms`.
Whether rejected tokens count in the divisor is the caller's choice: totals of `Correction.loss_mask` as in verl, or of
the original mask, as in IcePop. Both are consistent with the weights, which are 0 there.

Two corrections can be combined: reject completions, and truncate the weights of the remaining tokens (verl's
`rollout_rs` and `rollout_is`): each decides about whole completions, and the weights are multiplied.

Departs from verl: decisions are made on logarithms, so nothing needs a clamp to [-20, 20].
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlinf_algos.aggregation import check_rows, sequence_means
from rlinf_algos.checks import as_mask, check_finite, check_range, check_shape, masked
from rlinf_algos.errors import AlgosError
from rlinf_algos.normalization import masked_mean
from rlinf_algos.presets import REJECTIONS
from rlinf_algos.registry import did_you_mean

Level: TypeAlias = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Weights and masks for the loss (constants), and statistics to log.

    Fractions and means are over the tokens inside the mask that was given; over micro-batches, weigh by `num_terms`.
    """

    weights: Tensor
    """[B, T], at least float32, to multiply into loss_terms; 0 outside `loss_mask`."""
    loss_mask: Tensor
    """[B, T] bool: the mask given less what was rejected."""
    num_terms: Tensor
    """Scalar int64: tokens inside the mask given."""
    truncated_fraction: Tensor
    """Scalar: share of tokens whose weight was cut to the cap."""
    rejected_fraction: Tensor
    """Scalar: share of tokens taken out."""


def truncated_importance_sampling(
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor | None,
    *,
    level: Level = "token",
    cap: float = 2.0,
) -> Correction:
    """Weights `min(r, cap)`: no token is left out, none counts more than cap times.

    Args:
        proximal_logprobs: [B, T], nats, by the actor before the update.
        rollout_logprobs: [B, T], nats, by the engine that sampled.
        loss_mask: [B, T], bool or 0/1; None: every token.
        level: whose ratio: "token", "sequence" or "geometric".
        cap: largest weight, at least 1. verl's documentation has 2; TRL's `vllm_importance_sampling_cap` is 3.

    Raises:
        ShapeError: shapes differ. NonFiniteError: NaN or infinity inside the mask. AlgosError: cap, level.
    """
    check_range("cap", cap, low=1.0, why="on-policy weights are 1")
    ratios = _Ratios.of(proximal_logprobs, rollout_logprobs, loss_mask, level)
    is_cut = ratios.per_token > math.log(cap)
    weights = torch.where(is_cut, cap, ratios.per_token.clamp(max=math.log(cap)).exp())
    return ratios.correction(weights, torch.ones_like(is_cut), is_cut)


def masked_importance_sampling(
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor | None,
    *,
    level: Level = "token",
    low: float = 0.0,
    high: float = 2.0,
    weigh: bool = True,
) -> Correction:
    """Weights r where `low <= r <= high`; the rest is out of the mask.

    Args:
        proximal_logprobs, rollout_logprobs, loss_mask, level: as for `truncated_importance_sampling`.
        low: least ratio that is kept, in [0, 1]; 0 rejects nothing below.
        high: largest ratio that is kept, at least 1.
        weigh: False gives 1 in place of r to what stays: rejection alone (verl: `rollout_rs` without `rollout_is`).

    Raises: as `truncated_importance_sampling`.
    """
    check_range("low", low, low=0.0, high=1.0, why="ratios on-policy are 1, and must stay")
    check_range("high", high, low=1.0, why="ratios on-policy are 1, and must stay")
    ratios = _Ratios.of(proximal_logprobs, rollout_logprobs, loss_mask, level)
    logs = ratios.per_token
    stays = (logs <= math.log(high)) & (logs >= (math.log(low) if low > 0 else -float("inf")))
    weights = logs.masked_fill(~stays, 0.0).exp() if weigh else torch.ones_like(logs)
    return ratios.correction(weights, stays, torch.zeros_like(stays))


def icepop(
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor | None,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Correction:
    """`masked_importance_sampling` of tokens, on both sides (arXiv:2510.18855): where engine and actor disagree too
    much in either direction, as with an expert that was routed elsewhere, the token is left out.

    Args:
        proximal_logprobs, rollout_logprobs, loss_mask: as for `truncated_importance_sampling`.
        low, high: alpha and beta of the paper.
    """
    return masked_importance_sampling(proximal_logprobs, rollout_logprobs, loss_mask, low=low, high=high)


def reject_by_divergence(
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor | None,
    *,
    statistic: str,
    limit: float,
) -> Correction:
    """Weights 1 where a divergence between actor and engine is at most the limit; the rest is out of the mask.

    Args:
        proximal_logprobs, rollout_logprobs, loss_mask: as for `truncated_importance_sampling`.
        statistic: `token_k1`, `token_k2`, `token_k3` of each token; `sequence_sum_k1` ... `sequence_sum_k3` and
            `sequence_mean_k1` ... of the sum or the mean over a completion; `sequence_max_k2`, `sequence_max_k3` of its
            largest token (verl's `rollout_rs`, `token_k1`, `seq_sum_k1`, ...). With `l = log r`, k1 is l, of which the
            size counts, k2 is l^2 / 2 and k3 is exp(l) - 1 - l.
        limit: nats, above 0. verl's range of ratios `1/c ... c` for k1 is a limit of log c.

    Raises: as `truncated_importance_sampling`. AlgosError: statistic, limit.
    """
    reduced, _, estimate = statistic.rpartition("_")
    if statistic not in REJECTIONS:
        raise AlgosError(f"statistic={statistic!r} is not known; {did_you_mean(statistic, REJECTIONS)}")
    if not 0.0 < limit < float("inf"):
        raise AlgosError(f"limit={limit} must be above 0 and finite: it bounds a divergence in nats")
    ratios = _Ratios.of(proximal_logprobs, rollout_logprobs, loss_mask, "token")
    logs = ratios.tokens
    values = {"k1": logs, "k2": 0.5 * logs.square(), "k3": torch.expm1(logs) - logs}[estimate]
    if reduced == "sequence_max":
        stays = ~(values > limit).any(dim=1, keepdim=True).expand(values.shape)
    elif reduced == "token":
        stays = values.abs() <= limit
    else:
        divergences = values.sum(dim=1) if reduced == "sequence_sum" else sequence_means(values, ratios.mask)
        stays = _spread(divergences, ratios.mask).abs() <= limit
    return ratios.correction(torch.ones_like(logs), stays, torch.zeros_like(stays))


@torch.no_grad()
def off_policy_sequence_mask(
    policy_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None,
    *,
    threshold: float,
) -> Tensor:
    """The mask without tokens of negative advantage in sequences that have drifted from the policy that sampled them:
    those whose mean of `rollout_logprobs - policy_logprobs` exceeds the threshold (DeepSeek-V3.2, arXiv:2512.02556, eq.
    9). Pushing down tokens that are already unlikely teaches little and can destabilise training; sequences of positive
    advantage stay.

    Args:
        policy_logprobs: [B, T], nats, of the policy in training; a constant here.
        rollout_logprobs: [B, T], by the engine and version that sampled.
        advantages: [B], or [B, T].
        loss_mask: [B, T], bool or 0/1; None: every token.
        threshold: nats a token, at least 0.

    Returns:
        [B, T] bool. What is left out still counts in the divisor where the caller's totals are of `loss_mask`.

    Raises: ShapeError, NonFiniteError. AlgosError: a negative threshold.
    """
    check_range("threshold", threshold, low=0.0, why="an on-policy token, whose difference is 0, must be kept")
    check_shape("rollout_logprobs", rollout_logprobs, policy_logprobs.shape, "policy_logprobs")
    mask = as_mask("loss_mask", loss_mask, "policy_logprobs", policy_logprobs)
    if policy_logprobs.ndim == 2 and advantages.shape == policy_logprobs.shape[:1]:
        advantages = advantages.unsqueeze(-1).expand(policy_logprobs.shape)
    check_shape("advantages", advantages, policy_logprobs.shape, "policy_logprobs")
    drift = masked("rollout_logprobs", rollout_logprobs, mask) - masked("policy_logprobs", policy_logprobs, mask)
    has_drifted = _spread(sequence_means(drift, mask), mask) > threshold
    return mask & ~(has_drifted & (masked("advantages", advantages, mask) < 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ratios:
    """Log-ratios of actor over engine, as constants."""

    tokens: Tensor
    """[B, T], nats, of each token; 0 outside the mask."""
    per_token: Tensor
    """[B, T], nats, of the level's ratio at each token; 0 outside the mask."""
    mask: Tensor
    """[B, T] bool"""

    @staticmethod
    @torch.no_grad()
    def of(
        proximal_logprobs: Tensor,
        rollout_logprobs: Tensor,
        loss_mask: Tensor | None,
        level: Level,
    ) -> "_Ratios":
        check_shape("rollout_logprobs", rollout_logprobs, proximal_logprobs.shape, "proximal_logprobs")
        mask = as_mask("loss_mask", loss_mask, "proximal_logprobs", proximal_logprobs)
        tokens = masked("proximal_logprobs", proximal_logprobs, mask) - masked(
            "rollout_logprobs", rollout_logprobs, mask
        )
        check_rows(mask)
        if level == "token":
            per_token = tokens
        elif level in ("sequence", "geometric"):
            per_token = _spread(tokens.sum(dim=1) if level == "sequence" else sequence_means(tokens, mask), mask)
        else:
            raise AlgosError(f'level="{level}" is none of "token", "sequence", "geometric"')
        return _Ratios(tokens=tokens, per_token=per_token, mask=mask)

    @torch.no_grad()
    def correction(self, weights: Tensor, stays: Tensor, is_cut: Tensor) -> Correction:
        """`stays` and `is_cut` may be anything outside the mask."""
        check_finite("exp(proximal_logprobs - rollout_logprobs)", weights, self.mask)  # can overflow without a cap
        loss_mask = self.mask & stays
        weights = weights.masked_fill(~loss_mask, 0.0)
        return Correction(
            weights=weights,
            loss_mask=loss_mask,
            num_terms=self.mask.sum(),
            truncated_fraction=masked_mean(is_cut.to(weights.dtype), loss_mask),
            rejected_fraction=masked_mean((~stays).to(weights.dtype), self.mask),
        )


def _spread(samples: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: for each token the value [B] of its sequence; 0 outside the mask."""
    return torch.where(mask, samples[:, None], 0.0)
