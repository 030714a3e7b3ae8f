"""A tiny model of a config's architecture: the same kinds of layers, windows, norms and embeddings, with sizes small
enough to compute a few dozen tokens in milliseconds.

Everything that determines how a model computes is kept (kinds of layers, rope, caps, norms, tied embeddings); sizes
shrink, and windows shrink to `WINDOW`, so that a short sequence exceeds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlinf_workers.models.pictures import auto_class

WINDOW = 6
"""Attention window of a layer with a sliding window or with chunks, in tokens."""
POSITIONS = 128
VOCABULARY = 40
SPREAD = 0.2
"""Standard deviation of the weights: large enough for logits to differ by nats."""
MAX_PARAMETERS = 30_000_000
"""A larger copy did not shrink properly."""

MAX_MESSAGE = 200

HIDDEN, HEADS, SHARED_HEADS, HEAD_SIZE, EXPERTS = 32, 4, 2, 8, 4
SIZES: Mapping[str, int] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "n_embd",
            "d_model",
            "embedding_size",
            "embed_dim",
            "word_embed_proj_dim",
            "input_embedding_size",
            "out_hidden_size",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "swa_num_attention_heads", "index_n_heads", "mamba_n_heads"), HEADS),
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), HEAD_SIZE),
    **dict.fromkeys(("v_head_dim", "kv_lora_rank", "q_lora_rank", "kv_channels", "rotary_dim"), HEAD_SIZE),
    **dict.fromkeys(("dim_head", "query_pre_attn_scalar", "swa_v_head_dim"), HEAD_SIZE),
    "qk_head_dim": 2 * HEAD_SIZE,
    "index_head_dim": 2 * HEAD_SIZE,
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "dff", "dim_ff"), 48
    ),
    **dict.fromkeys(
        ("encoder_ffn_dim", "intermediate_size_mlp", "expert_ffn_hidden_size", "dense_intermediate_size"), 48
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), POSITIONS),
    **dict.fromkeys(
        ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size", "n_words"), VOCABULARY
    ),
    "encoder_hash_byte_group_vocab": VOCABULARY,
    "original_max_position_embeddings": POSITIONS,
}
"""Names of sizes in transformers configs, with their small values. Other sizes stay."""
SHARING = (
    "num_key_value_heads",
    "num_kv_heads",
    "swa_num_key_value_heads",
    "num_global_key_value_heads",
    "multi_query_group_num",
)
WINDOWS = (
    "sliding_window",
    "attention_chunk_size",
    "window_size",
    "sliding_window_size",
    "local_attention",
    "index_topk",
)
FEW = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
ROPE_FACTORS = ("short_factor", "long_factor")
"""Factors of longrope, one per pair of rotated dimensions."""
INDICES = (
    "moe_layers",
    "mlp_only_layers",
    "full_attn_idxs",
    "cross_attention_layers",
    "full_attention_layers",
    "fullatt_block_indexes",
    "deepstack_visual_indexes",
)
"""Lists of layer indices by kind."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "depth")
MIN_LAYERS = 2


class NoSmallCopy(ValueError):
    """An architecture that could not be shrunk; the message has the reason."""


def one_line(error: Exception) -> str:
    """An error's class and the last line of its message, where self-validating classes put the reason."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].strip()}"[:MAX_MESSAGE]


def small_config(config: Any) -> Any:
    """A config of the same class with small sizes.

    Raises: NoSmallCopy.
    """
    settings = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    try:
        return type(config)(**{**_shrunk(settings), "dtype": "float32"})
    except Exception as error:  # configs validate themselves, each in its own way
        raise NoSmallCopy(f"its config does not shrink: {one_line(error)}") from error


def small_model(config: Any, *, seed: int = 4) -> Any:
    """A causal language model with random weights, including norms and biases, for a `small_config`.

    Raises: NoSmallCopy.
    """
    try:
        with torch.device("meta"):
            outline = auto_class(config).from_config(config, dtype=torch.float32, trust_remote_code=False)
        if (size := sum(parameter.numel() for parameter in outline.parameters())) > MAX_PARAMETERS:
            raise NoSmallCopy(f"its small copy has {size:,} parameters")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model: Any = auto_class(config).from_config(config, dtype=torch.float32, trust_remote_code=False)
    except NoSmallCopy:
        raise
    except Exception as error:  # as above
        raise NoSmallCopy(f"its small copy cannot be made: {one_line(error)}") from error
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * SPREAD)
    return model.eval()


def _shrunk(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The dictionary of a config, or of a part of it."""
    num_layers = next((settings[name] for name in LAYERS if isinstance(settings.get(name), int)), None)
    fewer = None if num_layers is None else _num_layers(settings, num_layers)
    rotated = int(HEAD_SIZE * (settings.get("partial_rotary_factor") or 1.0))
    heads = next((settings[name] for name in ("num_attention_heads", "n_head", "n_heads") if settings.get(name)), None)
    small: dict[str, Any] = {}
    for name, value in settings.items():
        if name in ("id2label", "label2id"):
            continue
        if isinstance(value, Mapping):
            small[name] = _shrunk({key: one for key, one in value.items() if not _is_beyond(key, fewer)})
        elif name in ROPE_FACTORS and isinstance(value, list):
            small[name] = value[: rotated // 2]
        elif name == "mrope_section" and value:
            small[name] = [rotated // 2 - 2, 1, 1]
        elif isinstance(value, list) and name in INDICES:
            small[name] = [layer for layer in value if not _is_beyond(layer, fewer)]
        elif isinstance(value, list) and len(value) == num_layers:
            small[name] = [_number(name, one, heads) if _is_number(one) else one for one in value[:fewer]]
        elif name in LAYERS and _is_number(value):
            small[name] = fewer
        elif name == "num_kv_shared_layers" and value and fewer is not None:
            small[name] = fewer // 2
        elif _is_number(value):
            small[name] = _number(name, value, heads)
        else:
            small[name] = value
    return small


def _is_beyond(layer: Any, num_layers: int | None) -> bool:
    """Whether the key is the index of a dropped layer; per-layer settings are keyed by it."""
    return num_layers is not None and str(layer).isdecimal() and int(layer) >= num_layers


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, value: Any, heads: Any) -> int:
    if name in SIZES:
        return SIZES[name]
    if name in SHARING:
        return HEADS if value == heads else min(value, SHARED_HEADS)
    if name in FEW:
        return min(value, 2)
    if name in WINDOWS and value:
        return WINDOW
    if name.endswith("_token_id"):
        return value % VOCABULARY if value >= 0 else value
    return value


def _num_layers(settings: Mapping[str, Any], num_layers: int) -> int:
    """The smallest number of first layers that includes every kind; twice as many if the last layers share the cache of
    earlier ones."""
    fewest = min(MIN_LAYERS, num_layers)
    for name, value in settings.items():
        if isinstance(value, list) and len(value) == num_layers and name not in INDICES:
            kinds = [str(one) for one in value]
            fewest = max(fewest, *(kinds.index(kind) + 1 for kind in kinds))
    return min(num_layers, 2 * fewest) if settings.get("num_kv_shared_layers") else fewest
