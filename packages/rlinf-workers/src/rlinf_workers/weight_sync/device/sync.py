"""Weights through device memory: between GPUs of one machine that can read each other's memory, and on one GPU.

Servers copy from the trainer's own tensors while those stay as they are, on the device and unchanged; otherwise a
trainer's rank keeps a version in other memory of its device until all servers have received it. Both are mapped once,
and stay so. rlinf_comm.weights.device implements the copies and digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from rlinf_comm import DeviceUnavailable, IpcError
from rlinf_comm.weights import ReshardPlan, WeightStore, WeightStoreAddress
from rlinf_comm.weights.device import (
    CudaDevice,
    DeviceWeightReceiver,
    DeviceWeightSender,
    TransferDevice,
    create_device_store,
)
from rlinf_workers.errors import WeightSyncRefused
from rlinf_workers.weight_sync.base import Check, FinishReads, WeightPort


class DeviceWeightSync:
    """Shared memory of one machine in which ranks exchange the device addresses of the weights.

    Args:
        num_versions: versions that a trainer's rank keeps on its device until all receivers have them.
    """

    def __init__(self, edge: str, reshard: ReshardPlan, *, num_versions: int = 2) -> None:
        self._reshard = reshard
        self._store = create_device_store(reshard, name=edge, num_slots=num_versions)

    @staticmethod
    def make_device() -> TransferDevice:
        """The one of the calling process."""
        return CudaDevice()

    @property
    def address(self) -> WeightStoreAddress:
        return self._store.address

    @classmethod
    def open_sender(cls, port: WeightPort) -> DeviceSender:
        try:
            device = cls.make_device()
            sender = DeviceWeightSender(WeightStore.open(port.address), port.reshard, port.rank, device)
            return DeviceSender(port.edge, sender)
        except (DeviceUnavailable, IpcError) as error:
            raise WeightSyncRefused(f"{port.edge}, sender {port.rank}: {error}") from error

    @classmethod
    def open_receiver(cls, port: WeightPort) -> DeviceReceiver:
        """Tests the senders that are already open; others are tested with the first version."""
        try:
            device = cls.make_device()
            store = WeightStore.open(port.address)
            return DeviceReceiver(DeviceWeightReceiver(store, port.reshard, port.rank, device, attests=port.attests))
        except (DeviceUnavailable, IpcError) as error:
            raise WeightSyncRefused(f"{port.edge}, receiver {port.rank}: {error}") from error


class DeviceSender:
    """The trainer's end."""

    def __init__(self, edge: str, sender: DeviceWeightSender) -> None:
        self._edge, self._sender = edge, sender
        self._version = -1
        """The last published one."""

    def publish(self, tensors: Mapping[str, Tensor], policy_version: int) -> FinishReads:
        self._version, tensors = policy_version, {name: tensor.detach() for name, tensor in tensors.items()}
        with self._naming():
            self._sender.publish_by_reference(tensors, policy_version)
        return self._finish_reads

    def withdraw(self) -> None:
        with self._naming():
            self._sender.withdraw()

    def _finish_reads(self) -> None:
        with self._naming():  # it may copy
            self._sender.finish_reads()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except IpcError as error:
            raise IpcError(
                f"weights {self._edge}, version {self._version}: {error}; free memory on the device, or use "
                "weight sync `shared`, which keeps versions in host memory"
            ) from error


class DeviceReceiver:
    """The serving end."""

    def __init__(self, receiver: DeviceWeightReceiver) -> None:
        self._receiver = receiver

    def receive(self, tensors: Mapping[str, Tensor], policy_version: int, timeout_s: float = 60.0) -> Check:
        return self._receiver.take(
            {name: tensor.detach() for name, tensor in tensors.items()}, policy_version, timeout_s
        )
