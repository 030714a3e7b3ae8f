"""What any layout must fulfil, and a plain executor of copies to try it with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm._arrays import dtype_named
from rlinf_comm.codec import pack, unpack
from rlinf_comm.copies import CopyTable
from rlinf_comm.weights.layout import Block, Layout, RankLayout
from rlinf_comm.weights.plan import ReshardPlan, reshard_plan

if TYPE_CHECKING:
    import torch


def execute_copies(table: CopyTable, src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor]) -> None:
    """Runs a copy table on contiguous CPU tensors, one by one in torch: a reference, not a fast executor.

    `src` and `dst` are what the table's buffer numbers count.
    """
    columns = (table.src_buffer, table.dst_buffer, table.src_offset, table.dst_offset, table.lengths)
    strides = (table.src_strides, table.dst_strides)
    for row in zip(*(column.tolist() for column in (*columns, *strides)), strict=True):
        src_buffer, dst_buffer, src_offset, dst_offset, lengths, src_strides, dst_strides = row
        source = _view(src[src_buffer], src_offset, lengths, src_strides)
        _view(dst[dst_buffer], dst_offset, lengths, dst_strides).copy_(source)


def _view(tensor: torch.Tensor, offset: int, lengths: list[int], strides: list[int]) -> torch.Tensor:
    size = tensor.element_size()
    assert tensor.is_contiguous(), "the reference executor takes contiguous tensors"
    assert not any(number % size for number in (offset, *strides)), f"a copy cuts an element of {size} bytes"
    start = tensor.storage_offset() + offset // size
    return tensor.detach().as_strided(lengths, [stride // size for stride in strides], start)


def reshard(plan: ReshardPlan, src: Sequence[Sequence[torch.Tensor]], dst: Sequence[Sequence[torch.Tensor]]) -> None:
    """Fills every destination rank's buffers; `src[rank]` and `dst[rank]` are in the order of the buffers' names."""
    sources = [tensor for tensors in src for tensor in tensors]
    for dst_rank, tensors in enumerate(dst):
        execute_copies(plan.copies(dst_rank=dst_rank), sources, tensors)


def check_covers_every_tensor(layout: Layout) -> None:
    """Every element of every canonical tensor is stored on some rank, so that the layout can be a source."""
    outward = reshard_plan(layout, Layout.replicated(layout.specs, 1))
    num_bytes = sum(spec.num_bytes for spec in layout.specs.values())
    assert outward.num_bytes == num_bytes, f"{outward.num_bytes} bytes leave this layout, its tensors have {num_bytes}"


def check_stores_nothing_twice(layout: Layout) -> None:
    """No two blocks of a rank use the same memory or the same element, counted element by element."""
    for rank, stored in enumerate(layout.ranks):
        memory = {name: np.zeros(buffer.num_elements, np.int8) for name, buffer in stored.buffers.items()}
        elements = {name: np.zeros(spec.shape, np.int8) for name, spec in layout.specs.items()}
        seen: set[tuple[object, ...]] = set()
        for block in stored.blocks:
            box = tuple(slice(at, at + n) for at, n in zip(block.box.start, block.box.shape, strict=True))
            elements[block.name][box] += 1
            place = (block.buffer, block.offset, block.strides, block.box)
            if place not in seen:  # else tied: one box under two names
                np.add.at(memory[block.buffer], _indices(block), 1)
            seen.add(place)
        for counts in (memory, elements):
            for name, count in counts.items():
                assert count.max(initial=0) <= 1, f"{name}: rank {rank} has {count.max()} blocks on one element of it"


def _indices(block: Block) -> np.ndarray:
    """The flat indices of the block's elements in its buffer."""
    steps = [np.arange(n) * stride for n, stride in zip(block.box.shape, block.strides, strict=True)]
    indices = np.array(block.offset)
    for step in steps:
        indices = indices[..., None] + step
    return indices.reshape(-1)


def check_round_trip(layout: Layout) -> None:
    """Weights that go into this layout and out again are the same bits, and padding is not written."""
    import torch

    whole = Layout.replicated(layout.specs, 1)
    inward, outward = reshard_plan(whole, layout), reshard_plan(layout, whole)
    generator = torch.Generator().manual_seed(0)
    want = [_numbers(spec.shape, spec.dtype, generator) for _, spec in sorted(layout.specs.items())]
    stored = [_buffers(rank) for rank in layout.ranks]
    reshard(inward, [want], stored)
    for rank, tensors in enumerate(stored):
        covered = sum(block.box.num_elements for block in _untied(layout.ranks[rank]))
        written = sum(int((tensor != -1).sum()) for tensor in tensors)
        assert written == covered, f"{written} elements of rank {rank} were written, its blocks have {covered}"
    got = [torch.zeros_like(tensor) for tensor in want]
    reshard(outward, stored, [got])
    for name, expected, actual in zip(sorted(layout.specs), want, got, strict=True):
        assert torch.equal(expected, actual), f"{name}: comes back with other values"


def _numbers(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    """Random numbers, non-negative and exact in every dtype that they may be cast to."""
    import torch

    highest = 2 if dtype == "bool" else 120
    return torch.randint(0, highest, shape, generator=generator).to(dtype_named(dtype))


def _buffers(rank: RankLayout) -> list[torch.Tensor]:
    import torch

    return [torch.full(buffer.shape, -1).to(dtype_named(buffer.dtype)) for buffer in rank.buffers.values()]


def _untied(rank: RankLayout) -> list[Block]:
    return list({(block.buffer, block.offset, block.strides, block.box): block for block in rank.blocks}.values())


def check_crosses_processes(layout: Layout) -> None:
    """The layout and its plans survive the codec, and equal layouts have equal digests."""
    copy = unpack(pack(layout))
    assert copy == layout, "unpack(pack(layout)) is another layout"
    assert copy.digest == layout.digest, "unpack(pack(layout)) has another digest"


LAYOUT_CHECKS = (
    check_covers_every_tensor,
    check_stores_nothing_twice,
    check_round_trip,
    check_crosses_processes,
)
"""Each takes a layout, of small shapes, and raises AssertionError or LayoutError."""
