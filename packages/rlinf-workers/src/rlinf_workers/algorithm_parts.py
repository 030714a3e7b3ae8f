"""The parts of an algorithm as the roles call them: its advantage, its policy loss and its value loss.

Completions are [B, T] tokens and episodes [N, 1]: one answer of a policy is a sequence of one token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
from rlinf_algos.parts import ADVANTAGES, POLICY_LOSSES, advantage_takes, policy_loss_takes
from rlinf_algos.policy_loss import PolicyLoss
from rlinf_algos.value_loss import ValueLoss, clipped_value_loss, huber_value_loss
from rlinf_comm.records import record

record(Algorithm)


class AdvantagePart:
    """The advantage function that the algorithm names, with its options."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._name = algorithm.advantage
        self.takes = advantage_takes(algorithm.advantage)
        self._options = algorithm.options_of(self.takes)
        self._function = ADVANTAGES.get(algorithm.advantage)

    def __call__(self, given: Mapping[str, Tensor], shape: torch.Size) -> tuple[Tensor, Tensor | None]:
        """Advantages of that shape, and the returns where the function knows them.

        Args:
            given: by the name of the argument, at least what the function takes.
        """
        found = self._function(*(given[name] for name in self.takes.inputs), **self._options)
        advantages, returns = found if isinstance(found, tuple) else (found, None)
        if advantages.shape != shape:
            raise ValueError(
                f"advantage {self._name!r} gave the shape {list(advantages.shape)} for rewards {list(shape)}; they "
                "must be equal"
            )
        return advantages, returns


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTerms:
    """What the policy loss makes of a micro-batch."""

    terms: Tensor
    """[B, T], unreduced, with gradient, 0 outside the mask."""
    kl: float
    """Nats, k3 of KL(proximal || policy), summed over tokens."""
    statistics: dict[str, float]
    """Sums over tokens, in the order of `PolicyLossPart.statistics`."""


class PolicyLossPart:
    """The policy loss that the algorithm names, with its correction and what it leaves out."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._takes = policy_loss_takes(algorithm.policy_loss)
        self._options = algorithm.options_of(self._takes)
        self._function = POLICY_LOSSES.get(algorithm.policy_loss)
        has = {
            "actor/clip_fraction": True,
            "actor/corrected_fraction": algorithm.correction is not None,
            "actor/off_policy_fraction": algorithm.off_policy_threshold is not None,
        }
        self.statistics = tuple(name for name, is_there in has.items() if is_there)
        """What is known of it, means over the tokens that were trained on."""

    @property
    def corrects(self) -> bool:
        """Whether the proximal policy is compared with the one that sampled, so that both have to be known."""
        return self._algorithm.correction is not None or "rollout_logprobs" in self._takes.inputs

    def __call__(
        self,
        policy_logprobs: Tensor,
        proximal_logprobs: Tensor,
        rollout_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        entropies: Tensor,
    ) -> PolicyTerms:
        """All [B, T], but for advantages, which may be [B]. Entropies are read with a `top_entropy_fraction`."""
        more = {"rollout_logprobs": rollout_logprobs} if "rollout_logprobs" in self._takes.inputs else {}
        loss = self._function(policy_logprobs, proximal_logprobs, advantages, mask, **more, **self._options)
        terms, num_tokens = self._terms(loss, mask), float(mask.sum())
        statistics = dict.fromkeys(self.statistics, 0.0)
        statistics["actor/clip_fraction"] = float(loss.clip_fraction) * num_tokens
        if self._algorithm.correction is not None:
            correction = self._correction(proximal_logprobs, rollout_logprobs, mask)
            terms = terms * correction.weights
            share = correction.truncated_fraction + correction.rejected_fraction
            statistics["actor/corrected_fraction"] = float(share) * num_tokens
        threshold = self._algorithm.off_policy_threshold
        if threshold is not None:
            kept = off_policy_sequence_mask(policy_logprobs, rollout_logprobs, advantages, mask, threshold=threshold)
            terms = terms * kept
            statistics["actor/off_policy_fraction"] = float(mask.sum() - kept.sum())
        if self._algorithm.top_entropy_fraction < 1.0:
            terms = terms * high_entropy_mask(entropies, mask, top_fraction=self._algorithm.top_entropy_fraction)
        return PolicyTerms(terms=terms, kl=float(loss.approx_kl) * num_tokens, statistics=statistics)

    def _terms(self, loss: PolicyLoss, mask: Tensor) -> Tensor:
        """[B, T], 0 outside the mask, whatever a loss of one's own has there."""
        if loss.loss_terms.shape != mask.shape:
            raise ValueError(
                f"policy loss {self._algorithm.policy_loss!r} gave loss_terms of the shape "
                f"{list(loss.loss_terms.shape)} for tokens {list(mask.shape)}; return one term a token, not their mean"
            )
        return loss.loss_terms.masked_fill(mask == 0, 0.0)

    def _correction(self, proximal_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Correction:
        """What is rejected has the weight 0 and still counts in the divisor, as IcePop has it, so that totals are known
        before the losses are."""
        low, high = self._algorithm.correction_low or 0.0, self._algorithm.correction_high or math.inf
        if self._algorithm.correction == "icepop":
            return icepop(proximal_logprobs, rollout_logprobs, mask, low=low, high=high)
        level = self._algorithm.correction_level
        assert level is not None, "an algorithm with this correction has its level"
        if self._algorithm.correction == "truncated":
            return truncated_importance_sampling(proximal_logprobs, rollout_logprobs, mask, level=level, cap=high)
        weigh = self._algorithm.correction == "masked"
        return masked_importance_sampling(
            proximal_logprobs, rollout_logprobs, mask, level=level, low=low, high=high, weigh=weigh
        )


def value_loss(algorithm: Algorithm, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> ValueLoss:
    """The loss of the critic that the algorithm names."""
    if algorithm.value_loss == "huber":
        assert algorithm.huber_delta is not None, "an algorithm with this loss has its delta"
        return huber_value_loss(values, old_values, returns, mask, delta=algorithm.huber_delta)
    return clipped_value_loss(values, old_values, returns, mask, clip=algorithm.value_clip)
