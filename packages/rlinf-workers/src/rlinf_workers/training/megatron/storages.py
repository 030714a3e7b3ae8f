"""Memory of a device that is put aside in host memory, for tensors that alias each other in many ways.

A model under megatron-core has parameters, gradients and masters that are views of common buffers. So it is the
storages that go: each keeps its identity, is emptied, and is filled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Storages:
    """The storages under some tensors.

    Args:
        tensors: all tensors whose memory goes, asked for at each time; several may share a storage.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._aside: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Identity of a storage -> it, empty, and its bytes in host memory."""

    @torch.no_grad()
    def offload(self) -> None:
        """Leaves all of the tensors without memory until `onload`; again: nothing happens."""
        if self._aside:
            return
        for tensor in self._tensors():
            storage = tensor.detach().untyped_storage()
            if storage._cdata not in self._aside:
                self._aside[storage._cdata] = storage, torch.UntypedStorage(storage.nbytes()).copy_(storage)
                storage.resize_(0)

    @torch.no_grad()
    def onload(self) -> None:
        """The inverse; nothing happens where nothing is put aside."""
        for storage, bytes_aside in self._aside.values():
            storage.resize_(bytes_aside.nbytes())
            storage.copy_(bytes_aside)
        self._aside.clear()

    def readable(self, tensor: Tensor) -> Tensor:
        """One of the tensors, from host memory if it is put aside; no copy."""
        found = self._aside.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        return torch.empty(0, dtype=tensor.dtype).set_(found[1], tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore[reportCallIssue]
