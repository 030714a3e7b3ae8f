"""The weights of a dense transformer in Megatron's layout at TP4 and in SGLang's at TP2, and the copies between them.

Built by hand from the two layouts' definitions, so that the benchmark does not depend on the planner that it feeds:

    Megatron rank r   qkv  per key-value group [its query heads | k | v], rows; o  columns of its query heads
                      fc1  [gate rows of r; up rows of r];                      fc2  columns of r
    SGLang rank d     qkv  [q rows | k rows | v rows] of its heads;             o  columns of its heads
                      gate_up  [gate rows; up rows];                            down  columns of d
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rlinf_comm.copies import CopyTable, code_of_dtype

HIDDEN, FEED_FORWARD, NUM_QUERIES, NUM_GROUPS, HEAD_DIM = 1536, 8960, 12, 4, 128
"""Qwen2.5-1.5B's, but 4 key-value heads, so that TP4 needs no replicas of them."""
SRC_TP, DST_TP = 4, 2
QUERIES_PER_GROUP = NUM_QUERIES // NUM_GROUPS
ELEMENTS_PER_LAYER = HIDDEN * ((NUM_QUERIES + 2 * NUM_GROUPS) * HEAD_DIM + NUM_QUERIES * HEAD_DIM + 3 * FEED_FORWARD)


@dataclass(frozen=True, slots=True)
class Copy2d:
    """`num_rows` x `num_columns` elements from one tensor to another."""

    src: int
    src_row: int
    src_column: int
    dst: int
    dst_row: int
    dst_column: int
    num_rows: int
    num_columns: int


@dataclass(slots=True)
class Case:
    """Both sides' tensors, as places in two flat buffers, and the copies."""

    src_shapes: list[tuple[int, int]] = field(default_factory=list)
    dst_shapes: list[tuple[int, int]] = field(default_factory=list)
    copies: list[Copy2d] = field(default_factory=list)

    def views(self, flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        sizes = [rows * columns for rows, columns in shapes]
        return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]

    def table(self, src_dtype: torch.dtype, dst_dtype: torch.dtype) -> CopyTable:
        c = np.array([[getattr(copy, name) for name in Copy2d.__slots__] for copy in self.copies], dtype=np.int64)
        src, src_row, src_column, dst, dst_row, dst_column, num_rows, num_columns = c.T
        src_size, dst_size = src_dtype.itemsize, dst_dtype.itemsize
        src_width = np.array(self.src_shapes)[src, 1]
        dst_width = np.array(self.dst_shapes)[dst, 1]
        ones = np.ones_like(src)
        return CopyTable(
            src_buffer=src.astype(np.int32),
            dst_buffer=dst.astype(np.int32),
            src_offset=(src_row * src_width + src_column) * src_size,
            dst_offset=(dst_row * dst_width + dst_column) * dst_size,
            lengths=np.stack([num_rows, num_columns], axis=1),
            src_strides=np.stack([src_width * src_size, ones * src_size], axis=1),
            dst_strides=np.stack([dst_width * dst_size, ones * dst_size], axis=1),
            src_dtype=np.full(len(c), code_of_dtype(src_dtype), dtype=np.uint8),
            dst_dtype=np.full(len(c), code_of_dtype(dst_dtype), dtype=np.uint8),
            src_bytes=np.prod(self.src_shapes, axis=1) * src_size,
            dst_bytes=np.prod(self.dst_shapes, axis=1) * dst_size,
        )


def make_case(num_layers: int) -> Case:
    case = Case()
    for _ in range(num_layers):
        _add_layer(case)
    return case


def _add_layer(case: Case) -> None:
    first_src, first_dst = len(case.src_shapes), len(case.dst_shapes)
    groups, feed = NUM_GROUPS // SRC_TP, FEED_FORWARD // SRC_TP
    queries = NUM_QUERIES // SRC_TP * HEAD_DIM
    block = (QUERIES_PER_GROUP + 2) * HEAD_DIM
    for _ in range(SRC_TP):
        case.src_shapes += [(groups * block, HIDDEN), (HIDDEN, queries), (2 * feed, HIDDEN), (HIDDEN, feed)]
    ratio = SRC_TP // DST_TP
    dst_queries, dst_groups, dst_feed = queries * ratio, groups * ratio, feed * ratio
    for _ in range(DST_TP):
        rows = dst_queries + 2 * dst_groups * HEAD_DIM
        case.dst_shapes += [(rows, HIDDEN), (HIDDEN, dst_queries), (2 * dst_feed, HIDDEN), (HIDDEN, dst_feed)]
    for rank in range(SRC_TP):
        src, dst, part = first_src + 4 * rank, first_dst + 4 * (rank // ratio), rank % ratio
        for group in range(groups):
            row, number = group * block, part * groups + group
            width = QUERIES_PER_GROUP * HEAD_DIM
            keys = dst_queries + number * HEAD_DIM
            case.copies += [
                Copy2d(src, row, 0, dst, number * width, 0, width, HIDDEN),
                Copy2d(src, row + width, 0, dst, keys, 0, HEAD_DIM, HIDDEN),
                Copy2d(src, row + width + HEAD_DIM, 0, dst, keys + dst_groups * HEAD_DIM, 0, HEAD_DIM, HIDDEN),
            ]
        case.copies += [
            Copy2d(src + 1, 0, 0, dst + 1, 0, part * queries, HIDDEN, queries),
            Copy2d(src + 2, 0, 0, dst + 2, part * feed, 0, feed, HIDDEN),
            Copy2d(src + 2, feed, 0, dst + 2, dst_feed + part * feed, 0, feed, HIDDEN),
            Copy2d(src + 3, 0, 0, dst + 3, 0, part * feed, HIDDEN, feed),
        ]


def run_in_torch(case: Case, sources: list[torch.Tensor], destinations: list[torch.Tensor]) -> None:
    """The same copies, each a copy_ between views."""
    for c in case.copies:
        source = sources[c.src][c.src_row : c.src_row + c.num_rows, c.src_column : c.src_column + c.num_columns]
        target = destinations[c.dst][c.dst_row : c.dst_row + c.num_rows, c.dst_column : c.dst_column + c.num_columns]
        target.copy_(source)


def gather_and_cat(sources: list[torch.Tensor], destinations: list[torch.Tensor]) -> None:
    """The usual way: concatenate to the full tensors (rows of q, k, v apart), cast, then cut each rank's part out."""
    per_layer_src, per_layer_dst = 4 * SRC_TP, 4 * DST_TP
    for layer in range(len(sources) // per_layer_src):
        ranks = [sources[layer * per_layer_src + 4 * rank :][:4] for rank in range(SRC_TP)]
        targets = [destinations[layer * per_layer_dst + 4 * rank :][:4] for rank in range(DST_TP)]
        dtype = targets[0][0].dtype
        groups = [rank[0].view(-1, QUERIES_PER_GROUP + 2, HEAD_DIM, HIDDEN) for rank in ranks]
        q = torch.cat([part[:, :QUERIES_PER_GROUP].reshape(-1, HIDDEN) for part in groups]).to(dtype)
        k = torch.cat([part[:, -2].reshape(-1, HIDDEN) for part in groups]).to(dtype)
        v = torch.cat([part[:, -1].reshape(-1, HIDDEN) for part in groups]).to(dtype)
        o = torch.cat([rank[1] for rank in ranks], dim=1).to(dtype)
        gate = torch.cat([rank[2].chunk(2)[0] for rank in ranks]).to(dtype)
        up = torch.cat([rank[2].chunk(2)[1] for rank in ranks]).to(dtype)
        down = torch.cat([rank[3] for rank in ranks], dim=1).to(dtype)
        for rank, (qkv, out, gate_up, narrow) in enumerate(targets):
            row = 0
            for whole in (q, k, v):
                part = whole.chunk(DST_TP)[rank]
                qkv[row : row + len(part)].copy_(part)
                row += len(part)
            out.copy_(o.chunk(DST_TP, dim=1)[rank])
            gate_up.chunk(2)[0].copy_(gate.chunk(DST_TP)[rank])
            gate_up.chunk(2)[1].copy_(up.chunk(DST_TP)[rank])
            narrow.copy_(down.chunk(DST_TP, dim=1)[rank])
