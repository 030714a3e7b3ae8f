"""Samples one token per row, from noise that belongs to the prompt and not to the batch.

Each prompt has its own generator, seeded by (run seed, step, prompt index); a token is sampled by inverting the
cumulative distribution at one uniform number. So a completion does not depend on which prompts share its batch, on the
rank or on the plan.
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
    """Completions per prompt (G)."""
    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    """Samples from the smallest set of tokens with this total probability. Reported log-probabilities are those of the
    full distribution."""
    top_k: int = 0
    """Sample from the k most likely tokens that top_p leaves; 0: all. Reported log-probabilities are those of the full
    distribution."""
    min_p: float = 0.0
    """Excludes tokens with less than this fraction of the most likely token's probability; 0: none. Combined with top_p
    and top_k, a token must pass all limits, each computed from the full distribution. Reported log-probabilities are
    those of the full distribution."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these in its text, as with an end token (stopping.py)."""

    records_experts: bool = False
    """Returns the experts of each token (`Completions.experts`); needs a model with routers."""
    records_kept: bool = False
    """Returns the tokens that top_p, top_k and min_p left (`Completions.kept_tokens`), and log-probabilities
    among them."""

    @property
    def draws_from_all(self) -> bool:
        """Whether every token may be sampled."""
        return self.top_p >= 1 and self.top_k <= 0 and self.min_p <= 0


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseKey:
    """Determines the noise of a prompt's completions."""

    seed: int
    step: int
    index: int
    """`Prompt.index` when the prompt was first submitted."""


def prompt_noise(keys: Sequence[NoiseKey], settings: SamplingSettings) -> Tensor:
    """Uniform numbers in [0, 1), [P * G, T] float32: row p * G + g belongs to completion g of prompt p."""
    noise = np.empty((len(keys), settings.group_size, settings.max_new_tokens), np.float32)
    bits = np.random.Philox(key=0)
    generator, state = np.random.Generator(bits), bits.state
    for key, rows in zip(keys, noise, strict=True):
        state["state"]["key"][:] = key.seed, (key.step << 32) | key.index
        bits.state = state  # a new generator for each key takes four times as long
        generator.random(out=rows, dtype=np.float32)
    return torch.from_numpy(noise).flatten(0, 1)


def sample_tokens(logits: Tensor, uniform: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Samples one token per row.

    Args:
        logits: [B, V]
        uniform: [B] in [0, 1)
    Returns:
        token ids [B] int64 and their log-probabilities [B] float32 in nats, at the sampling temperature (1 for greedy).
    """
    if settings.temperature == 0:
        logprobs = logits.float().log_softmax(-1)
        tokens = logprobs.argmax(-1)
        return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
    logprobs = (logits.float() / settings.temperature).log_softmax(-1)
    probabilities = logprobs.exp()
    if not settings.draws_from_all:
        probabilities = _keep_likeliest(probabilities, settings)
    tokens, _ = _inverted(probabilities, uniform)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def sample_kept(logits: Tensor, uniform: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Samples the same tokens as `sample_tokens`.

    Args:
        logits, uniform: as in `sample_tokens`.
    Returns:
        token ids [B] int64, their log-probabilities [B] float32 among the tokens that top_p, top_k and min_p left, and
        which these are, [B, V] bool.
    """
    assert settings.temperature > 0, "greedy decoding keeps one token"
    probabilities = _keep_likeliest((logits.float() / settings.temperature).softmax(-1), settings)
    tokens, total = _inverted(probabilities, uniform)
    return tokens[:, 0], (probabilities.gather(-1, tokens) / total)[:, 0].log(), probabilities > 0


def _inverted(probabilities: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The token at each uniform number, [B, 1], and the total probability, [B, 1]. No token without probability: on a
    GPU sums up to neighbouring places may round differently, so one after a kept token can seem to have some."""
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    target = uniform[:, None] * total
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=probabilities.shape[-1] - 1)
    return tokens.where(probabilities.gather(-1, tokens) > 0, probabilities.argmax(-1, keepdim=True)), total


BLOCK = 128
"""Tokens whose probabilities are summed first, before single tokens are searched."""
BELOW_ONE = 1 - 2**-23


def sample_by_blocks(logits: Tensor, uniform: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """`sample_tokens` for a GPU, where the cost is reading and writing [B, V]: inverts the cumulative distribution over
    blocks of tokens, then within one block. Same result up to rounding."""
    if settings.temperature == 0 or not settings.draws_from_all:
        return sample_tokens(logits, uniform, settings)
    scores = logits if settings.temperature == 1 else logits.float() / settings.temperature
    probabilities = scores.softmax(-1, torch.float32)
    if missing := -logits.shape[-1] % BLOCK:  # otherwise `pad` copies everything
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
    """Zeroes all but the most likely tokens; all limits are computed from the full distribution."""
    ordered, order = probabilities.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    is_unlikely = (before >= settings.top_p) | (ordered < settings.min_p * ordered[..., :1])
    if settings.top_k:
        is_unlikely[..., settings.top_k :] = True
    return torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(is_unlikely, 0.0))
