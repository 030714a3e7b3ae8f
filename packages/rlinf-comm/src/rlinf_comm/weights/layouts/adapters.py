"""Low-rank adapters (LoRA) beside the weights that they change: W, and for an update B A of rank r

    model.layers.0.self_attn.q_proj.weight           [out, in]
    model.layers.0.self_attn.q_proj.lora_A.weight    [r, in]
    model.layers.0.self_attn.q_proj.lora_B.weight    [out, r]

These are the names in peft's files, without their prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import Block, Box, BufferSpec, Layout, RankLayout, TensorSpec

LORA_A = ".lora_A.weight"
"""End of the name of A, in place of `.weight`."""
LORA_B = ".lora_B.weight"
"""End of the name of B."""
WEIGHT = ".weight"


def is_adapter_tensor(name: str) -> bool:
    """Whether a canonical tensor belongs to an adapter."""
    return name.endswith((LORA_A, LORA_B))


def has_adapter(names: Iterable[str]) -> bool:
    """Whether a model with these canonical tensors has an adapter."""
    return any(map(is_adapter_tensor, names))


def adapted_layout(layout: Layout, rank: int, changes: Callable[[str], bool]) -> Layout:
    """A layout with the tensors of an adapter beside the weights of linear layers, stacked as these are.

    Beside a buffer `NAME.weight` whose parts belong to P changed layers are

        NAME.lora_A [P * r, in]   their A, in the order of the parts; of the columns that the rank stores
        NAME.lora_B [rows, r]     their B, in that order; of the rows that the rank stores

    Example: `qkv_proj.weight` [12, 8] with 8 rows of q and 2 of k and v each, an adapter of q and v of rank 2:
    `qkv_proj.lora_A` is [4, 8] and `qkv_proj.lora_B` [10, 2]. If the 12 rows are three parts of one layer `qkv`, these
    share its A: `qkv.lora_A` is [2, 8] and `qkv.lora_B` [12, 2].

    Args:
        rank: r.
        changes: whether a layer, by its canonical name without `.weight`, has an adapter.

    Raises:
        LayoutError: no layer has one.
    """
    specs, adapted = dict(layout.specs), {id(one): _adapted_rank(one, rank, changes) for one in layout.ranks}
    for name in {block.name for one in layout.ranks for block in _changed(one, changes)}:
        (num_rows, num_columns), dtype = specs[name].shape, specs[name].dtype
        specs[name.removesuffix(WEIGHT) + LORA_A] = TensorSpec((rank, num_columns), dtype)
        specs[name.removesuffix(WEIGHT) + LORA_B] = TensorSpec((num_rows, rank), dtype)
    if len(specs) == len(layout.specs):
        raise LayoutError("an adapter changes none of the model's linear layers")
    return Layout(specs, tuple(adapted[id(one)] for one in layout.ranks))


def _changed(one: RankLayout, changes: Callable[[str], bool]) -> Iterator[Block]:
    """The blocks of linear layers with an adapter."""
    for block in one.blocks:
        is_matrix = block.buffer.endswith(WEIGHT) and len(one.buffers[block.buffer].shape) == 2
        if is_matrix and block.name.endswith(WEIGHT) and changes(block.name.removesuffix(WEIGHT)):
            yield block


def _adapted_rank(one: RankLayout, rank: int, changes: Callable[[str], bool]) -> RankLayout:
    parts: dict[str, list[Block]] = {}
    for block in sorted(_changed(one, changes), key=lambda block: block.offset):
        parts.setdefault(block.buffer, []).append(block)
    buffers, blocks = dict(one.buffers), list(one.blocks)
    for buffer, changed in parts.items():
        layer, dtype, width = buffer.removesuffix(WEIGHT), one.buffers[buffer].dtype, one.buffers[buffer].shape[1]
        columns = {block.name: (block.box.start[1], block.box.shape[1]) for block in changed}
        for number, (name, (first, count)) in enumerate(columns.items()):
            box, offset = Box((0, first), (rank, count)), number * rank * width
            blocks.append(Block(name.removesuffix(WEIGHT) + LORA_A, box, f"{layer}.lora_A", offset, (width, 1)))
        num_rows = 0
        for block in changed:
            name, first, rows = block.name.removesuffix(WEIGHT) + LORA_B, block.box.start[0], block.box.shape[0]
            blocks.append(Block(name, Box((first, 0), (rows, rank)), f"{layer}.lora_B", num_rows * rank, (rank, 1)))
            num_rows += rows
        buffers[f"{layer}.lora_A"] = BufferSpec((len(columns) * rank, width), dtype)
        buffers[f"{layer}.lora_B"] = BufferSpec((num_rows, rank), dtype)
    return RankLayout(buffers, tuple(blocks))
