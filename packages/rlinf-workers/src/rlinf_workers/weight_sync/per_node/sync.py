"""Weights between machines, sent to each once: a stream delivers a version to the memory of a node's first serving
rank, and all serving ranks of that node copy it from there through shared memory.

The trainer sends each node the bytes of one rank, however many ranks are there. Both hops are attested: the node's
memory against what the trainer packed, and each rank's tensors against the node's memory.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlinf_comm import PeerTimeout, WeightTimeout, weights
from rlinf_comm.weights import ReshardPlan, WeightStore, WeightStoreAddress, crossing_plan, spread_plan
from rlinf_workers.weight_sync.base import Check, WeightPort
from rlinf_workers.weight_sync.shared.sync import SharedReceiver
from rlinf_workers.weight_sync.streams.sync import StreamsReceiver, StreamsSender, StreamsWeightSync, join, name_of

LOOK_S = 60.0
"""A node that has not received a version within this time requests it again."""
RETRY_S = 5.0
"""Delay after a failure that no rank of the process has seen, for the other ranks of the node."""


class PerNodeWeightSync:
    """The directory in which trainers and nodes find each other.

    Args:
        nodes: the node of each serving rank; empty: all are on one.
        host, deltas, num_versions: as in StreamsWeightSync.
    """

    def __init__(
        self,
        edge: str,
        reshard: ReshardPlan,
        *,
        nodes: Sequence[int] = (),
        host: str = "127.0.0.1",
        deltas: bool = True,
        num_versions: int = 2,
    ) -> None:
        self._streams = StreamsWeightSync(
            edge, reshard, host=host, deltas=deltas, device_memory=False, num_versions=num_versions
        )
        self.address = (self._streams.address, list(nodes) or [0] * reshard.num_dst_ranks)

    @staticmethod
    def open_sender(port: WeightPort) -> StreamsSender:
        return StreamsWeightSync.open_sender(_crossing(port, port.rank))

    @staticmethod
    def open_receiver(port: WeightPort) -> NodeReceiver:
        return NodeReceiver(port)


class NodeReceiver:
    """The serving end."""

    def __init__(self, port: WeightPort) -> None:
        _, nodes = port.address
        node = nodes[port.rank]
        number, ranks = sorted(set(nodes)).index(node), [rank for rank, its in enumerate(nodes) if its == node]
        self._edge, self._attests = port.edge, port.attests
        self._rank = ranks.index(port.rank)
        self._spread = spread_plan(port.reshard, nodes, node)
        self._keeper_name = name_of(port.edge, "receive", number)
        self._keeper: _Keeper | None = None
        self._receiver: weights.StoreReceiver | None = None
        crossing = _crossing(port, number)
        if self._rank == 0:
            mates = [_mate(port.edge, rank) for rank in ranks[1:]]
            self._keeper = _Keeper(StreamsWeightSync.open_receiver(crossing), port.edge, self._spread, mates)
            weakref.finalize(self, self._keeper.end)
            self._open(self._keeper.store)
        else:
            self._peer = join(crossing, _mate(port.edge, port.rank))

    def receive(self, tensors: Mapping[str, Tensor], policy_version: int, timeout_s: float = 60.0) -> Check:
        end_s = time.monotonic() + timeout_s
        if self._receiver is None:
            self._open(WeightStore.open(self._address(policy_version, timeout_s)))
        assert self._receiver is not None
        if self._keeper is not None:
            self._receiver.want(policy_version)
            self._keeper.wait_for(policy_version, timeout_s)
        return self._shared.receive(tensors, policy_version, max(0.0, end_s - time.monotonic()))

    def _open(self, store: WeightStore) -> None:
        self._receiver = weights.StoreReceiver(store, self._spread, self._rank, attests=self._attests)
        self._shared = SharedReceiver(self._receiver, attests=self._attests)

    def _address(self, policy_version: int, timeout_s: float) -> WeightStoreAddress:
        try:
            return self._peer.receive(self._keeper_name, timeout_s=timeout_s)
        except PeerTimeout as error:
            raise WeightTimeout(
                f"weights {self._edge}, version {policy_version}: the first rank of this node has not said within "
                f"{timeout_s:g} s where they come: {error}",
                expected_version=policy_version,
            ) from error


class _Keeper:
    """The shared memory of a node, and the thread that receives each version that one of its ranks requests.

    Args:
        mates: names of the other ranks' peers.
    """

    def __init__(self, stream: StreamsReceiver, edge: str, spread: ReshardPlan, mates: Sequence[str]) -> None:
        self.store = WeightStore.create(spread, name=edge)
        self._stream, self._edge, self._mates = stream, edge, list(mates)
        self._sender = weights.StoreSender(self.store, spread, 0)
        (buffers,) = spread.src_buffers
        self._held = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in buffers.items()}
        self._came = self._republished = -1
        """The version that `_held` holds, and the last one that the ranks may take."""
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._has_ended = False
        threading.Thread(target=self._keep, name=f"weights {edge}", daemon=True).start()

    def wait_for(self, policy_version: int, timeout_s: float) -> None:
        """Returns when the ranks may read this version. Raises: WeightTimeout, or the reason why it will not arrive."""
        with self._changed:
            self._failure = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._republished >= policy_version or self._failure is not None, timeout_s)
            if self._republished >= policy_version:
                return
            if self._failure is not None:
                raise self._failure
        raise WeightTimeout(
            f"weights {self._edge}: version {policy_version} has not come to this node within {timeout_s:g} s",
            expected_version=policy_version,
        )

    def end(self) -> None:
        """The weight sync was reopened or is not needed any more; its memory is freed within `LOOK_S`."""
        self._has_ended = True

    def _keep(self) -> None:
        while not self._has_ended:
            try:
                self._tell_mates()
                version = self._sender.wait_for_wanted(self._republished, LOOK_S)
                if version is not None:
                    self._bring(version)
            except Exception as error:  # noqa: BLE001 - raised by `wait_for`
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._failure is None, RETRY_S)
        self._stream.peer.close()

    def _tell_mates(self) -> None:
        while self._mates:
            self._stream.peer.send(self._mates[0], self.store.address, timeout_s=LOOK_S)
            del self._mates[0]

    def _bring(self, policy_version: int) -> None:
        if self._came != policy_version:
            self._sender.finish_reads()
            try:
                self._stream.receive(self._held, policy_version, LOOK_S)
            except WeightTimeout:
                return  # requesters have their own timeout
            self._came = policy_version
        self._sender.publish_by_reference(self._held, policy_version)
        with self._changed:
            self._republished, self._failure = policy_version, None
            self._changed.notify_all()


def _crossing(port: WeightPort, rank: int) -> WeightPort:
    """The port of a trainer's rank, or of a node, for the streams between them."""
    streams, nodes = port.address
    return replace(port, rank=rank, reshard=crossing_plan(port.reshard, nodes), address=streams)


def _mate(edge: str, rank: int) -> str:
    """The peer name under which a rank gets the address of its node's memory."""
    return f"{edge}, of node {rank}"
