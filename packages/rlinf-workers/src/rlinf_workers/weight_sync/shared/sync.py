"""Weights through shared memory: serving ranks copy straight from the shards of the trainer's ranks or, if the trainer
is about to change them, from a store.

rlinf_comm.weights implements the copies and digests; this file moves them to and from other devices. Weights on a GPU
go through the store, as do weights that a trainer computes for each version (merged adapters).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlinf_comm import weights
from rlinf_comm.weights import ReshardPlan, WeightStore, WeightStoreAddress
from rlinf_workers.weight_sync.base import Check, FinishReads, WeightPort
from rlinf_workers.weight_sync.host_memory import HostCopies


class SharedWeightSync:
    """A store on one machine, created by the driver.

    Args:
        num_versions: versions that it keeps until all receivers have them.
    """

    def __init__(self, edge: str, reshard: ReshardPlan, *, num_versions: int = 2) -> None:
        self._store = WeightStore.create(reshard, name=edge, num_slots=num_versions)

    @property
    def address(self) -> WeightStoreAddress:
        return self._store.address

    @staticmethod
    def open_sender(port: WeightPort) -> SharedSender:
        return SharedSender(weights.StoreSender(WeightStore.open(port.address), port.reshard, port.rank))

    @staticmethod
    def open_receiver(port: WeightPort) -> SharedReceiver:
        store = WeightStore.open(port.address)
        receiver = weights.StoreReceiver(store, port.reshard, port.rank, attests=port.attests)
        return SharedReceiver(receiver, attests=port.attests)


class SharedSender:
    """The trainer's end."""

    def __init__(self, sender: weights.StoreSender) -> None:
        self._sender = sender

    def publish(self, tensors: Mapping[str, Tensor], policy_version: int) -> FinishReads:
        self._sender.publish_by_reference(
            {name: tensor.detach().cpu() for name, tensor in tensors.items()}, policy_version
        )
        return self._sender.finish_reads


class SharedReceiver:
    """The serving end. The store is host memory; tensors on a GPU are filled and checked through host copies."""

    def __init__(self, receiver: weights.StoreReceiver, *, attests: bool) -> None:
        self._receiver, self._attests = receiver, attests
        self._copies = HostCopies()

    def receive(self, tensors: Mapping[str, Tensor], policy_version: int, timeout_s: float = 60.0) -> Check:
        check_copies = self._receiver.take(self._copies.of(tensors), policy_version, timeout_s)
        self._copies.place(tensors)

        def check() -> None:
            check_copies()
            if self._attests:
                self._copies.check(tensors, policy_version)

        return check
