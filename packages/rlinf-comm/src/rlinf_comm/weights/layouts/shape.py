"""The sizes of a transformer, which determine the layout of every engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlinf_comm.errors import LayoutError
from rlinf_comm.records import record
from rlinf_comm.weights.layout import TensorSpec
from rlinf_comm.weights.layouts.canonical import canonical_tensors
from rlinf_comm.weights.layouts.config import DEEPSEEK, decoder_config, shape_fields
from rlinf_comm.weights.layouts.siglip import SiglipTower
from rlinf_comm.weights.layouts.tower import QwenTower


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """DeepSeek's attention (MLA, arXiv 2405.04434), whose keys and values are computed from a short latent vector.

    Example: DeepSeek-V3
        LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    """

    kv_rank: int
    """Length of the latent vector of keys and values."""
    nope_dim: int
    """Length of the part of each head's query and key without position encoding."""
    rope_dim: int
    """Length of the part with position encoding; all heads share one such key."""
    value_dim: int
    q_rank: int = 0
    """Length of the latent vector of queries; 0 if they are computed from the hidden states, as in V2-Lite."""

    @property
    def q_dim(self) -> int:
        """Rows of the query projection for each head."""
        return self.nope_dim + self.rope_dim


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerShape:
    """A decoder with gated MLPs and RMSNorm, like Llama, Qwen, DeepSeek and GLM-4.5.

    Attention is grouped-query or latent; layers may have experts, some of which are shared by all tokens; layers for
    multi-token prediction may follow.

    Example: Qwen3-30B-A3B
        TransformerShape(num_layers=48, hidden=2048, num_heads=32, num_kv_heads=4, head_dim=128, vocab=151936,
                         num_experts=128, expert_intermediate=768, qk_norm=True)
    """

    num_layers: int
    """Layers of the model, without those for multi-token prediction."""
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Length of a head's query, key and value; not used for latent attention."""
    vocab: int
    """Rows of the embedding in the checkpoint; engines pad it."""
    intermediate: int = 0
    """Hidden width of the dense MLPs; 0 if there are none."""
    num_experts: int = 0
    """Number of routed experts in each layer with experts; 0 for a dense model."""
    expert_intermediate: int = 0
    dense_layers: tuple[int, ...] = ()
    """Layers of a model with experts that have a dense MLP instead."""
    shared_intermediate: int = 0
    """Hidden width of the shared experts' MLP, which every token passes: n_shared_experts * moe_intermediate_size in
    DeepSeek and GLM."""
    shared_gate: bool = False
    """The shared expert has a gate, and both have Qwen2-MoE's names; otherwise DeepSeek's `shared_experts`."""
    router_bias: bool = False
    """The `e_score_correction_bias` of DeepSeek-V3 and GLM, float32."""
    latent: LatentAttention | None = None
    mtp_layers: int = 0
    """Number of layers for multi-token prediction, 1 in DeepSeek-V3 and GLM-4.5; with experts if the model has any."""
    fp8_scales: tuple[int, int] | Literal["tensor"] | None = None
    """Weights of linear layers are float8_e4m3fn, with a float32 scale for each block of (rows, columns)
    (`weight_scale_inv`, as in DeepSeek-V3), or for each tensor (`weight_scale`)."""
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    """lm_head is the embedding; then there is only `model.embed_tokens.weight`, here and in the checkpoint."""
    value_head: bool = False
    """A critic: lm_head has a single row and a bias instead of a row for each token."""
    tower: QwenTower | SiglipTower | None = None
    """The vision tower in front of the decoder; None: the model reads text alone."""
    dtype: str = "bfloat16"
    """Dtype of the canonical tensors that are neither FP8 nor always float32."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise LayoutError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "each group of queries shares one key and value head"
            )
        if self.latent is not None and (self.qkv_bias or self.qk_norm):
            raise LayoutError("latent attention with qkv_bias or qk_norm: no ready layout places their tensors")
        if self.tower is not None and (self.fp8_scales is not None or self.value_head):
            raise LayoutError("a vision tower with fp8_scales or value_head: no ready layout places their tensors")
        if self.value_head and self.tied_embeddings:
            raise LayoutError(
                "value_head with tied_embeddings: the embedding has a row for each word, the head has one"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: str | None = None, *, mtp: bool = False) -> TransformerShape:
        """Reads the shape from a Hugging Face config, as in config.json or `model.config.to_dict()`.

        Llama, Qwen2, Qwen3, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and V3, GLM-4.5 and later with experts (`glm4_moe`),
        Qwen2.5-VL, Qwen3-VL, Qwen3-VL-MoE and SmolVLM.

        Args:
            dtype: The dtype of canonical tensors that are not quantized, as in a trainer. By default the checkpoint's
                dtype and quantization.
            mtp: Include the layers for multi-token prediction, which the checkpoint has and transformers ignores.

        Raises:
            LayoutError: another model type or quantization, or a variant with tensors that the layouts do not know.
        """
        tower = QwenTower.from_config(config) or SiglipTower.from_config(config)
        config = decoder_config(config)
        fields = shape_fields(config, quantized=dtype is None, mtp=mtp)
        if config["model_type"] in DEEPSEEK:
            fields["latent"] = LatentAttention(
                q_rank=config.get("q_lora_rank") or 0,
                kv_rank=config["kv_lora_rank"],
                nope_dim=config["qk_nope_head_dim"],
                rope_dim=config["qk_rope_head_dim"],
                value_dim=config["v_head_dim"],
            )
        named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        return cls(**fields, tower=tower, dtype=dtype or named)

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def q_rows(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def fp8_block(self) -> tuple[int, int]:
        """(rows, columns) of a block that shares a scale; (1, 1) if scales are not block-wise."""
        return self.fp8_scales if isinstance(self.fp8_scales, tuple) else (1, 1)

    @property
    def decoder_prefix(self) -> str:
        """The prefix of the decoder's canonical tensors, but for the head."""
        return "model." if self.tower is None else self.tower.DECODER_PREFIX

    @property
    def shared_prefix(self) -> str:
        """The prefix of the shared expert's tensor names, after the layer's prefix."""
        return "mlp.shared_expert." if self.shared_gate else "mlp.shared_experts."

    def specs(self) -> dict[str, TensorSpec]:
        """The canonical tensors: names and shapes as in the checkpoint, with each expert separate."""
        return canonical_tensors(self)
