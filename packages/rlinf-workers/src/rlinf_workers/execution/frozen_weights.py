"""Weights that training does not change, beside an adapter: a server receives them once, and checks them again when
they may have been moved, since no later version overwrites them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from rlinf_comm import WeightMismatchError
from rlinf_comm.weights import tensor_digests
from rlinf_workers.weight_sync.base import FROZEN

FROZEN_VERSION = 0
"""The only version of frozen weights."""


def frozen_end(edge: str) -> str:
    """The name of an edge's end for frozen weights; that of the others is the edge's own."""
    return edge + FROZEN


def is_frozen(end: str) -> bool:
    """Whether an end receives frozen weights."""
    return end.endswith(FROZEN)


def edge_of(end: str) -> str:
    """The edge of an end."""
    return end.removesuffix(FROZEN)


class FrozenWeights:
    """The digests of received frozen weights, by end."""

    def __init__(self) -> None:
        self._attested: set[str] = set()
        self._digests: dict[str, dict[str, int]] = {}
        self._places: dict[str, dict[str, int]] = {}

    def remember(self, end: str, tensors: Mapping[str, Tensor]) -> None:
        """These tensors were compared with what was published, if the end attests."""
        if end not in self._attested:
            return
        self._digests[end], self._places[end] = _digests(tensors), _places(tensors)

    def open(self, end: str, *, attests: bool) -> None:
        """Begins anew, without digests if weights are not attested."""
        self._attested.add(end) if attests else self._attested.discard(end)
        self._digests.pop(end, None)
        self._places.pop(end, None)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._digests))

    def may_have_moved(self, end: str, tensors: Mapping[str, Tensor]) -> bool:
        """Whether tensors lie elsewhere than when they were compared. Those on a GPU may have been away: the allocator
        gives them the same place again."""
        return _places(tensors) != self._places[end] or any(one.device.type != "cpu" for one in tensors.values())

    def check(self, end: str, tensors: Mapping[str, Tensor]) -> None:
        """Compares tensors with those that were received. Raises: WeightMismatchError."""
        expected, actual = self._digests[end], _digests(tensors)
        if wrong := tuple(name for name, digest in expected.items() if actual.get(name) != digest):
            raise WeightMismatchError(
                f"weights {edge_of(end)}: since it was received, frozen weight {wrong[0]} has changed"
                + (f", and {len(wrong) - 1} others" if wrong[1:] else ""),
                tensors=wrong,
            )
        self._places[end] = _places(tensors)


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return tensor_digests({name: tensor.detach() for name, tensor in tensors.items()})


def _places(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
