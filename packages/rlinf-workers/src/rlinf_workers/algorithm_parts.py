"""The components of an algorithm in the form that roles call: advantage, policy loss and value loss.

Completions are [B, T] tokens and episodes [N, 1]: one action of a policy is a sequence of one token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import (
    ADVANTAGES,
    BUILTIN_ADVANTAGES,
    BUILTIN_POLICY_LOSSES,
    POLICY_LOSSES,
    TOKEN_CHOICES,
    Algorithm,
    Correction,
    PolicyLoss,
    ValueLoss,
    adapted_entropy_coef,
    advantage_takes,
    clipped_value_loss,
    huber_value_loss,
    icepop,
    masked_importance_sampling,
    off_policy_sequence_mask,
    policy_loss_takes,
    reject_by_divergence,
    truncated_importance_sampling,
)
from rlinf_comm import record
from rlinf_workers.token_choice import TokenChoice

record(Algorithm)


class AdvantagePart:
    """The advantage function that the algorithm names, with its options."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._name = algorithm.advantage
        self.takes = advantage_takes(algorithm.advantage)
        self._options = algorithm.options_of(self.takes)
        self._function = ADVANTAGES.get(algorithm.advantage)
        self._is_custom = algorithm.advantage not in BUILTIN_ADVANTAGES

    def __call__(self, arguments: Mapping[str, Tensor], shape: torch.Size) -> tuple[Tensor, Tensor | None]:
        """Advantages of that shape, and returns if the function computes them.

        Args:
            arguments: by argument name; at least those that the function takes.
        """
        inputs = [arguments[name] for name in self.takes.inputs]
        if self._is_custom:  # it may compute in place, and the rewards are also recorded as metrics
            inputs = [tensor.clone() for tensor in inputs]
        output: Any = self._function(*inputs, **self._options)
        advantages, returns = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
        if not isinstance(advantages, Tensor) or not isinstance(returns, Tensor | None):
            wrong = advantages if not isinstance(advantages, Tensor) else returns
            raise TypeError(
                f"advantage {self._name!r} returned a {type(wrong).__name__}; return a tensor of advantages, or a pair "
                "of advantages and returns"
            )
        if advantages.shape != shape:
            raise ValueError(
                f"advantage {self._name!r} returned the shape {list(advantages.shape)} for rewards {list(shape)}; they "
                "must be equal"
            )
        return advantages, returns


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTerms:
    """The policy loss of a micro-batch."""

    terms: Tensor
    """[B, T], unreduced, with gradient, 0 outside the mask."""
    kl: Tensor
    """Scalar float64, nats, k3 of KL(proximal || policy), summed over tokens."""
    statistics: dict[str, Tensor]
    """Scalars float64, sums over tokens, in the order of `PolicyLossPart.statistics`."""


class PolicyLossPart:
    """The policy loss that the algorithm names, with its correction and token selection."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._takes = policy_loss_takes(algorithm.policy_loss)
        self._options = algorithm.options_of(self._takes)
        self._function = POLICY_LOSSES.get(algorithm.policy_loss)
        self._is_custom = algorithm.policy_loss not in BUILTIN_POLICY_LOSSES
        has = {
            "actor/clip_fraction": True,
            "actor/corrected_fraction": algorithm.correction is not None,
            "actor/rejected_fraction": algorithm.rejection is not None,
            "actor/off_policy_fraction": algorithm.off_policy_threshold is not None,
        }
        self.statistics = tuple(name for name, is_there in has.items() if is_there)
        """Names of its statistics, means over the trained tokens."""

    @property
    def corrects(self) -> bool:
        """Whether the proximal policy is compared with the sampling one, so that both log-probabilities are needed."""
        algorithm = self._algorithm
        corrects = algorithm.correction is not None or algorithm.rejection is not None
        return corrects or "rollout_logprobs" in self._takes.inputs

    def __call__(
        self,
        policy_logprobs: Tensor,
        proximal_logprobs: Tensor,
        rollout_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        choice: TokenChoice | None = None,
    ) -> PolicyTerms:
        """All [B, T], except advantages, which may be [B]. `choice` is for algorithms with `chooses_tokens`."""
        more = {"rollout_logprobs": rollout_logprobs} if "rollout_logprobs" in self._takes.inputs else {}
        if self._algorithm.policy_loss in TOKEN_CHOICES.names():
            assert choice is not None and choice.by_loss is not None, "tokens are chosen before the first gradient"
            more["chosen"] = choice.by_loss
        inputs = [policy_logprobs, proximal_logprobs, advantages, mask]
        if self._is_custom:  # it may compute in place, and the tensors are used again in the next epoch
            inputs = [tensor.clone() for tensor in inputs]
            more = {name: tensor.clone() for name, tensor in more.items()}
        loss = self._function(*inputs, **more, **self._options)
        if not isinstance(loss, PolicyLoss):
            raise TypeError(
                f"policy loss {self._algorithm.policy_loss!r} returned a {type(loss).__name__}; return a PolicyLoss, "
                "as rlinf_algos.measured_loss(terms, inputs) does"
            )
        terms, num_tokens = self._terms(loss, mask), mask.sum().double()
        statistics = dict.fromkeys(self.statistics, torch.zeros_like(num_tokens))
        statistics["actor/clip_fraction"] = _scalar(loss.clip_fraction, mask) * num_tokens
        actor_logprobs = proximal_logprobs
        if self._algorithm.proximal_policy == "rollout":  # the proximal log-probabilities are the engine's
            actor_logprobs = policy_logprobs.detach()
        if self._algorithm.correction is not None:
            correction = self._correction(actor_logprobs, rollout_logprobs, mask)
            terms = terms * correction.weights
            share = correction.truncated_fraction + correction.rejected_fraction
            statistics["actor/corrected_fraction"] = _scalar(share, mask) * num_tokens
        if self._algorithm.rejection is not None:
            rejection = self._rejection(actor_logprobs, rollout_logprobs, mask)
            terms = terms * rejection.weights
            statistics["actor/rejected_fraction"] = _scalar(rejection.rejected_fraction, mask) * num_tokens
        threshold = self._algorithm.off_policy_threshold
        if threshold is not None:
            weights = off_policy_sequence_mask(policy_logprobs, rollout_logprobs, advantages, mask, threshold=threshold)
            terms = terms * weights
            statistics["actor/off_policy_fraction"] = (mask.sum() - weights.sum()).double()
        if choice is not None and choice.uncertain is not None:
            terms = terms * choice.uncertain
        return PolicyTerms(terms=terms, kl=_scalar(loss.approx_kl, mask) * num_tokens, statistics=statistics)

    def _terms(self, loss: PolicyLoss, mask: Tensor) -> Tensor:
        """[B, T], 0 outside the mask, whatever a custom loss has there."""
        name = self._algorithm.policy_loss
        if loss.loss_terms.shape != mask.shape:
            raise ValueError(
                f"policy loss {name!r} returned loss_terms of the shape {list(loss.loss_terms.shape)} for tokens "
                f"{list(mask.shape)}; return one term per token, not their mean"
            )
        return loss.loss_terms.masked_fill(mask == 0, 0.0)

    def _correction(self, proximal_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Correction:
        """Rejected tokens get weight 0 and still count in the divisor, as in IcePop, so that totals are known before
        the losses."""
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

    def _rejection(self, actor_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Correction:
        statistic, limit = self._algorithm.rejection, self._algorithm.rejection_limit
        assert statistic is not None and limit is not None, "an algorithm with a rejection has its limit"
        return reject_by_divergence(actor_logprobs, rollout_logprobs, mask, statistic=statistic, limit=limit)


def _scalar(value: float | Tensor, like: Tensor) -> Tensor:
    """Float64, on the device of `like`, without gradient; a custom loss may have returned a number."""
    return torch.as_tensor(value, device=like.device).detach().double()


class EntropyBonus:
    """The weight of the entropy bonus; an algorithm with an `entropy_target` adapts it after every optimizer step."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._target, self._step = algorithm.entropy_target, algorithm.entropy_coef_step
        self._coef = algorithm.entropy_coef
        self._last_entropy: float | None = None
        self.is_on = bool(algorithm.entropy_coef) or self.adapts
        """Whether there may be an entropy bonus in some step."""

    @property
    def adapts(self) -> bool:
        return self._target is not None

    @property
    def weight(self) -> float:
        """For the next optimizer step; an adapted weight is 0 in the first, before which no entropy is known."""
        if self._target is None:
            return self._coef
        return self._coef if self._last_entropy is not None and self._last_entropy <= self._target else 0.0

    def adapt(self, entropy: float) -> None:
        """Adapts the weight after an optimizer step with this mean entropy (nats); only with an `entropy_target`."""
        assert self._target is not None and self._step is not None, "called only if there is a target"
        self._coef = adapted_entropy_coef(self._coef, entropy, target=self._target, step=self._step)
        self._last_entropy = entropy

    def state(self) -> dict[str, float | None]:
        """For a checkpoint; empty if the weight is constant."""
        return {"entropy_coef": self._coef, "last_entropy": self._last_entropy} if self.adapts else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._coef = float(state.get("entropy_coef", self._coef))
        self._last_entropy = state.get("last_entropy", self._last_entropy)


def value_loss(algorithm: Algorithm, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> ValueLoss:
    """The loss of the critic that the algorithm names."""
    if algorithm.value_loss == "huber":
        assert algorithm.huber_delta is not None, "an algorithm with this loss has its delta"
        delta, clip = algorithm.huber_delta, algorithm.value_clip
        return huber_value_loss(values, old_values, returns, mask, delta=delta, clip=clip)
    return clipped_value_loss(values, old_values, returns, mask, clip=algorithm.value_clip)
