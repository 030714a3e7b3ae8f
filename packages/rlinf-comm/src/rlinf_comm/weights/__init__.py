"""Weights from one sharding to another, between processes, with proof that they arrived.

    layout.py   canonical tensors, boxes, layouts (table.py: the same in numpy; checks.py: what cannot be)
    plan.py     the intersection of two layouts: which box goes where (sharing.py, coalesce.py)
    by_node.py  a plan in two: to each node once, and there to its ranks
    executor.py runs a plan within one process, also on tensors that others share
    manifest.py digests of all that a rank holds, and their comparison (digests.py: of tensors without a layout)
    store/      the shared-memory executor
    stream/     the same over any link, dense or as deltas

A sync in six lines, the two halves in different processes:

    reshard = reshard_plan(Layout.sharded(specs, 2), Layout.replicated(specs, 3))
    store = WeightStore.create(reshard, name="actor-to-rollout")            # anywhere; send store.address to the others
    StoreSender(store, reshard, src_rank=0).publish(shard, policy_version=7)
    ...
    StoreReceiver(WeightStore.open(address), reshard, dst_rank=2).receive(parameters, policy_version=7)
"""

from __future__ import annotations

from rlinf_comm.weights.by_node import crossing_plan, spread_plan
from rlinf_comm.weights.digests import tensor_digests
from rlinf_comm.weights.executor import ReshardExecutor, execute
from rlinf_comm.weights.layout import Block, Box, BufferSpec, Layout, RankLayout, TensorSpec, specs_of
from rlinf_comm.weights.manifest import DIGEST_MODULUS, BoxDigest, WeightManifest, manifest_of, merge_manifests, verify
from rlinf_comm.weights.plan import Move, MoveTable, Piece, ReshardPlan, reshard_plan
from rlinf_comm.weights.report import SyncReport
from rlinf_comm.weights.store.memory import WeightStore, WeightStoreAddress
from rlinf_comm.weights.store.receiver import StoreReceiver
from rlinf_comm.weights.store.sender import StoreSender
from rlinf_comm.weights.stream.delta import DeltaEncoder, apply_delta
from rlinf_comm.weights.stream.receiver import WeightStreamReceiver
from rlinf_comm.weights.stream.referenced import ReferencedTensors
from rlinf_comm.weights.stream.sender import StreamReport, WeightStreamSender
from rlinf_comm.weights.stream.wire import MessageLink

__all__ = [
    "TensorSpec",
    "Box",
    "BufferSpec",
    "Block",
    "RankLayout",
    "Layout",
    "specs_of",
    "Move",
    "MoveTable",
    "Piece",
    "ReshardPlan",
    "reshard_plan",
    "crossing_plan",
    "spread_plan",
    "ReshardExecutor",
    "execute",
    "WeightManifest",
    "BoxDigest",
    "manifest_of",
    "merge_manifests",
    "verify",
    "DIGEST_MODULUS",
    "tensor_digests",
    "WeightStore",
    "WeightStoreAddress",
    "StoreSender",
    "StoreReceiver",
    "SyncReport",
    "DeltaEncoder",
    "apply_delta",
    "MessageLink",
    "ReferencedTensors",
    "WeightStreamSender",
    "WeightStreamReceiver",
    "StreamReport",
]
