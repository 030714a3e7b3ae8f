"""What a Hugging Face config says about the tensors of a model, family by family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layouts import siglip, tower

QWEN_MOE = ("qwen2_moe", "qwen3_moe")
DEEPSEEK = ("deepseek_v2", "deepseek_v3")
GLM_MOE = ("glm4_moe",)
"""GLM-4.5 and later: DeepSeek-V3's experts, with grouped-query attention."""
DECODERS = {**tower.DECODERS, **siglip.DECODERS}
"""`model_type` of a model behind a vision tower -> that of its decoder."""
MODEL_TYPES = ("llama", "qwen2", "qwen3", *QWEN_MOE, *DEEPSEEK, *GLM_MOE, *DECODERS)
"""The `model_type` of configs for which there are ready layouts."""


def decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a model's decoder, which is behind a vision tower in some; the config itself in others.

    Args:
        config: sizes of the decoder are in `text_config`, or beside `vision_config` in older files.
    """
    if config.get("model_type") not in DECODERS:
        return config
    own = {"model_type": DECODERS[config["model_type"]], "tie_word_embeddings": config.get("tie_word_embeddings")}
    return {**config, **(config.get("text_config") or {}), **own}


def shape_fields(config: Mapping[str, Any], *, quantized: bool, mtp: bool) -> dict[str, Any]:
    """The fields of TransformerShape, but for dtype and latent.

    Raises:
        LayoutError: another model type, or a variant with tensors that the layouts do not know.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise LayoutError(f"model_type={model_type!r} has no ready layouts; those that have: {MODEL_TYPES}")
    has_bias = bool(config.get("attention_bias"))  # in GLM only of q, k and v, elsewhere of the output, too
    if (has_bias and model_type not in GLM_MOE) or config.get("mlp_bias"):
        raise LayoutError(f"{model_type} with attention_bias or mlp_bias has tensors that no ready layout places")
    num_heads = config["num_attention_heads"]
    fields = {
        "num_layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // num_heads,
        "vocab": config["vocab_size"],
        "intermediate": config["intermediate_size"],
        "qkv_bias": has_bias or model_type == "qwen2" or (model_type == "qwen2_moe" and config.get("qkv_bias", True)),
        "qk_norm": model_type in ("qwen3", "qwen3_moe") or (model_type in GLM_MOE and config.get("use_qk_norm", False)),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "fp8_scales": _fp8_scales(config) if quantized else None,
    }
    if model_type in QWEN_MOE:
        fields |= _qwen_experts(config)
    if model_type in DEEPSEEK + GLM_MOE:
        fields |= _deepseek_experts(config)
        fields["mtp_layers"] = config.get("num_nextn_predict_layers") or 0 if mtp else 0
    return fields


def _qwen_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 5 writes num_local_experts for what checkpoints call num_experts.
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 0
    if not num_experts:
        return {}
    step, only = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    has_shared = config["model_type"] == "qwen2_moe"
    return {
        "num_experts": num_experts,
        "expert_intermediate": config["moe_intermediate_size"],
        "dense_layers": tuple(layer for layer in layers if layer in only or (layer + 1) % step),
        "shared_intermediate": config["shared_expert_intermediate_size"] if has_shared else 0,
        "shared_gate": has_shared,
    }


def _deepseek_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    if (step := config.get("moe_layer_freq", 1)) != 1:
        raise LayoutError(f"moe_layer_freq={step}; the ready layouts know experts in each layer behind the dense ones")
    num_experts, size = config.get("n_routed_experts") or 0, config["moe_intermediate_size"]
    if not num_experts:
        return {}
    # transformers knows no topk_method for V3 and GLM, which always have the bias.
    default = "greedy" if config["model_type"] == "deepseek_v2" else "noaux_tc"
    return {
        "num_experts": num_experts,
        "expert_intermediate": size,
        "dense_layers": tuple(range(min(config["first_k_dense_replace"], config["num_hidden_layers"]))),
        "shared_intermediate": size * (config.get("n_shared_experts") or 0),
        "router_bias": config.get("topk_method", default) == "noaux_tc",
    }


def _fp8_scales(config: Mapping[str, Any]) -> tuple[int, int] | Literal["tensor"] | None:
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8":
        raise LayoutError(
            f"quantization_config.quant_method={method!r}; ready layouts know 'fp8'. "
            "Give dtype='bfloat16' for the tensors of the model before it was quantized"
        )
    return "tensor" if block is None else (int(block[0]), int(block[1]))
