"""Low-rank adapters (LoRA) beside the weights that they change: W, and for an update B A of rank r

    model.layers.0.self_attn.q_proj.weight           [out, in]
    model.layers.0.self_attn.q_proj.lora_A.weight    [r, in]
    model.layers.0.self_attn.q_proj.lora_B.weight    [out, r]

These are the names in peft's files, without their prefix.
"""

from __future__ import annotations

from collections.abc import Iterable

LORA_A = ".lora_A.weight"
"""End of the name of A, in place of `.weight`."""
LORA_B = ".lora_B.weight"
"""End of the name of B."""


def is_adapter_tensor(name: str) -> bool:
    """Whether a canonical tensor belongs to an adapter."""
    return name.endswith((LORA_A, LORA_B))


def has_adapter(names: Iterable[str]) -> bool:
    """Whether a model with these canonical tensors has an adapter."""
    return any(map(is_adapter_tensor, names))
