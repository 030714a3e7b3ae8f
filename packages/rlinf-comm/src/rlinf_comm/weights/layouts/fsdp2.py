"""FSDP2: what each rank of `fully_shard` holds, from the DTensors of one of them.

Shards are what torch.chunk gives, so that the last ranks may hold less, or nothing. Meshes of several dimensions
(hybrid sharding, tensor parallelism below FSDP) are placed dimension by dimension, as DTensor does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import Block, Box, BufferSpec, Layout, RankLayout, TensorSpec, specs_of, stored_dtype

if TYPE_CHECKING:
    import torch


def fsdp2_layout(
    parameters: Mapping[str, torch.Tensor], *, whole: Layout | None = None, canonical_dtype: str | None = None
) -> Layout:
    """The layout of a model under `fully_shard`, the same from the parameters of any rank.

    Rank r of the layout is the r-th of the processes in the mesh, in the order of their global ranks. Its tensors are
    `local_shards(parameters)`.

    Args:
        parameters: `dict(model.named_parameters())`; parameters that are no DTensors are replicated.
        whole: A layout of one rank that says which canonical tensors the unsharded parameters hold, such as
            `huggingface(shape, fused_experts=True)`; otherwise each parameter is one, by its own name.
        canonical_dtype: The dtype of floating-point canonical tensors, when it is not that of the parameters:
            "bfloat16" for float32 master weights of an engine that serves bfloat16. Only without `whole`, which knows
            its dtypes.

    Raises:
        LayoutError: parameters of different meshes, placements that are no shards or replicas, a parameter that differs
            from `whole`; names it.
    """
    ranks = _global_ranks(parameters)
    if whole is None:
        specs = {
            name: TensorSpec(spec.shape, stored_dtype(spec.dtype, canonical_dtype))
            for name, spec in specs_of(parameters).items()
        }
        buffers = {name: BufferSpec(spec.shape, spec.dtype) for name, spec in specs_of(parameters).items()}
        blocks = tuple(Block(name, specs[name].whole, name, 0, spec.strides) for name, spec in buffers.items())
        stored = RankLayout(buffers, blocks)
    else:
        specs, stored = whole.specs, _same_parameters(whole, parameters)
    boxes = {name: shard_boxes(name, parameter, ranks) for name, parameter in parameters.items()}
    return Layout(
        specs, tuple(_cut(stored, {name: boxes[name][index] for name in boxes}) for index in range(len(ranks)))
    )


def local_shards(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's tensors for the layout of fsdp2(): the local parts of DTensors, everything else as it is."""
    return {
        name: parameter.to_local() if _is_dtensor(parameter) else parameter.detach()  # pyright: ignore
        for name, parameter in parameters.items()
    }


def _is_dtensor(parameter: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def _global_ranks(parameters: Mapping[str, Any]) -> list[int]:
    """The global ranks of all processes of the mesh, in ascending order."""
    meshes: dict[tuple[int, ...], str] = {}
    for name, parameter in parameters.items():
        if _is_dtensor(parameter):
            meshes.setdefault(tuple(sorted(parameter.device_mesh.mesh.flatten().tolist())), name)
    if not meshes:
        raise LayoutError("no parameter is a DTensor; call fully_shard(model) before")
    if len(meshes) > 1:
        (ranks, name), (other_ranks, other_name), *_ = meshes.items()
        raise LayoutError(
            f"{other_name}: is on the ranks {list(other_ranks)}, but {name} on {list(ranks)}; "
            "all parameters of a layout must be on the same mesh"
        )
    return list(next(iter(meshes)))


def shard_boxes(name: str, parameter: Any, ranks: list[int]) -> list[Box]:
    """The box of a parameter that each of these global ranks holds.

    Raises:
        LayoutError: a placement that is neither Shard nor Replicate; names the parameter.
    """
    from torch.distributed.tensor.placement_types import Replicate, Shard

    shape = tuple(parameter.shape)
    if not _is_dtensor(parameter):
        return [Box((0,) * len(shape), shape)] * len(ranks)
    cuts: list[tuple[bool, int, int]] = []  # (comes last, mesh dimension, tensor dimension)
    for mesh_dim, placement in enumerate(parameter.placements):
        strided = type(placement).__name__ == "_StridedShard"
        if isinstance(placement, Shard) or strided:
            # A strided shard is FSDP above tensor parallelism: it cuts what the inner mesh dimensions have left.
            cuts.append((strided, mesh_dim, placement.dim % len(shape)))
        elif not isinstance(placement, Replicate):
            raise LayoutError(f"{name}: the placement {placement} is neither Shard nor Replicate")
    mesh = np.array(parameter.device_mesh.mesh.tolist())
    boxes = []
    for rank in ranks:
        place = np.argwhere(mesh == rank)[0].tolist()
        start, length = [0] * len(shape), list(shape)
        for _, mesh_dim, dim in sorted(cuts):
            chunk = -(-length[dim] // mesh.shape[mesh_dim])  # as torch.chunk
            first = min(place[mesh_dim] * chunk, length[dim])
            start[dim], length[dim] = start[dim] + first, min(chunk, length[dim] - first)
        boxes.append(Box(tuple(start), tuple(length)))
    return boxes


def _same_parameters(whole: Layout, parameters: Mapping[str, Any]) -> RankLayout:
    stored = whole.ranks[0]
    for name in sorted(stored.buffers.keys() | parameters.keys()):
        if name not in parameters:
            raise LayoutError(f"{name}: `whole` stores it, but the model has no such parameter")
        if name not in stored.buffers:
            raise LayoutError(f"{name}: the model has this parameter, but `whole` does not store it")
        if tuple(parameters[name].shape) != stored.buffers[name].shape:
            raise LayoutError(
                f"{name}: has the shape {tuple(parameters[name].shape)}, `whole` says {stored.buffers[name].shape}"
            )
    dtypes = {name: spec.dtype for name, spec in specs_of(parameters).items()}
    buffers = {name: BufferSpec(buffer.shape, dtypes[name]) for name, buffer in stored.buffers.items()}
    return RankLayout(buffers, stored.blocks)


def _cut(stored: RankLayout, boxes: Mapping[str, Box]) -> RankLayout:
    """What is left when each buffer is cut down to a box of it, stored dense."""
    buffers = {name: BufferSpec(boxes[name].shape, buffer.dtype) for name, buffer in stored.buffers.items()}
    blocks = []
    for block in stored.blocks:
        cut = _cut_block(block, stored.buffers[block.buffer], boxes[block.buffer], buffers[block.buffer])
        if cut is not None:
            blocks.append(cut)
    return RankLayout(buffers, tuple(blocks))


def _cut_block(block: Block, whole: BufferSpec, box: Box, part: BufferSpec) -> Block | None:
    """The part of a block inside `box` of its buffer, of which each dimension of the block follows one."""
    index, offset = [], block.offset
    for stride in whole.strides:
        at, offset = divmod(offset, stride) if stride else (0, offset)
        index.append(at)
    start, length, strides = list(block.box.start), list(block.box.shape), []
    place = [at - first for at, first in zip(index, box.start, strict=True)]  # in the part
    followed = set()
    for dim, (size, stride) in enumerate(zip(block.box.shape, block.strides, strict=True)):
        along = next((d for d in range(len(whole.shape)) if whole.strides[d] == stride and whole.shape[d] > 1), None)
        if size <= 1 and along is None:
            strides.append(0)
            continue
        if along is None or along in followed or index[along] + size > whole.shape[along]:
            raise LayoutError(
                f"{block.name}: its block does not follow the dimensions of the parameter {block.buffer!r}"
            )
        followed.add(along)
        low, high = max(0, place[along]), min(part.shape[along], place[along] + size)
        start[dim] += low - place[along]
        length[dim], place[along] = high - low, low
        strides.append(part.strides[along])
    if any(size <= 0 for size in length) or not all(0 <= at < n for at, n in zip(place, part.shape, strict=True)):
        return None
    offset = sum(at * stride for at, stride in zip(place, part.strides, strict=True))
    return Block(block.name, Box(tuple(start), tuple(length)), block.buffer, offset, tuple(strides))
