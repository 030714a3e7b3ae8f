"""Weight edges: the trainer's ranks publish straight from their shards, the serving ranks copy straight into theirs.

The bytes and the digests are rlinf_comm.weights' business; this file gives each rank its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlinf_comm.errors import WeightMismatchError
from rlinf_comm.records import record
from rlinf_comm.weights import Layout, ReshardPlan, TensorSpec, WeightReceiver, WeightSender, WeightStore, plan


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPort:
    """One rank's end of a weight edge."""

    edge: str
    """`source -> target`"""
    side: Literal["send", "receive"]
    rank: int
    address: Any
    """A WeightStore's address."""
    specs: dict[str, TensorSpec]
    num_source_ranks: int
    num_target_ranks: int


def edge_plan(
    specs: Mapping[str, TensorSpec],
    num_source_ranks: int,
    num_target_ranks: int,
    served: Mapping[str, TensorSpec] | None = None,
) -> ReshardPlan:
    """The reshard plan of an edge between replicas (data-parallel trainers, serving engines): every end derives the
    same one.

    Raises: rlinf_comm.errors.LayoutError naming the tensor, when `served` (the target's specs) differ from the
        source's.
    """
    return plan(Layout.replicated(specs, num_source_ranks), Layout.replicated(served or specs, num_target_ranks))


class SendPort:
    """The trainer's end."""

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender

    def publish(self, tensors: Mapping[str, Tensor], policy_version: int) -> None:
        self._sender.publish({name: tensor.detach().cpu() for name, tensor in tensors.items()}, policy_version)


class ReceivePort:
    """The serving end; remembers the version it serves."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver
        self._staging: dict[str, Tensor] = {}
        self.policy_version = -1

    def receive(self, tensors: Mapping[str, Tensor], policy_version: int) -> None:
        """Fills `tensors` in place and checks their digests.

        The store holds host memory. Tensors on a GPU are filled through a copy there, which is verified, and read
        back to be compared.

        Raises: rlinf_comm.errors.WeightMismatchError when what is served is not what was published.
        """
        self.policy_version = -1  # until it is whole and verified, nothing is served
        on_host = {name: self._host_tensor(name, tensor) for name, tensor in tensors.items()}
        self._receiver.receive(on_host, policy_version)
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                tensor.detach().copy_(on_host[name])
                if not torch.equal(tensor.detach().cpu(), on_host[name]):
                    raise WeightMismatchError(
                        f"{name}: the device holds other bytes than it was sent (version {policy_version})"
                    )
        self.policy_version = policy_version

    def _host_tensor(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        if name not in self._staging:
            self._staging[name] = torch.empty_like(tensor, device="cpu")
        return self._staging[name]


def open_port(port: WeightPort) -> SendPort | ReceivePort:
    reshard = edge_plan(port.specs, port.num_source_ranks, port.num_target_ranks)
    store = WeightStore.open(port.address)
    if port.side == "send":
        return SendPort(WeightSender(store, reshard, port.rank))
    return ReceivePort(WeightReceiver(store, reshard, port.rank))
