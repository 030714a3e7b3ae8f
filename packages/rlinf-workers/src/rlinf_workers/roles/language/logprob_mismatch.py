"""Log-prob mismatch: how far engine and actor differ on the same tokens with the same weights.

The actor's side is its log-probabilities before the first update of a step, which it computes anyway to anchor the
ratio. All measures are additive over micro-batches, shards and ranks, so they do not depend on the plan: token counts,
sums, and a histogram with 16 bins per octave. A quantile is the middle of its bin, at most 2.2 % off.

Legend: B completions of at most T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BINS_PER_OCTAVE = 16
LEAST, MOST = -30, 6
"""Mismatches from 2^-30 to 2^6 nats have bins; smaller ones count as 0, larger ones as 2^6."""
NUM_BINS = 2 + (MOST - LEAST) * BINS_PER_OCTAVE
NUM_SUMS = 3 + NUM_BINS
NUM_BEFORE, NUM_AFTER = 16, 4
"""Tokens shown before and after the worst one."""


def mismatch_sums(drift: Tensor, mask: Tensor) -> Tensor:
    """The sums of a micro-batch: number of tokens, sum of |drift|, sum of k3, then the number in each bin; [NUM_SUMS]
    float64. Nothing is read from the device.

    Args:
        drift: [B, T] float64, nats, actor minus engine.
        mask: [B, T], 0 on padding.
    """
    is_inside = (mask != 0).flatten()
    inside = drift.flatten().where(is_inside, 0.0)
    gap = inside.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    bins = ((gap.log2() - LEAST) * BINS_PER_OCTAVE).clamp(-1, NUM_BINS - 2).floor().long() + 1
    counts = gap.new_zeros(NUM_BINS).index_add_(0, bins, is_inside.to(gap.dtype))
    return torch.cat([torch.stack([is_inside.sum().to(gap.dtype), gap.sum(), k3(inside).sum()]), counts])


def k3(drift: Tensor) -> Tensor:
    """Nats per token: estimate k3 of KL(engine || actor); never negative."""
    return torch.expm1(drift) - drift


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobMismatch:
    """The log-prob mismatch over the tokens of a step."""

    num_tokens: float
    mean: float
    """Nats, mean of |drift|."""
    kl: float
    """Nats per token: estimate k3 of KL(engine || actor)."""
    counts: tuple[float, ...]
    """Tokens in each bin, ascending."""

    @staticmethod
    def of(parts: Sequence[Sequence[float] | Tensor]) -> LogprobMismatch | None:
        """Adds up the sums of `mismatch_sums`; None if there are no tokens."""
        rows = [part.tolist() if isinstance(part, Tensor) else part for part in parts]
        num_tokens, total, kl, *counts = [math.fsum(column) for column in zip(*rows, strict=True)] or [0.0] * 3
        if not num_tokens:
            return None
        return LogprobMismatch(num_tokens=num_tokens, mean=total / num_tokens, kl=kl / num_tokens, counts=tuple(counts))

    def quantile(self, share: float) -> float:
        """Nats: the smallest |drift| that at least this share of the tokens does not exceed, to 2.2 %."""
        target, seen = math.ceil(share * self.num_tokens), 0.0
        for number, count in enumerate(self.counts):
            seen += count
            if seen >= target:
                return _middle(number)
        return _middle(NUM_BINS - 1)


def _middle(number: int) -> float:
    if number == 0:
        return 0.0
    return 2.0 ** (LEAST + min(number - 0.5, NUM_BINS - 2) / BINS_PER_OCTAVE)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstToken:
    """The token with the largest log-prob mismatch."""

    gap: float
    """Nats."""
    prompt: int
    """Index of its prompt."""
    position: int
    """Position in the completion, from 0."""
    actor_logprob: float
    rollout_logprob: float
    before: tuple[int, ...]
    """The last few tokens of the completion before it."""
    token: int
    after: tuple[int, ...]

    @property
    def order(self) -> tuple[float, int, int]:
        """Sort key: the worst token comes first, independent of the order of arrival."""
        return -self.gap, self.prompt, self.position


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstCandidate:
    """The worst token of a micro-batch, on its device."""

    numbers: Tensor
    """[4] float64: its gap in nats, -1 if the batch has no tokens; place in the flattened batch; log-probabilities by
    actor and engine."""
    token_ids: Tensor
    """[B, T]"""
    mask: Tensor
    """[B, T]"""
    prompts: Sequence[int]
    """[B], index of each row's prompt."""

    @staticmethod
    def of(
        actor_logprobs: Tensor, rollout_logprobs: Tensor, token_ids: Tensor, mask: Tensor, prompts: Sequence[int]
    ) -> WorstCandidate:
        """NaN counts as worst. Nothing is read from the device.

        Args:
            actor_logprobs, rollout_logprobs, token_ids, mask: [B, T], with at least one place.
            prompts: [B]
        """
        gaps = (actor_logprobs.double() - rollout_logprobs.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        gaps = gaps.masked_fill(mask == 0, -1.0).flatten()
        place = gaps.argmax()[None]
        logprobs = [one.flatten().index_select(0, place).double() for one in (actor_logprobs, rollout_logprobs)]
        numbers = torch.cat([gaps.index_select(0, place), place.double(), *logprobs])
        return WorstCandidate(numbers=numbers, token_ids=token_ids, mask=mask, prompts=prompts)

    def token(self, numbers: Sequence[float]) -> WorstToken | None:
        """The token; `numbers` are those of the candidate. None: the batch has no tokens."""
        gap, place, actor_logprob, rollout_logprob = numbers
        if gap < 0:
            return None
        row, position = divmod(int(place), self.mask.shape[1])
        length = int(self.mask[row].nonzero()[-1]) + 1
        ids = self.token_ids[row, :length].tolist()
        return WorstToken(
            gap=gap,
            prompt=self.prompts[row],
            position=position,
            actor_logprob=actor_logprob,
            rollout_logprob=rollout_logprob,
            before=tuple(ids[max(0, position - NUM_BEFORE) : position]),
            token=ids[position],
            after=tuple(ids[position + 1 : position + 1 + NUM_AFTER]),
        )


def worst_of(candidates: Sequence[WorstCandidate]) -> WorstToken | None:
    """The worst token of all; None if no batch has tokens."""
    if not candidates:
        return None
    numbers = torch.stack([one.numbers for one in candidates]).tolist()
    largest = max(gap for gap, *_ in numbers)
    tokens = [one.token(own) for one, own in zip(candidates, numbers, strict=True) if own[0] == largest]
    return min((token for token in tokens if token is not None), key=lambda token: token.order, default=None)


def worst_token(
    actor_logprobs: Tensor, rollout_logprobs: Tensor, token_ids: Tensor, mask: Tensor, prompts: Sequence[int]
) -> WorstToken | None:
    """The worst token of a micro-batch; None if it has no tokens. Arguments as `WorstCandidate.of`."""
    if not mask.numel():
        return None
    return worst_of([WorstCandidate.of(actor_logprobs, rollout_logprobs, token_ids, mask, prompts)])
