"""The weights that a model serves, under canonical names: merged with an adapter, or beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rlinf_comm.weights.layouts import LORA_A, LORA_B


class WeightChange(Protocol):
    """An adapter's update of one tensor of a model, which may hold parts of several canonical ones."""

    def added_to(self, weight: Tensor) -> Tensor:
        """A new tensor like the weight, with the update."""
        ...

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The adapter's tensors by canonical name, for the weight of that name; no copies."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """A low-rank update of a weight, scale * B A."""

    a: Tensor
    """[r, in]"""
    b: Tensor
    """[out, r]"""
    scale: float

    @torch.no_grad()
    def added_to(self, weight: Tensor) -> Tensor:
        """A new tensor [out, in] in the weight's dtype; the sum is rounded once."""
        return (weight + (self.b @ self.a) * self.scale).to(weight.dtype)

    def tensors(self, name: str) -> dict[str, Tensor]:
        layer = name.removesuffix(".weight")
        return {layer + LORA_A: self.a, layer + LORA_B: self.b}


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The weights of a model, and its adapter's updates of some of them."""

    weights: Mapping[str, Tensor]
    """Canonical name -> the model's weight, without its adapter."""
    changes: Mapping[str, WeightChange] = field(default_factory=dict)
    """Canonical name -> the adapter's update, on the device of the weight."""

    def unmerged(self) -> Mapping[str, Tensor]:
        """The weights as they are, and the adapter's tensors under their canonical names; no copies."""
        tensors = dict(self.weights)
        for name, change in self.changes.items():
            tensors |= change.tensors(name)
        return tensors

    def merged(self) -> Mapping[str, Tensor]:
        """The weights of an engine that serves no adapter. A changed weight is merged each time it is read and not
        kept, so reading one after another takes the memory of one extra tensor, not of a second model."""
        return _Merged(self) if self.changes else self.weights


class _Merged(Mapping[str, Tensor]):
    def __init__(self, served: Served) -> None:
        self._served = served

    def __getitem__(self, name: str) -> Tensor:
        weight, change = self._served.weights[name], self._served.changes.get(name)
        return weight if change is None else change.added_to(weight.detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self._served.weights)

    def __len__(self) -> int:
        return len(self._served.weights)
