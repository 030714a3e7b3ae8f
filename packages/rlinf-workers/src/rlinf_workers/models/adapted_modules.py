"""A model whose linear layers compute with a low-rank adapter (LoRA) beside their weights: y = W x + scale * B (A x).

The weights stay as they are, so that a weight sync moves only A and B, and no second copy of the weights is needed. The
trainer computes the same (models/lora.py); merged weights would be rounded to their dtype, in which small updates of
bfloat16 weights are lost.

A and B have names of their own beside `weight` (rlinf_comm.weights.layouts.adapters), and its dtype.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear, pad

from rlinf_workers.models.lora_settings import LoraSettings

MIN_RANK = 16
"""Rows of the smallest A in a product. With one to three rows a CPU takes other paths, whose rounding depends on the
number of tokens in a batch; with four or more it is like that of the layer's own product (measured with torch 2.13)."""


def adapt_modules(model: nn.Module, lora: LoraSettings) -> None:
    """Adds an adapter of zeros to the linear layers that it changes.

    Raises: ValueError if there are none.
    """
    layers = [layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and lora.changes(name)]
    if not layers:
        raise ValueError(f"adapter: {type(model).__name__} has no linear layer {' or '.join(lora.targets)}")
    for layer in layers:
        _adapt(layer, lora)


def _adapt(layer: Any, lora: LoraSettings) -> None:
    like: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    layer.lora_A = nn.Linear(layer.in_features, lora.rank, bias=False, **like)
    layer.lora_B = nn.Linear(lora.rank, layer.out_features, bias=False, **like)
    for part in (layer.lora_A, layer.lora_B):
        part.requires_grad_(False)
        part.weight.zero_()
    layer.lora_scale = lora.scale
    layer.__class__ = _adapted_class(type(layer))


@functools.cache
def _adapted_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass that adds the update to the result."""

    def forward(self: Any, x: Tensor) -> Tensor:
        a, rank = self.lora_A.weight, len(self.lora_A.weight)
        if rank < MIN_RANK:
            a = pad(a, (0, 0, 0, MIN_RANK - rank))
        update = linear(linear(x, a)[..., :rank], self.lora_B.weight)
        return cls.forward(self, x).add_(update, alpha=self.lora_scale)

    return type(f"Adapted{cls.__name__}", (cls,), {"forward": forward})
