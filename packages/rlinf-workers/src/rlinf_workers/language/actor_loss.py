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
from rlinf_workers.training.base import Evaluation


class ActorLoss:
    """Evaluation and advantages -> a scalar whose gradient adds up over micro-batches, shards and ranks.

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
        has = {
            "actor/logprob_gap": True,
            "actor/rollout_kl": True,
            "actor/ref_kl": self._kl is not None,
            "actor/entropy": self.knows_entropy,
        }
        self.statistics = (*self._policy_loss.statistics, *(name for name, is_there in has.items() if is_there))
        """What is known beside the loss, means over the tokens that were trained on."""

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

    def of(self, answers: Evaluation, batch: MicroBatch) -> tuple[Tensor, list[float]]:
        """Summed loss of the micro-batch, its tokens, and the sums of `statistics` over them."""
        policy_logprobs, entropies, mask = answers.logprobs, answers.entropies, batch.sequences.loss_mask
        anchor = policy_logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
        rollout_logprobs, num_tokens = batch.rollout_logprobs, float(mask.sum())
        found = self._policy_loss(policy_logprobs, anchor, rollout_logprobs, batch.advantages, mask, entropies)
        terms, sums = found.terms, dict.fromkeys(self.statistics, 0.0) | found.statistics
        if self._kl is not None:
            kl = self._kl(policy_logprobs, batch.ref_logprobs) * mask
            terms = terms + self._algorithm.kl_coef * kl
            sums["actor/ref_kl"] = float(kl.detach().sum())
        if self.knows_entropy:
            entropy = entropies.masked_fill(mask == 0, 0.0)
            if self._algorithm.entropy_coef:
                terms = terms - self._algorithm.entropy_coef * entropy
            sums["actor/entropy"] = float(entropy.detach().sum())
        drift = ((policy_logprobs.detach() - rollout_logprobs) * mask).double()
        sums["actor/logprob_gap"] = float(drift.abs().sum())
        sums["actor/rollout_kl"] = float((torch.expm1(drift) - drift).sum())
        return summed(self._algorithm.aggregation, terms, mask), [num_tokens, *sums.values()]
