"""Sampling one token a row, from noise that belongs to the prompt and not to the batch.

Each prompt has a generator of its own, seeded by (run seed, step, prompt index); a token is drawn by inverting the
cumulative distribution at one uniform number. So a completion does not depend on which prompts share its batch, on
the rank or on the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlinf_comm import record


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    """How to sample."""

    group_size: int
    """Completions of each prompt (G)."""
    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    """Tokens outside the smallest set with this probability are never drawn. The log-probability reported is that of
    the full distribution."""
    top_k: int = 0
    """Only so many of the likeliest tokens are drawn, of those that top_p leaves; 0: all. The log-probability reported
    is that of the full distribution."""
    min_p: float = 0.0
    """Tokens with less than this share of the likeliest one's probability are never drawn; 0: all. With top_p and top_k
    a token has to pass all of them, each counted in the full distribution. The log-probability reported is that of the
    full distribution."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these in its text, as with an end token (stopping.py)."""

    @property
    def draws_from_all(self) -> bool:
        """Whether every token may be drawn."""
        return self.top_p >= 1 and self.top_k <= 0 and self.min_p <= 0


def prompt_noise(seed: int, step: int, prompt_indices: Sequence[int], settings: SamplingSettings) -> Tensor:
    """Uniform numbers in [0, 1), [P * G, T] float32: row p * G + g belongs to completion g of prompt p."""
    rows = [
        np.random.Generator(np.random.Philox(key=[seed, (step << 32) | index])).random(
            (settings.group_size, settings.max_new_tokens), dtype=np.float32
        )
        for index in prompt_indices
    ]
    return torch.from_numpy(np.concatenate(rows))


def sample_tokens(logits: Tensor, uniform: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Draws a token a row.

    Args:
        logits: [B, V]
        uniform: [B] in [0, 1)
    Returns:
        token ids [B] int64 and their log-probabilities [B] float32 in nats, at the sampling temperature (at 1 for
        greedy).
    """
    if settings.temperature == 0:
        logprobs = logits.float().log_softmax(-1)
        tokens = logprobs.argmax(-1)
        return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
    logprobs = (logits.float() / settings.temperature).log_softmax(-1)
    probabilities = logprobs.exp()
    if not settings.draws_from_all:
        probabilities = _keep_likeliest(probabilities, settings)
    cumulative = probabilities.cumsum(-1)
    target = (uniform * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


BLOCK = 128
"""Tokens whose probabilities are summed before a draw looks at single ones."""
BELOW_ONE = 1 - 2**-23


def sample_by_blocks(logits: Tensor, uniform: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """`sample_tokens` for a GPU, where it is bound by how often [B, V] is read and written: the cumulative distribution
    is inverted first over blocks of tokens, then within one. The same draw but for rounding."""
    if settings.temperature == 0 or not settings.draws_from_all:
        return sample_tokens(logits, uniform, settings)
    scores = logits if settings.temperature == 1 else logits.float() / settings.temperature
    probabilities = scores.softmax(-1, torch.float32)
    if missing := -logits.shape[-1] % BLOCK:  # or `pad` copies all
        probabilities = pad(probabilities, (0, missing))
    blocks = probabilities.unflatten(-1, (-1, BLOCK))
    ends = blocks.sum(-1).cumsum(-1)
    total = ends[:, -1:]
    target = torch.minimum(uniform[:, None] * total, BELOW_ONE * total)  # a product may round up to the total
    block = torch.searchsorted(ends, target, right=True)
    before = ends.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    inner_ends = inside.cumsum(-1)
    inner_target = torch.minimum(target - before, BELOW_ONE * inner_ends[:, -1:])
    place = torch.searchsorted(inner_ends, inner_target, right=True)
    return (block * BLOCK + place)[:, 0], inside.gather(1, place)[:, 0].log()


def _keep_likeliest(probabilities: Tensor, settings: SamplingSettings) -> Tensor:
    """0 but for the likeliest tokens, all limits being counted in the full distribution."""
    ordered, order = probabilities.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    is_unlikely = (before >= settings.top_p) | (ordered < settings.min_p * ordered[..., :1])
    if settings.top_k:
        is_unlikely[..., settings.top_k :] = True
    return torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(is_unlikely, 0.0))
