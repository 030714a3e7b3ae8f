"""Whole tensors, as transformers holds them in memory or safetensors on disk."""

from __future__ import annotations

from rlinf_comm.weights.layout import Layout
from rlinf_comm.weights.layouts.assembly import RankAssembly
from rlinf_comm.weights.layouts.shape import TransformerShape


def huggingface_layout(
    shape: TransformerShape, num_ranks: int = 1, *, fused_experts: bool = False, dtype: str | None = None
) -> Layout:
    """Every rank stores the whole model.

    `mlp.gate.e_score_correction_bias` is a buffer and no parameter of transformers' models: pass
    `dict(model.named_parameters()) | dict(model.named_buffers())` and leave out `model.rotary_emb.*`.

    Args:
        num_ranks: The number of replicas.
        fused_experts: As transformers 5 holds experts in memory: `experts.gate_up_proj` [E, 2 I, H] and
            `experts.down_proj` [E, H, I] for each layer. Otherwise each expert by itself, as on disk.
        dtype: The dtype in which floating-point weights are stored; the canonical one when it is not given.
    """
    specs = shape.specs()
    rank = RankAssembly(specs, dtype, shape.fp8_block)
    for name in specs:
        if not (fused_experts and ".mlp.experts." in name):
            rank.add_whole(name, name)
    for layer in range(shape.num_layers + shape.mtp_layers):
        if fused_experts and shape.has_experts(layer):
            _add_fused(rank, shape, f"{shape.decoder_prefix}layers.{layer}.mlp.experts.")
    return Layout(specs, (rank.layout(),) * num_ranks)


def _add_fused(rank: RankAssembly, shape: TransformerShape, prefix: str) -> None:
    size, hidden, experts = shape.expert_intermediate, shape.hidden, range(shape.num_experts)
    gate_up = [f"{prefix}{expert}.{part}_proj.weight" for expert in experts for part in ("gate", "up")]
    down = [f"{prefix}{expert}.down_proj.weight" for expert in experts]
    for buffer, names, stored in (
        ("gate_up_proj", gate_up, (len(experts), 2 * size, hidden)),
        ("down_proj", down, (len(experts), hidden, size)),
    ):
        rank.add_linear(prefix + buffer, [(name, rank.whole(name)) for name in names], stored)
