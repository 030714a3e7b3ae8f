"""Linear layers of SGLang and vLLM that compute with a low-rank adapter (LoRA) beside their weights, in the engine's
processes: y = W x + scale * B (A x), as in models/adapted_modules.py.

Both engines merge layers (q, k and v; gate and up) and shard them, and both compute them by `quant_method.apply`,
before ranks add or gather their parts. Here it adds the update of each part that has an adapter. A and B are parameters
beside `weight`, stacked as `rlinf_comm.weights.layouts.adapted_layout` describes, so that a weight sync fills them in
place. That layout also says which layers these are, whatever the engine calls them, and in a vision tower too.

There is one adapter, and all requests use it. The LoRA of the engines themselves serves many: it reads adapters from
files, multiplies B by the scale when it does, and chooses an adapter for each token. vLLM 0.32.0 does so on a CPU by
gathering A and B for every token, and compiles no graphs meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rlinf_comm.weights import RankLayout
from rlinf_comm.weights.layouts import LORA_A

WEIGHT = ".weight"


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


def adapt_layers(model: Any, held: RankLayout, scale: float, rename: Callable[[str], str] = str) -> None:
    """Adds an adapter of zeros to the linear layers that it changes.

    Args:
        held: this process's parameters with the adapter's, by `adapted_layout`.
        scale: the factor of updates.
        rename: the engine's name of a parameter -> its name in `held`.

    Raises: ValueError naming a layer that the model does not have, has in another size, or computes otherwise than with
        a `quant_method`: its update would be missing.
    """
    layers = {rename(name + WEIGHT): layer for name, layer in model.named_modules() if hasattr(layer, "quant_method")}
    for name, updates in _updates(held).items():
        layer, shape = layers.get(name), held.buffers[name].shape
        if layer is None or tuple(layer.weight.shape) != shape:
            actual = "has no such linear layer" if layer is None else f"has {list(layer.weight.shape)}"
            raise ValueError(f"adapter: {name} is to be {list(shape)}, and {type(model).__name__} {actual}")
        _adapt(layer, name.removesuffix(WEIGHT), held, updates, scale)


def _updates(held: RankLayout) -> dict[str, list[_Update]]:
    """Buffer with weights of changed layers -> their updates. Adjacent parts of one layer have one."""
    reduced = {(block.buffer, block.name): block for block in held.blocks}
    updates: dict[str, list[_Update]] = {}
    for block in sorted(held.blocks, key=lambda block: block.offset):
        a = reduced.get((block.buffer.removesuffix(WEIGHT) + ".lora_A", block.name.removesuffix(WEIGHT) + LORA_A))
        if a is None:
            continue
        first, first_rank = (one.offset // held.buffers[one.buffer].shape[1] for one in (block, a))
        outputs = slice(first, first + block.box.shape[0])
        ranks = slice(first_rank, first_rank + a.box.shape[0])
        parts = updates.setdefault(block.buffer, [])
        begin = parts[-1].rows.stop if parts else 0
        rows = slice(begin, begin + block.box.shape[0])
        if parts and parts[-1].ranks == ranks and parts[-1].outputs.stop == first:
            last = parts.pop()
            outputs, rows = slice(last.outputs.start, outputs.stop), slice(last.rows.start, rows.stop)
        parts.append(_Update(outputs=outputs, ranks=ranks, rows=rows))
    return updates


def _adapt(layer: Any, name: str, held: RankLayout, updates: list[_Update], scale: float) -> None:
    for part in ("lora_A", "lora_B"):
        zeros = torch.zeros(held.buffers[f"{name}.{part}"].shape, dtype=layer.weight.dtype, device=layer.weight.device)
        layer.register_parameter(part, nn.Parameter(zeros, requires_grad=False))
    layer.quant_method = AdaptedMethod(layer.quant_method, tuple(updates), scale)


def layers_with_other_scale(model: Any, scale: float) -> tuple[str, ...]:
    """The layers of a model that have an adapter and multiply its updates by another number, or add none."""
    methods = ((name, layer.quant_method) for name, layer in model.named_modules() if hasattr(layer, "lora_A"))
    return tuple(name for name, one in methods if not isinstance(one, AdaptedMethod) or one.scale != scale)
