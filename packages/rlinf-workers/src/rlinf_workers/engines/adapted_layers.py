"""Linear layers of SGLang and vLLM that compute with a low-rank adapter (LoRA) beside their weights, in the engine's
processes: y = W x + scale * B (A x), as in models/adapted_modules.py.

Both engines merge layers (q, k and v; gate and up) and shard them, and both compute them by `quant_method.apply`,
before ranks add or gather their parts. Here it adds the update of each part that has an adapter. A and B are parameters
beside `weight`, stacked as `rlinf_comm.weights.layouts.adapted_layout` describes, so that a weight sync fills them in
place.

There is one adapter, and all requests use it. The LoRA of the engines themselves serves many: it reads adapters from
files, multiplies B by the scale when it does, and chooses an adapter for each token. vLLM 0.32.0 does so on a CPU by
gathering A and B for every token, and compiles no graphs meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rlinf_workers.models.lora_settings import LoraSettings

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Merged layer -> the layers of the model that it consists of, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Update:
    """What an adapter adds to one part of a layer."""

    outputs: slice
    """Columns of the layer's result."""
    ranks: slice
    """Rows of `lora_A`."""
    rows: slice
    """Rows of `lora_B`."""


class AdaptedMethod:
    """Computes a layer as its own `quant_method` does, and adds the updates of its adapter.

    It is no subclass of that, and has no other method to compute with: shortcuts of an engine that skip `apply` look
    for them.
    """

    def __init__(self, plain: Any, updates: tuple[_Update, ...], scale: float) -> None:
        self.plain, self.updates, self.scale = plain, updates, scale

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """SGLang calls it after each sync, too."""
        self.plain.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., in] -> [..., out], of this process's shard."""
        result = self.plain.apply(layer, x, bias)
        reduced = linear(x, layer.lora_A)
        for one in self.updates:
            update = linear(reduced[..., one.ranks], layer.lora_B[one.rows])
            result[..., one.outputs].add_(update, alpha=self.scale)
        return result


def adapt_layers(model: nn.Module, lora: LoraSettings) -> None:
    """Adds an adapter of zeros to the linear layers that it changes.

    Raises: ValueError if there are none.
    """
    layers = [(layer, parts) for name, layer in model.named_modules() if (parts := list(_changed(name, layer, lora)))]
    if not layers:
        raise ValueError(f"adapter: {type(model).__name__} has no linear layer {' or '.join(lora.targets)}")
    for layer, outputs in layers:
        _adapt(layer, outputs, lora)


def _changed(name: str, layer: Any, lora: LoraSettings) -> Iterator[slice]:
    """The columns of the result that belong to changed layers."""
    weight = getattr(layer, "weight", None)
    if not hasattr(layer, "quant_method") or not isinstance(weight, Tensor) or weight.dim() != 2:
        return
    above, _, own = name.rpartition(".")
    sizes = layer.output_partition_sizes if own in PARTS else [len(weight)]
    first = 0
    for part, size in zip(PARTS.get(own, (own,)), sizes, strict=True):
        if lora.changes(f"{above}.{part}"):
            yield slice(first, first + size)
        first += size


def _adapt(layer: Any, outputs: list[slice], lora: LoraSettings) -> None:
    weight, updates, num_rows = layer.weight, [], 0
    for number, columns in enumerate(outputs):
        size = columns.stop - columns.start
        ranks = slice(number * lora.rank, (number + 1) * lora.rank)
        updates.append(_Update(outputs=columns, ranks=ranks, rows=slice(num_rows, num_rows + size)))
        num_rows += size
    for name, shape in (
        ("lora_A", (len(outputs) * lora.rank, weight.shape[1])),
        ("lora_B", (num_rows, lora.rank)),
    ):
        zeros = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        layer.register_parameter(name, nn.Parameter(zeros, requires_grad=False))
    layer.quant_method = AdaptedMethod(layer.quant_method, tuple(updates), lora.scale)


def layers_with_other_scale(model: Any, scale: float) -> tuple[str, ...]:
    """The adapted layers of a model whose updates are multiplied by another number."""
    methods = ((name, getattr(layer, "quant_method", None)) for name, layer in model.named_modules())
    return tuple(name for name, one in methods if isinstance(one, AdaptedMethod) and one.scale != scale)
