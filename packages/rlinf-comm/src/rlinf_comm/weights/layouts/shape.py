"""The sizes of a transformer, which decide what every engine's layout looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_comm.errors import LayoutError
from rlinf_comm.records import record
from rlinf_comm.weights.layout import TensorSpec

_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerShape:
    """A decoder of the Llama and Qwen family: grouped-query attention, gated MLP, RMSNorm, perhaps experts.

    Example: Qwen3-30B-A3B
        TransformerShape(num_layers=48, hidden=2048, num_heads=32, num_kv_heads=4, head_dim=128, vocab=151936,
                         num_experts=128, expert_intermediate=768, qk_norm=True)
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    """Rows of the embedding in the checkpoint; engines pad it."""
    intermediate: int = 0
    """Of the dense MLPs; 0 where there are none."""
    num_experts: int = 0
    """Routed, in each layer that has any; 0 for a dense model."""
    expert_intermediate: int = 0
    dense_layers: tuple[int, ...] = ()
    """Layers of a model with experts that have a dense MLP instead."""
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    """lm_head is the embedding; the checkpoint and this package then know only `model.embed_tokens.weight`."""
    dtype: str = "bfloat16"
    """Of the canonical tensors."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise LayoutError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "each group of queries shares one key and value head"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: str | None = None) -> TransformerShape:
        """From a Hugging Face config, as in config.json or `model.config.to_dict()`; Llama, Qwen2, Qwen3, Qwen3-MoE.

        `dtype` is that of the canonical tensors: the checkpoint's when it is not given.

        Raises:
            LayoutError: another model type, or a variant with tensors that the layouts do not know.
        """
        model_type = config.get("model_type")
        if model_type not in _MODEL_TYPES:
            raise LayoutError(f"model_type={model_type!r} has no ready layouts; those that have: {_MODEL_TYPES}")
        if config.get("attention_bias") or config.get("mlp_bias"):
            raise LayoutError(f"{model_type} with attention_bias or mlp_bias has tensors that no ready layout places")
        num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
        # transformers 5 writes num_local_experts for what checkpoints call num_experts.
        num_experts = config.get("num_experts") or config.get("num_local_experts") if model_type == "qwen3_moe" else 0
        return cls(
            num_layers=num_layers,
            hidden=config["hidden_size"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            vocab=config["vocab_size"],
            intermediate=config["intermediate_size"],
            num_experts=num_experts or 0,
            expert_intermediate=config["moe_intermediate_size"] if num_experts else 0,
            dense_layers=_dense_layers(config) if num_experts else (),
            qkv_bias=model_type == "qwen2",
            qk_norm=model_type in ("qwen3", "qwen3_moe"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        )

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def q_rows(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.num_kv_heads * self.head_dim

    def specs(self) -> dict[str, TensorSpec]:
        """The canonical tensors: names and shapes as in the checkpoint, each expert by itself."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes |= {prefix + name: shape for name, shape in self._layer_shapes(layer).items()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return {name: TensorSpec(shape, self.dtype) for name, shape in shapes.items()}

    def _layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        for part, rows in (("q", self.q_rows), ("k", self.kv_rows), ("v", self.kv_rows)):
            shapes[f"self_attn.{part}_proj.weight"] = (rows, hidden)
            if self.qkv_bias:
                shapes[f"self_attn.{part}_proj.bias"] = (rows,)
        shapes["self_attn.o_proj.weight"] = (hidden, self.q_rows)
        if self.qk_norm:
            shapes |= {f"self_attn.{part}_norm.weight": (self.head_dim,) for part in "qk"}
        shapes["post_attention_layernorm.weight"] = (hidden,)
        if self.has_experts(layer):
            shapes["mlp.gate.weight"] = (self.num_experts, hidden)
            for expert in range(self.num_experts):
                shapes |= _mlp_shapes(f"mlp.experts.{expert}.", hidden, self.expert_intermediate)
        else:
            shapes |= _mlp_shapes("mlp.", hidden, self.intermediate)
        return shapes


def _mlp_shapes(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (intermediate, hidden),
        f"{prefix}up_proj.weight": (intermediate, hidden),
        f"{prefix}down_proj.weight": (hidden, intermediate),
    }


def _dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    step, only = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return tuple(layer for layer in range(config["num_hidden_layers"]) if layer in only or (layer + 1) % step)
