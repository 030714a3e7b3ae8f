"""Weights of a device as weight syncs see them: in host memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlinf_comm import WeightMismatchError


class HostCopies:
    """Copies in host memory of a rank's tensors on a GPU, made once; tensors of the host stand for themselves."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a weight sync fills in the tensors' place."""
        return {name: self._host_tensor(name, tensor) for name, tensor in tensors.items()}

    def place(self, tensors: Mapping[str, Tensor]) -> None:
        """Brings the copies to the device."""
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                tensor.detach().copy_(self._copies[name])

    def check(self, tensors: Mapping[str, Tensor], policy_version: int) -> None:
        """Reads the device back. Raises WeightMismatchError."""
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu" and not torch.equal(tensor.detach().cpu(), self._copies[name]):
                raise WeightMismatchError(
                    f"{name}: the device holds other bytes than it was sent (version {policy_version})",
                    tensors=(name,),
                    expected_version=policy_version,
                )

    def _host_tensor(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        if name not in self._copies:
            self._copies[name] = torch.empty_like(tensor, device="cpu")
        return self._copies[name]
