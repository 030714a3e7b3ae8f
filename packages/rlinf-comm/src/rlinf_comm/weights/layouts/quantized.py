"""What a layout becomes when weights are quantized to FP8 before they are sent: blocks of 128 x 128 share a scale.

rlinf_comm.weights.fp8 computes the values and scales.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import Block, BufferSpec, Layout, RankLayout, TensorSpec
from rlinf_comm.weights.layouts.canonical import FP8_DTYPE, is_quantized as is_quantized
from rlinf_comm.weights.table import CASTABLE

BLOCK = 128
"""Rows and columns of a block."""


def scales_of(name: str) -> str:
    """The name of a weight's scales."""
    return f"{name}_scale_inv"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight [..., rows, columns]."""
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))


def quantized_names(trained: Mapping[str, TensorSpec], served: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """The tensors that are served in FP8 with block-wise scales and trained in another dtype.

    Raises: LayoutError for scales of other blocks than 128 x 128.
    """
    names = []
    for name, spec in served.items():
        if spec.dtype != FP8_DTYPE or name not in trained or trained[name].dtype not in CASTABLE:
            continue
        scales = served.get(scales_of(name))
        if scales is None or len(spec.shape) not in (2, 3) or scales.shape != scale_shape(spec.shape):
            instead = "no scales" if scales is None else f"scales {list(scales.shape)}"
            raise LayoutError(
                f"{name} {list(spec.shape)} is served in FP8 with {instead}; weights are quantized with a scale for "
                f"each block of {BLOCK} x {BLOCK}"
            )
        names.append(name)
    return tuple(names)


def quantized_layout(layout: Layout, names: Collection[str]) -> Layout:
    """The layout of what ranks publish if these tensors are quantized: each part of one is a buffer of its own, and
    each rank that has a part has all scales of the tensor."""
    chosen, specs = frozenset(names), dict[str, TensorSpec]()
    for name, spec in layout.specs.items():
        specs[name] = replace(spec, dtype=FP8_DTYPE) if name in chosen else spec
        if name in chosen:
            specs[scales_of(name)] = TensorSpec(scale_shape(spec.shape), "float32")
    ranks = {id(rank): _quantized_rank(rank, chosen, specs) for rank in layout.ranks}  # replicas share one
    return Layout(specs, tuple(ranks[id(rank)] for rank in layout.ranks))


def _quantized_rank(rank: RankLayout, names: frozenset[str], specs: Mapping[str, TensorSpec]) -> RankLayout:
    blocks = [block for block in rank.blocks if block.name not in names]
    buffers = {block.buffer: rank.buffers[block.buffer] for block in blocks}
    for buffer, block in parts_of(rank, names):
        buffers[buffer] = BufferSpec(block.box.shape, FP8_DTYPE)
        blocks.append(replace(block, buffer=buffer, offset=0, strides=buffers[buffer].strides))
        if (scales := scales_of(block.name)) not in buffers:
            buffers[scales] = BufferSpec(specs[scales].shape, "float32")
            blocks.append(Block(scales, specs[scales].whole, scales, 0, buffers[scales].strides))
    return RankLayout(buffers, tuple(blocks))


def parts_of(rank: RankLayout, names: Collection[str]) -> Iterator[tuple[str, Block]]:
    """The parts of these tensors that a rank stores, and the buffers in which they are published."""
    number = itertools.count()
    for block in rank.blocks:
        if block.name in names:
            is_first = not any(block.box.start)
            yield block.name if is_first else f"{block.name} part {next(number)}", block
