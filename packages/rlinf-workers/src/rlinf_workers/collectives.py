"""Collectives among the ranks of one worker group: torch.distributed, gloo for host memory and NCCL for GPU memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_comm import pack, unpack
from rlinf_workers.addresses import ON_ONE_MACHINE, interface_of, own_address
from rlinf_workers.gloo_guard import guard_gloo
from rlinf_workers.launchers.base import Identity, RequestSender
from rlinf_workers.spans import WaitTable

T = TypeVar("T")
TIMEOUT = timedelta(days=1)
"""Longer than any stage in which ranks wait for each other. The driver detects hangs, because it knows how long a step
should take: it names the missing rank and ends the step."""


class RankGroup:
    """Some ranks of a worker group; with one rank every collective is the identity."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        process_group: dist.ProcessGroup | None = None,
        *,
        name: str = "",
        members: Sequence[int] = (),
        waits: WaitTable | None = None,
    ) -> None:
        """Args:
        rank: among these ranks.
        process_group: None for all ranks of the worker group.
        name: shown in waits.
        members: these ranks, as the worker group counts them.
        waits: where a rank records that it waits for others.
        """
        self.rank = rank
        self.num_ranks = num_ranks
        self._process_group = process_group
        self._name = name
        self._members = tuple(members)
        self._waits = waits
        self._num_collectives = 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums over ranks in place. With two ranks the result does not depend on the order: float addition is
        commutative."""
        if self.num_ranks > 1:
            with self._waiting("all-reduce"):
                dist.all_reduce(tensor, group=self._process_group)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """The maximum over ranks of each element, in place."""
        if self.num_ranks > 1:
            with self._waiting("all-reduce"):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._process_group)
        return tensor

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrites the tensor with that of rank `source` of these ranks."""
        if self.num_ranks > 1:
            group = self._process_group
            sender = source if group is None else dist.get_global_rank(group, source)
            with self._waiting("broadcast"):
                dist.broadcast(tensor, sender, group=group)
        return tensor

    def all_to_all(self, parts: Tensor) -> Tensor:
        """[R, ...], a part for each of these R ranks -> [R, ...], the part that each of them has for this one."""
        if self.num_ranks == 1:
            return parts
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        with self._waiting("all-to-all"):
            dist.all_to_all_single(received, parts, group=self._process_group)
        return received

    def exchange(self, blobs: Sequence[bytes]) -> list[bytes]:
        """All-to-all: bytes for each of these ranks -> bytes that each of them has for this one."""
        sizes = torch.zeros(self.num_ranks, self.num_ranks, dtype=torch.int64)
        sizes[self.rank] = torch.tensor([len(blob) for blob in blobs])
        coming = self.sum_(sizes)[:, self.rank].tolist()
        buffers = [torch.zeros(size, dtype=torch.uint8) for size in coming]
        pending = []
        for number, (blob, into) in enumerate(zip(blobs, buffers, strict=True)):
            if number == self.rank:
                buffers[number] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
                continue
            if blob:
                sent = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
                pending.append((dist.isend(sent, group=self._process_group, group_dst=number), sent))
            if len(into):
                pending.append((dist.irecv(into, group=self._process_group, group_src=number), into))
        with self._waiting("exchange"):
            for work, _ in pending:
                work.wait()
        return [tensor.numpy().tobytes() for tensor in buffers]

    def objects(self, value: T) -> list[T]:
        """All-gather of small picklable objects, by rank."""
        if self.num_ranks == 1:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        with self._waiting("all-gather"):
            dist.all_gather_object(values, value, group=self._process_group)
        return values

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.sum_(torch.zeros(1))

    def _waiting(self, operation: str) -> AbstractContextManager[object]:
        """Context for a wait for the other ranks; counts the collectives."""
        self._num_collectives += 1
        if self._waits is None:
            return nullcontext()
        return self._waits.waiting(
            "collective", self._name, number=self._num_collectives, operation=operation, ranks=self._members
        )


def exchanged(values: Sequence[T], ranks: RankGroup) -> list[T]:
    """All-to-all of values that can be sent through a channel: one for each of some ranks -> those from each of
    them."""
    if ranks.num_ranks == 1:
        return list(values)
    return [unpack(blob) for blob in ranks.exchange([pack(value) for value in values])]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroups:
    """The groups that a rank is in."""

    all: RankGroup
    """All ranks of the worker group."""
    replica: RankGroup
    """The ranks of its replica."""
    replicas: RankGroup
    """The ranks at the same position in all replicas."""


def backends_of(identity: Identity) -> str:
    """The backend of a rank's collectives, as torch.distributed names it."""
    return "cpu:gloo,cuda:nccl" if identity.is_on_gpu else "gloo"


def connect(identity: Identity, waits: WaitTable, request: RequestSender) -> RankGroups:
    """Connects to the other ranks; blocks until all have joined."""
    ranks, alone = range(identity.num_ranks), RankGroup(0, 1)
    every = RankGroup(identity.rank, len(ranks), name="all ranks", members=ranks, waits=waits)
    if identity.num_ranks > 1 and not dist.is_initialized():
        guard_gloo()
        with waits.waiting("collective", "all ranks", operation="meeting", ranks=tuple(ranks)):
            dist.init_process_group(
                backends_of(identity),
                store=_meeting_place(identity, request),
                rank=identity.rank,
                world_size=identity.num_ranks,
                timeout=TIMEOUT,
            )
    size, num_replicas = identity.num_ranks_per_replica, identity.num_replicas
    if size == 1:
        return RankGroups(all=every, replica=alone, replicas=every)
    if num_replicas == 1:
        return RankGroups(all=every, replica=every, replicas=alone)
    # Every rank takes part in creating every group, in the same order.
    replicas = [ranks[first : first + size] for first in ranks[::size]]
    places = [ranks[place::size] for place in range(size)]
    of_replica: list[Any] = [dist.new_group(members, timeout=TIMEOUT) for members in replicas]
    of_place: list[Any] = [dist.new_group(members, timeout=TIMEOUT) for members in places]
    replica, place = identity.replica, identity.rank_in_replica
    own = RankGroup(place, size, of_replica[replica], name="the replica", members=replicas[replica], waits=waits)
    peers = RankGroup(replica, num_replicas, of_place[place], name="the replicas", members=places[place], waits=waits)
    return RankGroups(all=every, replica=own, replicas=peers)


def connect_alone(identity: Identity) -> None:
    """Creates a process group of this rank alone, for code that requires one."""
    _stay_on_this_machine()
    guard_gloo()
    dist.init_process_group(backends_of(identity), store=dist.HashStore(), rank=0, world_size=1)


def _stay_on_this_machine() -> None:
    for variable, value in ON_ONE_MACHINE.items():
        os.environ.setdefault(variable, value)


def _meeting_place(identity: Identity, request: RequestSender) -> dist.Store:
    """The rendezvous of the ranks: a file, or the first rank's process."""
    if "/" in identity.rendezvous:
        _stay_on_this_machine()
        return dist.FileStore(identity.rendezvous, identity.num_ranks)
    address = identity.rendezvous or own_address()
    interface = interface_of(address)
    if interface == ON_ONE_MACHINE["GLOO_SOCKET_IFNAME"]:
        _stay_on_this_machine()
    elif interface is not None:  # otherwise gloo uses the address of the host name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if identity.rank > 0:
        return dist.TCPStore(*request("meeting", None).result(), is_master=False, timeout=TIMEOUT)
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=listener.detach()
    )
    request("meeting", (address, port), wants_reply=False)
    return store
