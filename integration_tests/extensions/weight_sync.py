"""A custom weight sync: through a TCP socket of the driver, which stores the last two versions of each rank."""

import hashlib
import socket
from datetime import timedelta

from safetensors.torch import load, save
from torch.distributed import DistStoreError, TCPStore

from rlinf_comm import WeightMismatchError, WeightTimeout
from rlinf_comm.weights import ReshardExecutor


class SocketSync:
    def __init__(self, edge, reshard, *, host="127.0.0.1"):
        listener = socket.create_server((host, 0))  # the store by itself listens at every address
        self.address = listener.getsockname()
        self._store = TCPStore(
            *self.address, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    @staticmethod
    def open_sender(port):
        return SocketSender(port)

    @staticmethod
    def open_receiver(port):
        return SocketReceiver(port)


class SocketSender:
    def __init__(self, port):
        self._rank, self._kept = port.rank, []
        self._store = TCPStore(*port.address, is_master=False)

    def publish(self, tensors, policy_version):
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        self._kept.append(f"{policy_version} of {self._rank}")
        value = hashlib.sha256(content).digest() + content
        self._store.set(self._kept[-1], value)  # pyright: ignore[reportArgumentType] - takes bytes, though typed str
        if len(self._kept) > 2:
            self._store.delete_key(self._kept.pop(0))


class SocketReceiver:
    def __init__(self, port):
        self._edge = port.edge
        self._copies = ReshardExecutor(port.reshard, port.rank)
        self._store = TCPStore(*port.address, is_master=False)

    def receive(self, tensors, policy_version, timeout_s=60.0):
        keys = {rank: f"{policy_version} of {rank}" for rank in self._copies.src_ranks}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=timeout_s))
        except DistStoreError as error:
            raise WeightTimeout(f"{self._edge}: version {policy_version} did not come in {timeout_s} s") from error
        contents = {rank: self._store.get(key) for rank, key in keys.items()}
        if any(hashlib.sha256(content[32:]).digest() != content[:32] for content in contents.values()):
            raise WeightMismatchError(f"{self._edge}: version {policy_version} came with other bytes than were sent")
        self._copies.run({rank: load(content[32:]) for rank, content in contents.items()}, tensors)
