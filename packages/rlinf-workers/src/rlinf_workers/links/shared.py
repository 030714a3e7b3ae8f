"""Weights through a store in shared memory: the trainer's ranks publish straight from their shards, the serving ranks
copy straight into theirs.

The bytes and the digests are rlinf_comm.weights' business; this file brings them to and from other devices.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlinf_comm import weights
from rlinf_comm.errors import WeightMismatchError
from rlinf_comm.weights import ReshardPlan, WeightStore, WeightStoreAddress
from rlinf_workers.links.base import WeightPort


class SharedWeightLink:
    """A store of one machine, made by the driver."""

    def __init__(self, edge: str, reshard: ReshardPlan) -> None:
        self._store = WeightStore.create(reshard, name=edge)

    @property
    def address(self) -> WeightStoreAddress:
        return self._store.address

    @staticmethod
    def open_sender(port: WeightPort) -> SharedSender:
        return SharedSender(weights.WeightSender(WeightStore.open(port.address), port.reshard, port.rank))

    @staticmethod
    def open_receiver(port: WeightPort) -> SharedReceiver:
        return SharedReceiver(weights.WeightReceiver(WeightStore.open(port.address), port.reshard, port.rank))


class SharedSender:
    """The trainer's end."""

    def __init__(self, sender: weights.WeightSender) -> None:
        self._sender = sender

    def publish(self, tensors: Mapping[str, Tensor], policy_version: int) -> None:
        self._sender.publish({name: tensor.detach().cpu() for name, tensor in tensors.items()}, policy_version)


class SharedReceiver:
    """The serving end. The store holds host memory. Tensors on a GPU are filled through a copy there, which is
    verified, and read back to be compared."""

    def __init__(self, receiver: weights.WeightReceiver) -> None:
        self._receiver = receiver
        self._staging: dict[str, Tensor] = {}

    def receive(self, tensors: Mapping[str, Tensor], policy_version: int, timeout_s: float = 60.0) -> None:
        on_host = {name: self._host_tensor(name, tensor) for name, tensor in tensors.items()}
        self._receiver.receive(on_host, policy_version, timeout_s)
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                tensor.detach().copy_(on_host[name])
                if not torch.equal(tensor.detach().cpu(), on_host[name]):
                    raise WeightMismatchError(
                        f"{name}: the device holds other bytes than it was sent (version {policy_version})"
                    )

    def _host_tensor(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        if name not in self._staging:
            self._staging[name] = torch.empty_like(tensor, device="cpu")
        return self._staging[name]
