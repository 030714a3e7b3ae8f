"""LoRA on the parallel linear layers of megatron-core.

A layer holds rows of several canonical tensors in one buffer: queries, keys and values interleaved by group, or gate
and up. Each canonical tensor has its own A and B, as in peft; the layout says which rows of a layer are its. With R
rows and C columns of a canonical tensor on a rank:

    column-parallel (QKV, fc1)    A [r, in], the same on all ranks    B [R, r]
    row-parallel (proj, fc2)      A [r, C]                            B [out, r], the same on all ranks

Ranks compute parts of the gradient of what they have in common, which is summed over them. Everything is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.nn.functional import linear

from rlinf_comm.weights import Block, Box, Layout, RankLayout, TensorSpec
from rlinf_comm.weights.layouts import LORA_A, LORA_B
from rlinf_workers.models.lora_settings import LoraSettings
from rlinf_workers.trainers.megatron.files import inside

WEIGHT = ".weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Rows of a layer that belong to one canonical tensor."""

    layer: str
    """The canonical layer, `model.layers.0.self_attn.q_proj`."""
    first: int
    """The first one in this rank's B."""
    num_rows: int


class LinearAdapter(nn.Module):
    """The low-rank updates of what one parallel linear layer holds.

    Args:
        rows: all rows of the layer, in order.
        boxes: canonical layers with an adapter -> this rank's box of their weight.
    """

    is_on = True
    """Whether the layer computes with it."""

    def __init__(self, layer: Any, rows: list[_Rows], boxes: Mapping[str, Box], lora: LoraSettings) -> None:
        super().__init__()
        self._rows, self.layers, self._scale = rows, list(boxes), lora.scale
        self._is_column = isinstance(layer, ColumnParallelLinear)
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        """In the order of `layers`."""
        for box in boxes.values():
            num_rows, num_columns = box.shape
            self.a.append(torch.zeros(lora.rank, num_columns))
            self.b.append(torch.zeros(num_rows, lora.rank))
        for parameter in self.b if self._is_column else self.a:
            setattr(parameter, "tensor_model_parallel", True)  # noqa: B010, for the norm of the gradient

    def forward(self, states: Tensor, *, is_gathered: bool) -> Tensor:
        """[..., columns of the rank] -> its rows' update [..., rows].

        Args:
            is_gathered: whether ranks have different positions of a column-parallel layer's input.
        """
        if self._is_column:
            if is_gathered:
                states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=True)
            else:
                states = _summed(states)
        states, low, of_layer = states.to(self.a[0].dtype), {}, {}
        for layer, a, b in zip(self.layers, self.a, self.b, strict=True):
            low[layer] = linear(states, _summed(a) if self._is_column else a)
            of_layer[layer] = b if self._is_column else _summed(b)
        pieces = [
            linear(low[rows.layer], of_layer[rows.layer][rows.first : rows.first + rows.num_rows])
            if rows.layer in low
            else states.new_zeros(*states.shape[:-1], rows.num_rows)
            for rows in self._rows
        ]
        return torch.cat(pieces, -1) * self._scale

    def change(self, here: Callable[[Tensor], Tensor]) -> LayerChange:
        """Its tensors, where `here` finds those that are offloaded."""
        low = {
            layer: (here(a).detach(), here(b).detach()) for layer, a, b in zip(self.layers, self.a, self.b, strict=True)
        }
        return LayerChange(low=low, rows=self._rows, scale=self._scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerChange:
    """The update of a rank's weight of one parallel layer; see `trainers.served.WeightChange`."""

    low: Mapping[str, tuple[Tensor, Tensor]]
    """Canonical layer -> A and B."""
    rows: list[_Rows]
    scale: float

    @torch.no_grad()
    def added_to(self, weight: Tensor) -> Tensor:
        merged, first = weight.to(torch.float32, copy=True), 0
        for rows in self.rows:
            if rows.layer in self.low:
                a, b = self.low[rows.layer]
                merged[first : first + rows.num_rows] += (b[rows.first : rows.first + rows.num_rows] @ a) * self.scale
            first += rows.num_rows
        return merged.to(weight.dtype)

    def tensors(self, name: str) -> dict[str, Tensor]:
        return {
            f"{layer}{end}": tensor
            for layer, pair in self.low.items()
            for end, tensor in zip((LORA_A, LORA_B), pair, strict=True)
        }


class Adapters:
    """The adapter of a model, attached to its layers.

    Args:
        layout: of the model without adapter; canonical names.
        in_memory: canonical tensors that a module of transformers' model holds alone: those that can be adapted.
        first: canonical name -> the whole tensor with which the adapter begins; others begin at 0.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        rank: int,
        lora: LoraSettings,
        in_memory: frozenset[str],
        first: Mapping[str, Tensor],
    ) -> None:
        names = [name for name in layout.specs if name in in_memory and name.endswith(WEIGHT)]
        self._layers = [layer for layer in (name.removesuffix(WEIGHT) for name in names) if lora.changes(layer)]
        self.layout = _adapter_layout(layout, self._layers, lora.rank)
        self._own_boxes = {block.name: block.box for block in self.layout.ranks[rank].blocks}
        self._modules: dict[str, LinearAdapter] = {}
        """By the name of their layer's weight."""
        for buffer, blocks in _by_buffer(layout.ranks[rank]).items():
            if any(block.name.removesuffix(WEIGHT) in self._layers for block in blocks):
                self._modules[buffer] = self._attach(model, buffer, blocks, lora)
        if not self._modules:
            raise ValueError(
                f"actor.lora.targets: none of {', '.join(lora.targets)} is in the layers of this pipeline stage; "
                "adapt a layer of each stage, or use fewer stages"
            )
        for name, parameter in self.parameters.items():
            if name in first:
                parameter.data.copy_(self.own(name, first[name]))

    def _attach(self, model: nn.Module, buffer: str, blocks: list[Block], lora: LoraSettings) -> LinearAdapter:
        layer: Any = model.get_submodule(buffer.removesuffix(WEIGHT))
        if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            raise ValueError(f"actor.lora.targets: megatron cannot adapt {blocks[0].name}, a {type(layer).__name__}")
        boxes = _boxes(blocks)
        rows = [
            _Rows(
                layer=block.name.removesuffix(WEIGHT),
                first=block.box.start[0] - boxes[block.name].start[0],
                num_rows=block.box.shape[0],
            )
            for block in blocks
        ]
        own = {name.removesuffix(WEIGHT): box for name, box in boxes.items()}
        chosen = {name: own[name] for name in self._layers if name in own}  # in the same order on all ranks
        adapter = LinearAdapter(layer, rows, chosen, lora).to(next(layer.parameters()).device)
        layer.add_module("adapter", adapter)
        plain = layer._forward_impl

        def forward(input: Tensor, weight: Tensor, **named: Any) -> Tensor:
            outputs = plain(input=input, weight=weight, **named)
            if not adapter.is_on:
                return outputs
            return (outputs + adapter(input, is_gathered=bool(named.get("sequence_parallel")))).to(outputs.dtype)

        layer._forward_impl = forward
        return adapter

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Canonical name -> this rank's part."""
        return {
            f"{layer}{end}": parameter
            for module in self._modules.values()
            for layer, *pair in zip(module.layers, module.a, module.b, strict=True)
            for end, parameter in zip((LORA_A, LORA_B), pair, strict=True)
        }

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor of the adapter."""
        return inside(whole, self.box(name))

    def box(self, name: str) -> Box:
        """This rank's part of a tensor of the adapter."""
        return self._own_boxes[name]

    def changes(self, here: Callable[[Tensor], Tensor]) -> dict[str, LayerChange]:
        """Name of a layer's weight -> its update."""
        return {buffer: module.change(here) for buffer, module in self._modules.items()}

    def switch(self, is_on: bool) -> None:
        """Whether the model computes with the adapter."""
        for module in self._modules.values():
            module.is_on = is_on


class _Summed(torch.autograd.Function):
    """Itself, with a gradient that is summed over the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        return gradient


def _summed(tensor: Tensor) -> Tensor:
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return tensor
    return _Summed.apply(tensor)  # pyright: ignore[reportReturnType]


def with_adapter(served: Layout, adapter: Layout) -> Layout:
    """The layout of a model and of its adapter."""
    ranks: dict[tuple[int, int], RankLayout] = {}  # replicas share one
    order = []
    for one, other in zip(served.ranks, adapter.ranks, strict=True):
        key = id(one), id(other)
        ranks.setdefault(key, RankLayout({**one.buffers, **other.buffers}, one.blocks + other.blocks))
        order.append(ranks[key])
    return Layout({**served.specs, **adapter.specs}, tuple(order))


def _adapter_layout(layout: Layout, layers: list[str], rank: int) -> Layout:
    """Where the tensors of an adapter are: rows of B and columns of A as in the weight that they change."""
    specs: dict[str, TensorSpec] = {}
    for layer in layers:
        num_rows, num_columns = layout.specs[layer + WEIGHT].shape
        specs[layer + LORA_A] = TensorSpec((rank, num_columns), "float32")
        specs[layer + LORA_B] = TensorSpec((num_rows, rank), "float32")

    def of_rank(one: RankLayout) -> RankLayout:
        boxes: dict[str, Box] = {}
        for name, box in _boxes([block for block in one.blocks if block.name.removesuffix(WEIGHT) in layers]).items():
            layer, (row, column), (num_rows, num_columns) = name.removesuffix(WEIGHT), box.start, box.shape
            boxes[layer + LORA_A] = Box((0, column), (rank, num_columns))
            boxes[layer + LORA_B] = Box((row, 0), (num_rows, rank))
        return RankLayout.of_boxes(boxes, specs)

    ranks = {id(one): of_rank(one) for one in layout.ranks}
    return Layout(specs, tuple(ranks[id(one)] for one in layout.ranks))


def _by_buffer(rank: RankLayout) -> dict[str, list[Block]]:
    """Weight of a layer -> its blocks, in the order of its rows."""
    buffers: dict[str, list[Block]] = {}
    for block in sorted(rank.blocks, key=lambda block: block.offset):
        if block.buffer.endswith(WEIGHT):
            buffers.setdefault(block.buffer, []).append(block)
    return buffers


def _boxes(blocks: list[Block]) -> dict[str, Box]:
    """Canonical tensor -> the box that its blocks on a rank make up."""
    boxes: dict[str, Box] = {}
    for block in sorted(blocks, key=lambda block: block.box.start):
        if (before := boxes.get(block.name)) is None:
            boxes[block.name] = block.box
            continue
        (row, column), (num_rows, num_columns) = before.start, before.shape
        assert block.box.start == (row + num_rows, column), "a rank has consecutive rows of a tensor"
        boxes[block.name] = replace(before, shape=(num_rows + block.box.shape[0], num_columns))
    return boxes
