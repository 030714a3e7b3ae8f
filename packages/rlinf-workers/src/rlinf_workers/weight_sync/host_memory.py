"""Presents weights of a device to weight syncs, in host memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlinf_comm import WeightMismatchError


class HostCopies:
    """Host copies of a rank's GPU tensors, allocated once; host tensors are used as they are."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The host tensors that a weight sync fills."""
        return {name: self._host_tensor(name, tensor) for name, tensor in tensors.items()}

    def place(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the host tensors to the device."""
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                tensor.detach().copy_(self._copies[name])

    def check(self, tensors: Mapping[str, Tensor], policy_version: int) -> None:
        """Reads the device back and compares. Raises: WeightMismatchError."""
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu" and not torch.equal(tensor.detach().cpu(), self._copies[name]):
                raise WeightMismatchError(
                    f"{name}: the device holds other bytes than were copied to it (version {policy_version})",
                    tensors=(name,),
                    expected_version=policy_version,
                )

    def _host_tensor(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        if name not in self._copies:
            self._copies[name] = torch.empty_like(tensor, device="cpu")
        return self._copies[name]
