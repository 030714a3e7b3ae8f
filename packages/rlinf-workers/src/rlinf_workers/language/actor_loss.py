"""The loss of a micro-batch, from what the model says of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_algos.aggregation import divisor, summed
from rlinf_algos.algorithm import Algorithm
from rlinf_algos.parts import BUILTIN_POLICY_LOSSES
from rlinf_workers.algorithm_parts import PolicyLossPart
from rlinf_workers.language.learning_groups import LearningGroup, MicroBatch, kl_estimate
from rlinf_workers.records.language import SampleGroup
from rlinf_workers.training.base import Answers

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
    """Answers and advantages -> a scalar whose gradient adds up over micro-batches, shards and ranks.

    Args:
        max_completion_tokens: the run's limit, for `constant_length_mean`.
    """

    def __init__(self, algorithm: Algorithm, *, max_completion_tokens: int) -> None:
        self._algorithm = algorithm
        self._max_completion_tokens = max_completion_tokens
        self._policy_loss = PolicyLossPart(algorithm)
        self._kl = kl_estimate(algorithm) if algorithm.kl_in == "loss" else None
        self.knows_entropy = bool(algorithm.entropy_coef) or algorithm.top_entropy_fraction < 1.0
        """Whether it reads the entropies of the tokens."""

    def is_useful(self, group: LearningGroup) -> bool:
        """Whether the group has a gradient."""
        if not group.samples.loss_mask.any():
            return False
        has_penalty = self._kl is not None or self._algorithm.entropy_coef
        is_own = self._algorithm.policy_loss not in BUILTIN_POLICY_LOSSES  # may learn from more than advantages
        return bool(has_penalty or is_own) or bool((group.advantages != 0).any())

    def divisor(self, samples: SampleGroup) -> float:
        """What the group adds to the number that the summed loss is divided by."""
        return divisor(
            self._algorithm.aggregation, samples.loss_mask, max_completion_tokens=self._max_completion_tokens
        )

    def of(self, answers: Answers, batch: MicroBatch) -> tuple[Tensor, list[float]]:
        """Summed loss of the micro-batch, and the sums of `STATISTICS` from "trained" on."""
        policy_logprobs, entropies, mask = answers.logprobs, answers.entropies, batch.sequences.loss_mask
        assert policy_logprobs is not None, "a policy says how likely tokens are"
        anchor = policy_logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
        rollout_logprobs = batch.rollout_logprobs
        found = self._policy_loss(policy_logprobs, anchor, rollout_logprobs, batch.advantages, mask, entropies)
        terms, kl_sum, entropy_sum = found.terms, 0.0, 0.0
        if self._kl is not None:
            kl = self._kl(policy_logprobs, batch.ref_logprobs) * mask
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
        statistics = [num_tokens, found.clipped, gap, rollout_kl, kl_sum, entropy_sum]
        statistics += [found.corrected, found.off_policy]
        return summed(self._algorithm.aggregation, terms, mask), statistics
