"""A model whose linear layers hold their weights in FP8 and compute with what those stand for (weight-only FP8).

Half the memory of bfloat16, and no kernel of its own: a module's weight is computed from values and scales whenever its
forward pass reads it. What is quantized follows published FP8 checkpoints (rlinf_comm.weights.layouts.canonical): the
projections of attention, MLPs and experts, but not embeddings, head, norms and routers.

A quantized parameter keeps its name and has the scales beside it, `weight` and `weight_scale_inv`; both are filled by a
weight sync like any other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_comm.weights.fp8 import dequantize, quantize
from rlinf_comm.weights.layouts import is_quantized, scales_of


@torch.no_grad()
def quantize_modules(model: nn.Module) -> None:
    """Quantizes the linear layers of a model in place, with the weights that it has.

    Raises: ValueError for a model without any that are known; NonFiniteWeightError.
    """
    num_quantized = 0
    for path, module in list(model.named_modules()):
        names = [
            name for name, one in module.named_parameters(recurse=False) if _quantizes(module, f"{path}.{name}", one)
        ]
        if names:
            _quantize(module, path, names)
            num_quantized += len(names)
    if num_quantized == 0:
        raise ValueError(
            f"quantization=fp8: {type(model).__name__} has no linear layer whose name ends in _proj, so nothing would "
            "be quantized; leave it out"
        )


def _quantizes(module: nn.Module, name: str, parameter: Tensor) -> bool:
    is_matrix = isinstance(module, nn.Linear) or parameter.dim() == 3  # the experts of a layer, stacked
    return is_matrix and is_quantized(name)


def _quantize(module: Any, path: str, names: list[str]) -> None:
    dtype = getattr(module, names[0]).dtype
    for name in names:
        values, scales = quantize(getattr(module, name), f"{path}.{name}")
        module._parameters[name] = nn.Parameter(values, requires_grad=False)
        module.register_parameter(scales_of(name), nn.Parameter(scales, requires_grad=False))
    module.__class__ = _quantized_class(type(module), tuple(names), dtype)


@functools.cache
def _quantized_class(cls: type[nn.Module], names: tuple[str, ...], dtype: torch.dtype) -> type[nn.Module]:
    """A subclass whose attributes with these names are computed from the parameters.

    Args:
        dtype: of the attributes.
    """

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        # Experts read their stack once for each of them.
        self.__dict__["_dequantized"] = {name: _weight_of(self, name, dtype) for name in names}
        try:
            return cls.forward(self, *arguments, **options)
        finally:
            del self.__dict__["_dequantized"]

    def weight_named(name: str) -> property:
        def weight(self: Any) -> Tensor:
            running = self.__dict__.get("_dequantized")
            return _weight_of(self, name, dtype) if running is None else running[name]

        return property(weight)

    return type(f"FP8{cls.__name__}", (cls,), {"forward": forward, **{name: weight_named(name) for name in names}})


def _weight_of(module: nn.Module, name: str, dtype: torch.dtype) -> Tensor:
    values, scales = module._parameters[name], module._parameters[scales_of(name)]
    assert values is not None and scales is not None, "set when the module was quantized"
    return dequantize(values, scales, dtype)
