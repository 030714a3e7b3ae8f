"""Offloads device memory of tensors that alias each other to host memory.

Under megatron-core, parameters, gradients and masters are views of shared buffers. So the storages are offloaded: each
keeps its identity, is emptied, and is filled again. Each has its own place in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from rlinf_workers.models.placement import HostPlaces


class Storages:
    """The storages under some tensors.

    Args:
        tensors: returns names and tensors to offload, called every time; several may share a storage, whose place on
            the host gets the name of the first.
    """

    def __init__(self, tensors: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._tensors = tensors
        self._places = HostPlaces()
        self._aside: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        """id of a storage -> the empty storage and its bytes in host memory."""

    @property
    def are_away(self) -> bool:
        return bool(self._aside)

    @torch.no_grad()
    def offload(self) -> None:
        """Frees the memory of all tensors until `onload`, including tensors created since the last call."""
        for name, tensor in self._tensors():
            storage = tensor.detach().untyped_storage()
            if storage._cdata not in self._aside and storage.nbytes():
                self._aside[storage._cdata] = storage, self._places.take(name, _bytes(storage))
                storage.resize_(0)

    @torch.no_grad()
    def onload(self) -> None:
        """The inverse; does nothing if nothing is offloaded. Tensors that no longer exist are not restored."""
        for _, tensor in self._tensors() if self._aside else ():
            if (entry := self._aside.pop(tensor.untyped_storage()._cdata, None)) is not None:
                storage, place = entry
                storage.resize_(place.nbytes)
                _bytes(storage).copy_(place, non_blocking=True)
        self._aside.clear()

    def here(self, tensor: Tensor) -> Tensor:
        """One of the tensors, detached: itself, or its copy in host memory while it is offloaded. Writes to that copy
        are kept by `onload`."""
        tensor = tensor.detach()
        entry = self._aside.get(tensor.untyped_storage()._cdata)
        if entry is None:
            return tensor
        place = entry[1].untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(place, tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore[reportCallIssue]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a storage, as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType, reportCallIssue]
