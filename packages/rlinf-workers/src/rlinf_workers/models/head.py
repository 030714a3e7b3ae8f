"""Computes a language model's outputs without materializing its logits, for large micro-batches (rlinf_algos.head).

Numbers differ from those computed with logits by rounding, so a size limit decides: small vocabularies and small
micro-batches still use logits and stay bitwise unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_algos import (
    head_logprobs,
    head_logprobs_and_entropy,
    kept_head_logprobs_and_entropy,
    logit_norms,
    token_logprobs,
)
from rlinf_sched.derive import MAX_LOGITS_BYTES
from rlinf_workers.models.packed import KeptIds
from rlinf_workers.models.pictures import VISION_LANGUAGE
from rlinf_workers.trainers.base import ModelOutputs

PLAIN_HEADS = VISION_LANGUAGE | frozenset(
    {"gemma", "gemma2", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
)
"""Architectures (`model_type`) whose logits are a linear layer of the last states, with at most a soft cap."""


def has_large_logits(model: Any, num_tokens: int) -> bool:
    """Whether the logits of this many tokens exceed the limit and the model's head supports computing without them."""
    return has_plain_head(model) and 4 * num_tokens * model.get_output_embeddings().out_features > MAX_LOGITS_BYTES


def has_plain_head(model: Any) -> bool:
    """Whether the logits are a linear layer of the last states, capped at most."""
    return model.config.model_type in PLAIN_HEADS and type(model.get_output_embeddings()) is nn.Linear


def answers_of_states(
    model: Any, states: Tensor, ids: Tensor, loss_mask: Tensor | None, temperature: float, *, entropies: bool
) -> ModelOutputs:
    """Model outputs for tokens, 0.0 outside the mask.

    Args:
        states: [B, T, H], the model's last hidden states before each token.
        ids: [B, T]
        loss_mask: [B, T]; None: all.
    """
    head = model.get_output_embeddings()
    settings: Any = {
        "bias": head.bias,
        "softcap": getattr(model.config, "final_logit_softcapping", None),
        "loss_mask": loss_mask,
        "kept_bytes": MAX_LOGITS_BYTES,
    }
    if not entropies:
        return ModelOutputs(logprobs=head_logprobs(states, head.weight, ids, temperature, **settings))
    logprobs, entropy = head_logprobs_and_entropy(states, head.weight, ids, temperature, **settings)
    return ModelOutputs(logprobs=logprobs, entropies=entropy)


def kept_statistics_of_states(
    model: Any, states: Tensor, ids: Tensor, kept_tokens: KeptIds, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, [M] each, among the tokens that sampling left.

    Args:
        states: [M, H], the model's last hidden states before each token.
        ids: [M]
    """
    head, softcap = model.get_output_embeddings(), getattr(model.config, "final_logit_softcapping", None)
    return kept_head_logprobs_and_entropy(
        states, head.weight, ids, kept_tokens.ids, kept_tokens.counts, temperature, bias=head.bias, softcap=softcap
    )


def logit_norms_of_states(model: Any, states: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """`rlinf_algos.logit_norms` of tokens, computing the logits of a few rows at a time.

    Args:
        states: [..., H], the model's last hidden states before each token.
        ids: [...]
    """
    norms = [logit_norms(logits, row_ids, temperature) for logits, row_ids in _logits_of_rows(model, states, ids)]
    return torch.cat(norms).view(ids.shape)


def likeliest_of_states(model: Any, states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens at temperature 1, and 1.0 for those that are the most likely ones; arguments as in
    `logit_norms_of_states`."""
    pairs = [
        (token_logprobs(logits, row_ids), (logits.argmax(-1) == row_ids).float())
        for logits, row_ids in _logits_of_rows(model, states, ids)
    ]
    logprobs, is_likeliest = (torch.cat(parts).view(ids.shape) for parts in zip(*pairs, strict=True))
    return logprobs, is_likeliest


def _logits_of_rows(model: Any, states: Tensor, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the logits of a few rows at a time with their token ids."""
    head, softcap = model.get_output_embeddings(), getattr(model.config, "final_logit_softcapping", None)
    num_rows = max(1, MAX_LOGITS_BYTES // (4 * head.out_features))
    for rows, row_ids in zip(states.flatten(0, -2).split(num_rows), ids.flatten().split(num_rows), strict=True):
        logits = nn.functional.linear(rows, head.weight, head.bias)
        yield (logits if softcap is None else softcap * torch.tanh(logits / softcap)), row_ids
