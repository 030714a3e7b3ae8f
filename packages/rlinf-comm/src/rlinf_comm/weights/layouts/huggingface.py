"""Whole tensors, as transformers holds a model in memory or safetensors on disk."""

from __future__ import annotations

from rlinf_comm.weights.layout import Layout
from rlinf_comm.weights.layouts.assembly import RankAssembly
from rlinf_comm.weights.layouts.shape import TransformerShape


def huggingface(
    shape: TransformerShape, num_ranks: int = 1, *, fused_experts: bool = False, dtype: str | None = None
) -> Layout:
    """Every rank stores the whole model.

    Args:
        num_ranks: Replicas.
        fused_experts: As transformers 5 holds experts in memory: `experts.gate_up_proj` [E, 2 I, H] and
            `experts.down_proj` [E, H, I] for each layer. Otherwise each expert by itself, as on disk.
        dtype: Of the storage; the canonical one when it is not given.
    """
    specs = shape.specs()
    rank = RankAssembly(specs, dtype)
    for name in specs:
        if not (fused_experts and ".mlp.experts." in name):
            rank.add_whole(name, name)
    if fused_experts:
        for layer in filter(shape.has_experts, range(shape.num_layers)):
            prefix = f"model.layers.{layer}.mlp.experts."
            size, hidden, experts = shape.expert_intermediate, shape.hidden, range(shape.num_experts)
            gate_up = [f"{prefix}{expert}.{part}_proj.weight" for expert in experts for part in ("gate", "up")]
            down = [f"{prefix}{expert}.down_proj.weight" for expert in experts]
            rank.add(
                f"{prefix}gate_up_proj",
                [(name, specs[name].whole) for name in gate_up],
                (len(experts), 2 * size, hidden),
            )
            rank.add(f"{prefix}down_proj", [(name, specs[name].whole) for name in down], (len(experts), hidden, size))
    return Layout(specs, (rank.layout(),) * num_ranks)
