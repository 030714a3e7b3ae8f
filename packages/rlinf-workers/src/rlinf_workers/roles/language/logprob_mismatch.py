"""How far the engine that sampled and the actor are apart about the same tokens, under the same weights.

The actor's side is what anchors the ratio: its own log-probabilities before the first update of a step, which it
computes anyway. What is measured adds up over micro-batches, shards and ranks, so that it does not depend on the plan:
numbers of tokens, sums, and a histogram with 16 bins an octave. A quantile is the middle of its bin, at most 2.2 % off.

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
"""Gaps from 2^-30 to 2^6 nats have bins of their own; what is below counts as 0, what is above as 2^6."""
NUM_BINS = 2 + (MOST - LEAST) * BINS_PER_OCTAVE
NUM_SUMS = 3 + NUM_BINS
NUM_BEFORE, NUM_AFTER = 16, 4
"""Tokens of the completion that are shown around one."""


def mismatch_sums(drift: Tensor, mask: Tensor) -> list[float]:
    """What a micro-batch adds: number of tokens, sum of |drift|, sum of k3, then the number in each bin; `NUM_SUMS`.

    Args:
        drift: [B, T] float64, nats, actor less engine.
        mask: [B, T], 0 on what is no token.
    """
    inside = drift[mask != 0]
    gap = inside.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    bins = ((gap.log2() - LEAST) * BINS_PER_OCTAVE).clamp(-1, NUM_BINS - 2).floor().long() + 1
    counts = torch.bincount(bins, minlength=NUM_BINS)
    return [float(len(inside)), float(gap.sum()), float(k3(inside).sum()), *map(float, counts.tolist())]


def k3(drift: Tensor) -> Tensor:
    """Nats a token, estimate k3 of KL(engine || actor); never negative."""
    return torch.expm1(drift) - drift


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobMismatch:
    """The gap over the tokens of a step."""

    num_tokens: float
    mean: float
    """Nats, of the distances."""
    kl: float
    """Nats a token, estimate k3 of KL(engine || actor)."""
    counts: tuple[float, ...]
    """Tokens in each bin, ascending."""

    @staticmethod
    def of(parts: Sequence[Sequence[float]]) -> LogprobMismatch | None:
        """From all that `mismatch_sums` gave; None: there is no token."""
        num_tokens, total, kl, *counts = [math.fsum(column) for column in zip(*parts, strict=True)] or [0.0] * 3
        if not num_tokens:
            return None
        return LogprobMismatch(num_tokens=num_tokens, mean=total / num_tokens, kl=kl / num_tokens, counts=tuple(counts))

    def quantile(self, share: float) -> float:
        """Nats: the smallest distance that at least this share of the tokens does not exceed, to 2.2 %."""
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
    """The token about which engine and actor are farthest apart."""

    gap: float
    """Nats."""
    prompt: int
    """Index of its prompt."""
    position: int
    """In the completion, from 0."""
    actor_logprob: float
    rollout_logprob: float
    before: tuple[int, ...]
    """Tokens of the completion before it, the last few."""
    token: int
    after: tuple[int, ...]

    @property
    def order(self) -> tuple[float, int, int]:
        """The worst of several is the smallest, in whichever order they come."""
        return -self.gap, self.prompt, self.position


def worst_token(
    actor_logprobs: Tensor, rollout_logprobs: Tensor, token_ids: Tensor, mask: Tensor, prompts: Sequence[int]
) -> WorstToken | None:
    """The worst token of a micro-batch; None: there is none. Not a number is the worst.

    Args:
        actor_logprobs, rollout_logprobs, token_ids, mask: [B, T]
        prompts: [B], index of each row's prompt.
    """
    gaps = (actor_logprobs.double() - rollout_logprobs.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    gaps = gaps.masked_fill(mask == 0, -1.0)
    if not gaps.numel():
        return None
    place = int(gaps.argmax())
    row, position = divmod(place, gaps.shape[1])
    gap, length = float(gaps[row, position]), int(mask[row].sum())
    if gap < 0:
        return None
    ids = token_ids[row, :length].tolist()
    return WorstToken(
        gap=gap,
        prompt=prompts[row],
        position=position,
        actor_logprob=float(actor_logprobs[row, position]),
        rollout_logprob=float(rollout_logprobs[row, position]),
        before=tuple(ids[max(0, position - NUM_BEFORE) : position]),
        token=ids[position],
        after=tuple(ids[position + 1 : position + 1 + NUM_AFTER]),
    )
