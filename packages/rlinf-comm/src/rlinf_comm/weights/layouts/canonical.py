"""The canonical tensors of a transformer: names, shapes and dtypes as in its checkpoint on disk.

Multi-token prediction layers are numbered behind the others, `model.layers.61.` in DeepSeek-V3. Its checkpoint repeats
the embedding and the head there (`embed_tokens`, `shared_head.head`); they are the model's own, and are known by those
names alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_comm.weights.layout import TensorSpec

if TYPE_CHECKING:
    from rlinf_comm.weights.layouts.shape import TransformerShape

FP8_DTYPE = "float8_e4m3fn"
FP8_WEIGHTS = ("_proj.weight", "_proj_with_mqa.weight")
"""Ends of names of what is quantized: the linear layers, but not routers, embedding and head, and not `eh_proj`."""
FP8_STACKS = (".experts.gate_up_proj", ".experts.down_proj")
"""Ends of names of the experts of a layer as transformers 5 stacks them, [E, rows, columns]."""
KEPT_IN_FLOAT32 = (".e_score_correction_bias", ".weight_scale", ".weight_scale_inv")
"""Ends of names whose tensors are float32 in every engine, whatever the dtype of the weights."""
MTP_OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
"""What a multi-token prediction layer has beside a decoder layer."""

Shapes = dict[str, tuple[int, ...]]


def canonical_tensors(shape: TransformerShape) -> dict[str, TensorSpec]:
    """The canonical tensors by name, in the order of the layers, each expert by itself."""
    tower, prefix = {} if shape.tower is None else shape.tower.shapes(), shape.decoder_prefix
    specs = {name: TensorSpec(size, shape.dtype) for name, size in tower.items()}
    specs[f"{prefix}embed_tokens.weight"] = TensorSpec((shape.vocab, shape.hidden), shape.dtype)
    for layer in range(shape.num_layers + shape.mtp_layers):
        for name, size in _layer_shapes(shape, layer).items():
            specs |= _stored(shape, f"{prefix}layers.{layer}.{name}", size)
    specs[f"{prefix}norm.weight"] = TensorSpec((shape.hidden,), shape.dtype)
    if shape.value_head:
        specs["lm_head.weight"] = TensorSpec((1, shape.hidden), shape.dtype)
        specs["lm_head.bias"] = TensorSpec((1,), shape.dtype)
    elif not shape.tied_embeddings:
        specs["lm_head.weight"] = TensorSpec((shape.vocab, shape.hidden), shape.dtype)
    return specs


def is_quantized(name: str) -> bool:
    """Whether published FP8 checkpoints have this tensor in FP8."""
    return name.endswith((*FP8_WEIGHTS, *FP8_STACKS)) and not name.endswith(".eh_proj.weight")


def _stored(shape: TransformerShape, name: str, size: tuple[int, ...]) -> dict[str, TensorSpec]:
    """A tensor, with its scales where it is a linear layer's weight in FP8."""
    if name.endswith(KEPT_IN_FLOAT32):
        return {name: TensorSpec(size, "float32")}
    if shape.fp8_scales is None or not is_quantized(name):
        return {name: TensorSpec(size, shape.dtype)}
    weight = {name: TensorSpec(size, FP8_DTYPE)}
    if shape.fp8_scales == "tensor":
        return {**weight, f"{name}_scale": TensorSpec((), "float32")}
    blocks = tuple(-(-length // block) for length, block in zip(size, shape.fp8_scales, strict=True))
    return {**weight, f"{name}_scale_inv": TensorSpec(blocks, "float32")}


def _layer_shapes(shape: TransformerShape, layer: int) -> Shapes:
    hidden = shape.hidden
    shapes: Shapes = {}
    if layer >= shape.num_layers:
        shapes |= {name: (hidden, 2 * hidden) if "proj" in name else (hidden,) for name in MTP_OWN}
    shapes["input_layernorm.weight"] = (hidden,)
    shapes |= _latent_shapes(shape) if shape.latent is not None else _attention_shapes(shape)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes | (
        _expert_shapes(shape) if shape.has_experts(layer) else _mlp_shapes("mlp.", hidden, shape.intermediate)
    )


def _attention_shapes(shape: TransformerShape) -> Shapes:
    shapes: Shapes = {}
    for part, rows in (("q", shape.q_rows), ("k", shape.kv_rows), ("v", shape.kv_rows)):
        shapes[f"self_attn.{part}_proj.weight"] = (rows, shape.hidden)
        if shape.qkv_bias:
            shapes[f"self_attn.{part}_proj.bias"] = (rows,)
    shapes["self_attn.o_proj.weight"] = (shape.hidden, shape.q_rows)
    if shape.qk_norm:
        shapes |= {f"self_attn.{part}_norm.weight": (shape.head_dim,) for part in "qk"}
    return shapes


def _latent_shapes(shape: TransformerShape) -> Shapes:
    latent, hidden, heads = shape.latent, shape.hidden, shape.num_heads
    assert latent is not None, "shapes without latent attention have _attention_shapes"
    if latent.q_rank:
        shapes: Shapes = {
            "self_attn.q_a_proj.weight": (latent.q_rank, hidden),
            "self_attn.q_a_layernorm.weight": (latent.q_rank,),
            "self_attn.q_b_proj.weight": (heads * latent.q_dim, latent.q_rank),
        }
    else:
        shapes = {"self_attn.q_proj.weight": (heads * latent.q_dim, hidden)}
    return shapes | {
        "self_attn.kv_a_proj_with_mqa.weight": (latent.kv_rank + latent.rope_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * latent.value_dim),
    }


def _expert_shapes(shape: TransformerShape) -> Shapes:
    hidden = shape.hidden
    shapes: Shapes = {"mlp.gate.weight": (shape.num_experts, hidden)}
    if shape.router_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (shape.num_experts,)
    for expert in range(shape.num_experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}.", hidden, shape.expert_intermediate)
    if shape.shared_intermediate:
        shapes |= _mlp_shapes(shape.shared_prefix, hidden, shape.shared_intermediate)
        if shape.shared_gate:
            shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, intermediate: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (intermediate, hidden),
        f"{prefix}up_proj.weight": (intermediate, hidden),
        f"{prefix}down_proj.weight": (hidden, intermediate),
    }
