"""What a model is served as: plain weights under their canonical names, whatever they are trained through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """A change of a weight, scale * B A."""

    a: Tensor
    """[r, in]"""
    b: Tensor
    """[out, r]"""
    scale: float

    @torch.no_grad()
    def added_to(self, weight: Tensor) -> Tensor:
        """A new tensor [out, in] of the weight's dtype, the sum rounded once."""
        return (weight + (self.b @ self.a) * self.scale).to(weight.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The weights of a model, and what its adapter adds to some of them."""

    weights: Mapping[str, Tensor]
    """Canonical name -> what the model holds, without its adapter."""
    changes: Mapping[str, LowRank] = field(default_factory=dict)
    """Canonical name -> what serving adds; on the device of the weight."""

    def merged(self) -> Mapping[str, Tensor]:
        """What serves. A changed weight is made whenever it is read and kept by nobody here, so that a reader who takes
        one after another has one more tensor in memory, not one more model."""
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
