"""Tiny models of the architectures that backends are tested with, as Hugging Face folders with weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlinf_workers.models.language_model import ModelSettings

ARCHITECTURES = ("qwen2", "qwen3", "qwen3_moe", "llama", "gemma")
"""Gemma and Llama have tied embeddings."""
SIZES: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "llama": {"tie_word_embeddings": True, "rope_theta": 500.0},
    "gemma": {"tie_word_embeddings": True},
}


def write_tokenizer(folder: Path, special: Mapping[str, int] | None = None) -> dict[str, int]:
    """Writes a character tokenizer: digits and "=". Returns its vocabulary; 0 pads and 1 ends.

    Args:
        special: further special tokens and their ids.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", *"0123456789="])} | dict(special or {})
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    further: dict[str, Any] = {"additional_special_tokens": list(special)} if special else {}
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", **further)
    whole.save_pretrained(folder)
    return vocabulary


def tiny_architecture(name: str, folder: Path, **changes: Any) -> ModelSettings:
    """Writes the model and a tokenizer; every tensor is random, including norms and biases.

    Args:
        changes: overrides of its config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"tie_word_embeddings": False, **SIZES, **OWN.get(name, {}), **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), dtype=torch.float32)
    return save_random(model, folder)


@torch.no_grad()
def save_random(model: Any, folder: Path) -> ModelSettings:
    """Draws every tensor of a model, and writes it with a tokenizer."""
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return ModelSettings(folder=str(folder), has_weights=True)
