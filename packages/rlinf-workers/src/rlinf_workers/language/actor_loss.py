"""The loss of a micro-batch, from what the model says of its tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlinf_algos.aggregation import summed
from rlinf_algos.algorithm import Algorithm
from rlinf_algos.corrections import (
    Correction,
    icepop,
    masked_importance_sampling,
    off_policy_sequence_mask,
    truncated_importance_sampling,
)
from rlinf_algos.entropy import high_entropy_mask
from rlinf_algos.parts import POLICY_LOSSES, policy_loss_takes
from rlinf_algos.policy_loss import PolicyLoss
from rlinf_workers.language.learning_groups import MicroBatch, kl_estimate
from rlinf_workers.training.base import Evaluation

TOTALS = ("divisor", "loss", "tokens", "trained tokens")
"""Sums over an update that every algorithm has."""


class ActorLoss:
    """Evaluation and advantages -> a scalar whose gradient adds up over micro-batches, shards and ranks."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._takes = policy_loss_takes(algorithm.policy_loss)
        self._options = algorithm.options_of(self._takes)
        self._function = POLICY_LOSSES.get(algorithm.policy_loss)
        self._kl = kl_estimate(algorithm) if algorithm.kl_in == "loss" else None
        self.knows_entropy = bool(algorithm.entropy_coef) or algorithm.top_entropy_fraction < 1.0
        """Whether it reads the entropies of the tokens."""
        has = {
            "clip_fraction": True,
            "logprob_gap": True,
            "rollout_kl": True,
            "ref_kl": self._kl is not None,
            "entropy": self.knows_entropy,
            "corrected_fraction": algorithm.correction is not None,
            "off_policy_fraction": algorithm.off_policy_threshold is not None,
        }
        self.statistics = tuple(name for name, is_there in has.items() if is_there)
        """What is known beside the loss, means over the tokens that were trained on."""

    def of(self, micro_batch: MicroBatch, answers: Evaluation) -> tuple[Tensor, list[float]]:
        """Summed loss of what the micro-batch has for the policy, and the totals of an update: of `TOTALS`, then of
        `statistics`."""
        batch = micro_batch.for_policy
        assert batch is not None, "without a gradient there is no loss; see `without_gradient`"
        policy_logprobs, entropies, mask = answers.logprobs, answers.entropies, batch.sequences.loss_mask
        anchor = policy_logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
        rollout_logprobs, advantages = batch.rollout_logprobs, batch.advantages
        more = {"rollout_logprobs": rollout_logprobs} if "rollout_logprobs" in self._takes.inputs else {}
        loss = self._function(policy_logprobs, anchor, advantages, mask, **more, **self._options)
        terms, sums, num_tokens = self._terms(loss, mask), dict.fromkeys(self.statistics, 0.0), float(mask.sum())
        if self._algorithm.correction is not None:
            correction = self._correction(anchor, rollout_logprobs, mask)
            terms = terms * correction.weights
            share = correction.truncated_fraction + correction.rejected_fraction
            sums["corrected_fraction"] = float(share) * num_tokens
        threshold = self._algorithm.off_policy_threshold
        if threshold is not None:
            kept = off_policy_sequence_mask(policy_logprobs, rollout_logprobs, advantages, mask, threshold=threshold)
            terms = terms * kept
            sums["off_policy_fraction"] = float(mask.sum() - kept.sum())
        if self._algorithm.top_entropy_fraction < 1.0:
            terms = terms * high_entropy_mask(entropies, mask, top_fraction=self._algorithm.top_entropy_fraction)
        if self._kl is not None:
            kl = self._kl(policy_logprobs, batch.ref_logprobs) * mask
            terms = terms + self._algorithm.kl_coef * kl
            sums["ref_kl"] = float(kl.detach().sum())
        if self.knows_entropy:
            entropy = entropies.masked_fill(mask == 0, 0.0)
            if self._algorithm.entropy_coef:
                terms = terms - self._algorithm.entropy_coef * entropy
            sums["entropy"] = float(entropy.detach().sum())
        drift = ((policy_logprobs.detach() - rollout_logprobs) * mask).double()
        sums["logprob_gap"], sums["rollout_kl"] = float(drift.abs().sum()), float((torch.expm1(drift) - drift).sum())
        sums["clip_fraction"] = float(loss.clip_fraction) * num_tokens
        total = summed(self._algorithm.aggregation, terms, mask)
        counted = [micro_batch.divisor, float(total.detach()), micro_batch.num_tokens, num_tokens]
        return total, [*counted, *sums.values()]

    def without_gradient(self, micro_batch: MicroBatch) -> list[float]:
        """The totals of a micro-batch that only counts."""
        return [micro_batch.divisor, 0.0, micro_batch.num_tokens, 0.0, *[0.0] * len(self.statistics)]

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
