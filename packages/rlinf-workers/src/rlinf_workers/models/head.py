"""A language model's answers without its logits, for micro-batches whose logits would be large (rlinf_algos.head).

Numbers differ from those of the logits by rounding, so a size decides: small vocabularies and small micro-batches have
their logits, and their bits, as ever.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rlinf_algos.head import head_logprobs, head_logprobs_and_entropy
from rlinf_sched.derive.memory import MAX_LOGITS_BYTES
from rlinf_workers.training.base import Evaluation

PLAIN_HEADS = frozenset({"gemma", "gemma2", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Architectures (`model_type`) whose logits are a linear layer of the last states, capped at most."""


def has_large_logits(model: Any, num_tokens: int) -> bool:
    """Whether the logits of so many tokens exceed the limit, and the model's head can do without them."""
    head = model.get_output_embeddings()
    if model.config.model_type not in PLAIN_HEADS or type(head) is not nn.Linear:
        return False
    return 4 * num_tokens * head.out_features > MAX_LOGITS_BYTES


def answers_of_states(
    model: Any, states: Tensor, ids: Tensor, loss_mask: Tensor, temperature: float, *, entropies: bool
) -> Evaluation:
    """Answers for tokens, 0.0 outside the mask.

    Args:
        states: [B, T, H], the model's last hidden states before each token.
        ids: [B, T]
        loss_mask: [B, T]
    """
    head = model.get_output_embeddings()
    settings: Any = {
        "bias": head.bias,
        "softcap": getattr(model.config, "final_logit_softcapping", None),
        "loss_mask": loss_mask,
        "kept_bytes": MAX_LOGITS_BYTES,
    }
    if not entropies:
        return Evaluation(logprobs=head_logprobs(states, head.weight, ids, temperature, **settings))
    logprobs, found = head_logprobs_and_entropy(states, head.weight, ids, temperature, **settings)
    return Evaluation(logprobs=logprobs, entropies=found)
