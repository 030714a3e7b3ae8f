"""The loss of a micro-batch, and how micro-batches add up to the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf_algos.algorithm import Algorithm
from rlinf_algos.corrections import (
    Correction,
    icepop,
    masked_importance_sampling,
    off_policy_sequence_mask,
    truncated_importance_sampling,
)
from rlinf_algos.entropy import high_entropy_mask
from rlinf_algos.logprobs import logprobs_and_entropy, token_logprobs
from rlinf_algos.parts import BUILTIN_POLICY_LOSSES, POLICY_LOSSES, policy_loss_takes
from rlinf_algos.policy_loss import PolicyLoss
from rlinf_workers.language.learning_groups import LearningGroup, kl_estimate
from rlinf_workers.models.sequences import completion_logits, pack_groups
from rlinf_workers.records.language import SampleGroup

STATISTICS = (
    "divisor",
    "loss",
    "tokens",
    "trained",
    "clipped",
    "gap",
    "rollout_kl",
    "kl",
    "entropy",
    "corrected",
    "off_policy",
)
"""Sums over an update, in this order. The divisor makes the summed loss the mean that the algorithm names."""


class ActorLoss:
    """Groups -> a scalar whose gradient adds up over micro-batches, shards and ranks.

    Args:
        temperature: the rollout's.
        max_completion_tokens: the run's limit, for `constant_length_mean`.
    """

    def __init__(self, algorithm: Algorithm, *, temperature: float, max_completion_tokens: int) -> None:
        self._algorithm = algorithm
        self._temperature = temperature or 1.0
        self._max_completion_tokens = max_completion_tokens
        self._takes = policy_loss_takes(algorithm.policy_loss)
        self._options = algorithm.options_of(self._takes)
        self._function = POLICY_LOSSES.get(algorithm.policy_loss)
        self._kl = kl_estimate(algorithm) if algorithm.kl_in == "loss" else None
        self.knows_entropy = bool(algorithm.entropy_coef) or algorithm.top_entropy_fraction < 1.0
        """Whether the entropies of the tokens are computed."""

    def is_useful(self, group: LearningGroup) -> bool:
        """Whether the group has a gradient."""
        if not group.samples.loss_mask.any():
            return False
        has_penalty = self._kl is not None or self._algorithm.entropy_coef
        is_own = self._algorithm.policy_loss not in BUILTIN_POLICY_LOSSES  # may learn from more than advantages
        return bool(has_penalty or is_own) or bool((group.advantages != 0).any())

    def divisor(self, samples: SampleGroup) -> float:
        """What the group adds to the number that the summed loss is divided by."""
        if self._algorithm.aggregation == "token_mean":
            return float(samples.loss_mask.sum())
        num_sequences = float(samples.loss_mask.any(-1).sum())
        is_constant = self._algorithm.aggregation == "constant_length_mean"
        return num_sequences * self._max_completion_tokens if is_constant else num_sequences

    def of(
        self, model: Any, groups: Sequence[LearningGroup], pad_id: int, device: torch.device
    ) -> tuple[Tensor, list[float]]:
        """Summed loss of the groups, and the sums of `STATISTICS` from "trained" on."""
        samples = [group.samples for group in groups]
        batch = pack_groups(samples, pad_id).to(device)
        width, mask = batch.loss_mask.shape[1], batch.loss_mask

        def joined(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat([tensor[:, :width] for tensor in tensors]).to(device)

        logits = completion_logits(model, batch)
        entropies = None
        if self.knows_entropy:
            policy_logprobs, entropies = logprobs_and_entropy(logits, batch.completion_ids, self._temperature)
        else:
            policy_logprobs = token_logprobs(logits, batch.completion_ids, self._temperature)
        proximal = [group.proximal_logprobs for group in groups if group.proximal_logprobs is not None]
        anchor = joined(proximal) if proximal else policy_logprobs.detach()
        rollout_logprobs = joined([sample.rollout_logprobs for sample in samples])
        by_token = groups[0].advantages.ndim == 2
        advantages = [group.advantages[:, :width] if by_token else group.advantages for group in groups]
        more = {"rollout_logprobs": rollout_logprobs} if "rollout_logprobs" in self._takes.inputs else {}
        advantage = torch.cat(advantages).to(device)
        loss = self._function(policy_logprobs, anchor, advantage, mask, **more, **self._options)
        terms, kl_sum, entropy_sum, corrected, off_policy = self._terms(loss, mask), 0.0, 0.0, 0.0, 0.0
        if self._algorithm.correction is not None:
            correction = self._correction(anchor, rollout_logprobs, mask)
            terms = terms * correction.weights
            share = correction.truncated_fraction + correction.rejected_fraction
            corrected = float(share) * float(mask.sum())
        threshold = self._algorithm.off_policy_threshold
        if threshold is not None:
            kept = off_policy_sequence_mask(policy_logprobs, rollout_logprobs, advantage, mask, threshold=threshold)
            terms = terms * kept
            off_policy = float(mask.sum() - kept.sum())
        if entropies is not None and self._algorithm.top_entropy_fraction < 1.0:
            terms = terms * high_entropy_mask(entropies, mask, top_fraction=self._algorithm.top_entropy_fraction)
        if self._kl is not None:
            ref = joined([sample.ref_logprobs for sample in samples if sample.ref_logprobs is not None])
            kl = self._kl(policy_logprobs, ref) * mask
            terms = terms + self._algorithm.kl_coef * kl
            kl_sum = float(kl.detach().sum())
        if entropies is not None:
            entropy = entropies.masked_fill(mask == 0, 0.0)
            if self._algorithm.entropy_coef:
                terms = terms - self._algorithm.entropy_coef * entropy
            entropy_sum = float(entropy.detach().sum())
        num_tokens = float(mask.sum())
        drift = ((policy_logprobs.detach() - rollout_logprobs) * mask).double()
        gap, rollout_kl = float(drift.abs().sum()), float((torch.expm1(drift) - drift).sum())
        clipped = float(loss.clip_fraction) * num_tokens
        statistics = [num_tokens, clipped, gap, rollout_kl, kl_sum, entropy_sum, corrected, off_policy]
        return self._sum(terms, mask), statistics

    def _terms(self, loss: PolicyLoss, mask: Tensor) -> Tensor:
        """[B, T], 0 outside the mask, whatever a loss of one's own has there."""
        if loss.loss_terms.shape != mask.shape:
            raise ValueError(
                f"policy loss {self._algorithm.policy_loss!r} gave loss_terms of the shape "
                f"{list(loss.loss_terms.shape)} for tokens {list(mask.shape)}; return one term a token, not their mean"
            )
        return loss.loss_terms.masked_fill(mask == 0, 0.0)

    def _correction(self, anchor: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Correction:
        """What is rejected has the weight 0 and still counts in the divisor, as IcePop has it, so that totals are known
        before the losses are."""
        low, high = self._algorithm.correction_low or 0.0, self._algorithm.correction_high or math.inf
        if self._algorithm.correction == "icepop":
            return icepop(anchor, rollout_logprobs, mask, low=low, high=high)
        level = self._algorithm.correction_level
        assert level is not None, "an algorithm with this correction has its level"
        if self._algorithm.correction == "truncated":
            return truncated_importance_sampling(anchor, rollout_logprobs, mask, level=level, cap=high)
        weigh = self._algorithm.correction == "masked"
        return masked_importance_sampling(anchor, rollout_logprobs, mask, level=level, low=low, high=high, weigh=weigh)

    def _sum(self, terms: Tensor, mask: Tensor) -> Tensor:
        """The numerator of the aggregation; `divisor` adds up to its denominator."""
        if self._algorithm.aggregation == "sequence_mean_token_mean":
            return (terms.sum(1) / mask.sum(1).clamp(min=1.0)).sum()
        return terms.sum()
