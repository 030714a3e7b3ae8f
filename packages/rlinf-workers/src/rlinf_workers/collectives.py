"""Collectives among the ranks of one worker group: torch.distributed, gloo for host memory and NCCL for GPU memory."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_workers.launcher.base import Identity

TIMEOUT = timedelta(minutes=10)


class RankGroup:
    """All ranks of a worker group; with one rank every collective is the identity."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks

    @classmethod
    def connect(cls, identity: Identity) -> RankGroup:
        """Meets the other ranks through the rendezvous file; blocks until all are there."""
        if identity.num_ranks > 1 and not dist.is_initialized():
            on_gpu = any(name.startswith("cuda") for name in identity.devices)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks share this host; needs no name resolution
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                init_method=f"file://{identity.rendezvous}",
                rank=identity.rank,
                world_size=identity.num_ranks,
                timeout=TIMEOUT,
            )
        return cls(identity.rank, identity.num_ranks)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums over ranks in place. With two ranks the result does not depend on the order: float addition commutes."""
        if self.num_ranks > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrites with the tensor of rank `source`."""
        if self.num_ranks > 1:
            dist.broadcast(tensor, source)
        return tensor

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        if self.num_ranks > 1:
            self.sum_(torch.zeros(1))
