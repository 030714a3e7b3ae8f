"""Trainer and engine layouts of well-known models, cut down to fit the memory at hand, and the ways to reshard them.

A case keeps its model's widths, heads and experts and loses layers, vocabulary and, for Qwen3-30B-A3B, half of the
experts; what is left is about a gigabyte in bfloat16.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from rlinf_comm.weights import Block, Layout, RankLayout, ReshardPlan, reshard_plan
from rlinf_comm.weights.layouts import TransformerShape, megatron_layout, merged_layout

GIGABYTES = float(os.environ.get("RLINF_BENCHMARK_GB", "0.95"))
_VOCAB = 4096
Buffers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A reshard from Megatron's layout to the engine's merged one."""

    shape: TransformerShape
    layer_bytes: int
    """Bytes of one layer in bfloat16."""
    trainer_sizes: dict[str, Any]
    """Keyword arguments of `megatron_layout`."""
    engine_sizes: dict[str, Any]
    trainer_dtype: str = "bfloat16"
    """Type of what the trainer stores; the engine stores bfloat16."""

    @cached_property
    def trainer(self) -> Layout:
        return megatron_layout(self._scaled, dtype=self.trainer_dtype, **self.trainer_sizes)

    @cached_property
    def engine(self) -> Layout:
        return merged_layout(self._scaled, **self.engine_sizes)

    @cached_property
    def plan(self) -> ReshardPlan:
        return reshard_plan(self.trainer, self.engine)

    @property
    def _scaled(self) -> TransformerShape:
        stages = self.trainer_sizes.get("pp", 1)
        num_layers = max(1, round(GIGABYTES * 1e9 / self.layer_bytes / stages)) * stages
        return replace(self.shape, num_layers=num_layers)


_QWEN25_1B5 = TransformerShape(
    num_layers=28, hidden=1536, num_heads=12, num_kv_heads=4, head_dim=128, vocab=_VOCAB, intermediate=8960,
    qkv_bias=True, tied_embeddings=True,
)  # fmt: skip
_QWEN25_7B = TransformerShape(
    num_layers=28, hidden=3584, num_heads=28, num_kv_heads=4, head_dim=128, vocab=_VOCAB, intermediate=18944,
    qkv_bias=True,
)  # fmt: skip
_QWEN3_30B = TransformerShape(
    num_layers=48, hidden=2048, num_heads=32, num_kv_heads=4, head_dim=128, vocab=_VOCAB, num_experts=64,
    expert_intermediate=768, qk_norm=True,
)  # fmt: skip
_TP4_TO_TP2: dict[str, Any] = {"trainer_sizes": {"tp": 4}, "engine_sizes": {"tp": 2}}
CASES = {
    "Qwen2.5-1.5B, TP4 to TP2": Case(_QWEN25_1B5, 97_000_000, **_TP4_TO_TP2),
    "Qwen2.5-1.5B, fp32 TP4 to bf16 TP2": Case(_QWEN25_1B5, 97_000_000, **_TP4_TO_TP2, trainer_dtype="float32"),
    "Qwen2.5-7B, TP4 to TP2": Case(_QWEN25_7B, 467_000_000, **_TP4_TO_TP2),
    "Qwen3-30B-A3B, TP4 PP2 EP8 to TP2 EP4": Case(
        _QWEN3_30B, 642_000_000, {"tp": 4, "pp": 2, "ep": 8}, {"tp": 2, "ep": 4}
    ),
}
"""Qwen2.5-1.5B has 2 key and value heads; 4 here, so that both sides of TP4 store each of them once."""


def num_bytes_of(layout: Layout) -> int:
    """Bytes of one copy of everything that a layout stores; ranks that share a RankLayout are counted each."""
    return sum(_rank_bytes(rank) for rank in layout.ranks)


def _rank_bytes(rank: RankLayout) -> int:
    return sum(math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize for spec in rank.buffers.values())


def views_of(layout: Layout, memory: torch.Tensor) -> list[Buffers]:
    """Every rank's buffers, one after the other in flat uint8 memory."""
    ranks, at = [], 0
    for rank in layout.ranks:
        buffers = {}
        for name, spec in rank.buffers.items():
            dtype = getattr(torch, spec.dtype)
            num_bytes = math.prod(spec.shape) * dtype.itemsize
            buffers[name] = memory[at : at + num_bytes].view(dtype).view(spec.shape)
            at += num_bytes
        ranks.append(buffers)
    return ranks


def fill(layout: Layout, ranks: Sequence[Buffers]) -> None:
    """Random weights, the same in all replicas."""
    blocks = _by_tensor(layout)
    generator = torch.Generator().manual_seed(0)
    for name, spec in layout.specs.items():
        whole = torch.empty(spec.shape, dtype=torch.float32).normal_(generator=generator)
        for rank, block in blocks[name]:
            _view(block, ranks[rank]).copy_(_part(whole, block))


def _by_tensor(layout: Layout) -> dict[str, list[tuple[int, Block]]]:
    blocks: dict[str, list[tuple[int, Block]]] = {}
    for rank, stored in enumerate(layout.ranks):
        for block in stored.blocks:
            blocks.setdefault(block.name, []).append((rank, block))
    return blocks


def _view(block: Block, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = buffers[block.buffer]
    return tensor.as_strided(block.box.shape, block.strides, tensor.storage_offset() + block.offset)


def gather_then_cut(trainer: Layout, engine: Layout, sources: Sequence[Buffers], targets: Sequence[Buffers]) -> None:
    """The usual way: each tensor is gathered whole, in the engine's dtype, and every rank cuts its part out."""
    holders, takers = _by_tensor(trainer), _by_tensor(engine)
    for name, spec in engine.specs.items():
        whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for rank, block in {block.box.start: (rank, block) for rank, block in holders[name]}.values():  # replicas once
            _part(whole, block).copy_(_view(block, sources[rank]))
        for rank, block in takers[name]:
            _view(block, targets[rank]).copy_(_part(whole, block))


def _part(whole: torch.Tensor, block: Block) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(block.box.start, block.box.shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def plan_in_torch(case: Case, sources: Sequence[Buffers], targets: Sequence[Buffers]) -> None:
    """The copies of our plan, each a copy_ between two views."""
    flat = [tensor for buffers in sources for _, tensor in sorted(buffers.items())]
    for rank, buffers in enumerate(targets):
        table = case.plan.copies(dst_rank=rank)
        ordered = [tensor for _, tensor in sorted(buffers.items())]
        columns = (table.src_buffer, table.dst_buffer, table.src_offset, table.dst_offset, table.lengths)
        for src, dst, src_offset, dst_offset, lengths, src_strides, dst_strides in zip(
            *(column.tolist() for column in (*columns, table.src_strides, table.dst_strides)), strict=True
        ):
            _strided(ordered[dst], dst_offset, lengths, dst_strides).copy_(
                _strided(flat[src], src_offset, lengths, src_strides)
            )


def _strided(tensor: torch.Tensor, offset: int, lengths: list[int], strides: list[int]) -> torch.Tensor:
    size = tensor.element_size()
    return tensor.as_strided(lengths, [stride // size for stride in strides], tensor.storage_offset() + offset // size)
