"""The tokens that an algorithm treats differently, chosen over the whole batch of an optimizer step: those with the
highest entropies, or by a covariance (docs/decisions/040).

A forward pass over all micro-batches of the step -> `TokenValues` of each -> `TokenChooser` -> `TokenChoice` of each ->
the policy loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rlinf_algos import TOKEN_CHOICES, Algorithm, BatchTokens, SumOverParts, choose_largest, policy_loss_takes


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenValues:
    """Inputs of the choice: values of the n masked-in tokens of a micro-batch."""

    tokens: BatchTokens
    entropies: Tensor
    """[n], nats; empty if the choice does not read them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChoice:
    """The tokens of a micro-batch that were chosen over the batch of its optimizer step."""

    by_loss: Tensor | None
    """[B, T] bool, tokens that the policy loss treats differently; None: it makes no choice."""
    uncertain: Tensor | None
    """[B, T] bool, tokens with the highest entropies; None: train on all."""


class TokenChooser:
    """Chooses the tokens of an algorithm."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._top_entropy_fraction = algorithm.top_entropy_fraction
        self._choose = (
            TOKEN_CHOICES.get(algorithm.policy_loss) if algorithm.policy_loss in TOKEN_CHOICES.names() else None
        )
        if self._choose is not None:
            options = algorithm.options_of(policy_loss_takes(algorithm.policy_loss))
            read = inspect.signature(self._choose).parameters
            self._options = {name: value for name, value in options.items() if name in read}

    @torch.no_grad()
    def choose(
        self, shards: Sequence[Sequence[TokenValues]], masks: Sequence[Sequence[Tensor]], sum_over_shards: SumOverParts
    ) -> list[list[TokenChoice]]:
        """Chooses over all tokens of an optimizer step on all ranks, so the result does not depend on micro-batches,
        shards or ranks.

        Args:
            shards: the micro-batches of each shard of this rank.
            masks: [B, T] of each micro-batch.
            sum_over_shards: `TrainingBackend.sum_over_shards`; every rank calls it equally often.
        """
        by_loss = uncertain = [[None for _ in shard] for shard in shards]
        if self._choose is not None:
            tokens = [_joined([each.tokens for each in shard]) for shard in shards]
            by_loss = _apart(self._choose(tokens, sum_over_shards, **self._options), masks)
        if self._top_entropy_fraction < 1.0:
            entropies = [torch.cat([torch.zeros(0), *(each.entropies.cpu() for each in shard)]) for shard in shards]
            num_tokens = sum_over_shards(torch.tensor([[float(len(part))] for part in entropies]).double())
            num_chosen = math.ceil(self._top_entropy_fraction * float(num_tokens))
            uncertain = _apart(choose_largest(entropies, num_chosen, sum_over_shards), masks)
        return [
            [TokenChoice(by_loss=one, uncertain=other) for one, other in zip(*pair, strict=True)]
            for pair in zip(by_loss, uncertain, strict=True)
        ]


def _joined(parts: Sequence[BatchTokens]) -> BatchTokens:
    """The tokens of a shard, on the CPU."""
    names = [field.name for field in fields(BatchTokens)]
    empty = {name: torch.zeros(0, dtype=torch.int64 if name == "priorities" else torch.float32) for name in names}
    return BatchTokens(**{n: torch.cat([empty[n], *(getattr(part, n).cpu() for part in parts)]) for n in names})


def _apart(shards: Sequence[Tensor], masks: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """[n] of the tokens of each shard -> [B, T] of each of its micro-batches, False outside the mask."""
    by_shard = []
    for chosen, of_shard in zip(shards, masks, strict=True):
        pieces = chosen.split([int((mask != 0).sum()) for mask in of_shard]) if of_shard else []
        by_shard.append(
            [
                torch.zeros_like(mask, dtype=torch.bool).masked_scatter(mask != 0, piece.to(mask.device))
                for mask, piece in zip(of_shard, pieces, strict=True)
            ]
        )
    return by_shard
