"""Layers of small policies, orthogonally initialised with the gains usual since arXiv:2005.12729: hidden sqrt(2),
policy head 0.01 * sqrt(2), value head 1."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn

HIDDEN_GAIN = math.sqrt(2)
POLICY_GAIN = 0.01 * math.sqrt(2)
VALUE_GAIN = 1.0

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def orthogonal(layer: Layer, gain: float = HIDDEN_GAIN) -> Layer:
    """The layer with an orthogonal weight and a bias of 0."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def tanh_tower(size: int, hidden: tuple[int, ...], out: int, head_gain: float) -> nn.Sequential:
    """[..., size] -> [..., out], with tanh layers in between."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [orthogonal(nn.Linear(size, width)), nn.Tanh()]
        size = width
    return nn.Sequential(*layers, orthogonal(nn.Linear(size, out), head_gain))


def in_own_dtype(module: nn.Module, values: Tensor) -> Tensor:
    """The module's output for values converted to the dtype of its parameters; returns at least float32."""
    output = module(values.to(next(module.parameters()).dtype))
    return output.to(torch.promote_types(output.dtype, torch.float32))
