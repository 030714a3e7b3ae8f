"""The cost of a model from the shape in its Hugging Face config.json: parameters, KV cache, floating-point operations.

Dense and mixture-of-experts decoders of the Llama family (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, GLM-4.5),
DeepSeek-V3 with its latent attention, those behind a vision tower (Qwen2.5-VL, Qwen3-VL, SmolVLM), and policies that
read image patches, with or without an expert for actions. A multiply-add counts as two operations; attention is counted
at the context it has, softmax and norms are left out (under 1 %).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf_sched.errors import ProfileError, did_you_mean

BYTES_PER_PARAMETER = 2
"""Parameters are bf16, in which models are served and their weights synced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """Latent attention (MLA, arXiv:2405.04434): keys and values of all heads are computed from one short vector.

    Example: DeepSeek-V3 is LatentShape(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    """

    kv_rank: int
    """Length of the vector of keys and values."""
    nope_dim: int
    """Numbers of a head's query and key without a position."""
    rope_dim: int
    """Those with one; all heads share such a key."""
    value_dim: int
    q_rank: int = 0
    """Length of the vector of queries; 0: they are computed from the hidden states."""

    @property
    def query_dim(self) -> int:
        """Length of a head's query."""
        return self.nope_dim + self.rope_dim

    def linear_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Number of parameters of the projections of a layer."""
        queries = num_heads * self.query_dim
        of_queries = self.q_rank * (hidden_size + queries) if self.q_rank else hidden_size * queries
        of_keys = hidden_size * (self.kv_rank + self.rope_dim)
        return (
            of_queries
            + of_keys
            + num_heads * (self.kv_rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden_size)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The numbers that determine a decoder's cost.

    Example: Qwen2.5-7B is `find_model("Qwen2.5-7B")`, with 7.62e9 parameters and 57,344 bytes of KV cache per token.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense MLP; unused where every layer has experts."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """With latent attention the mean of the lengths of a query and a value, so that what is proportional to both holds
    for their sum."""
    vocab_size: int
    latent: LatentShape | None = None
    tied_embeddings: bool = False
    """True: one matrix embeds tokens and predicts them."""
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    """Routed experts of each layer that has some; 0 for a dense model."""
    num_active_experts: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    """Width of the experts that every token goes through."""
    num_dense_layers: int = 0
    """Layers of a model with experts that have a dense MLP instead."""
    vision_parameters: int = 0
    """Parameters of the vision towers and the projector in front of the decoder."""
    vision_widths: int = 0
    """Inputs and outputs together of the linear layers among them, of a vision-language model."""
    num_patches: int = 0
    """Image tokens of one camera in the decoder; each is an image patch, or `patches_per_token` of them."""
    patches_per_token: int = 1
    expert: "ModelShape | None" = None
    """The transformer that turns noise into actions and reads the decoder's keys and values (pi0). The decoder then
    predicts no tokens."""
    source: str = ""

    @property
    def num_parameters(self) -> int:
        """Number of all parameters."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        routers = self.num_expert_layers * self.hidden_size * self.num_experts
        layers = self.num_layers * self._attention_parameters + routers + self._shared_mlp_parameters
        expert = self.expert.num_parameters if self.expert else 0
        others = embeddings + self.hidden_size + self.vision_parameters + expert
        return layers + self.num_expert_parameters + others

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters used per token: of the experts, only the chosen ones."""
        idle = self._expert_parameters * (self.num_experts - self.num_active_experts)
        return self.num_parameters - self.num_expert_layers * idle

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with routed experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def num_expert_parameters(self) -> int:
        """Number of parameters of all routed experts."""
        return self.num_expert_layers * self._expert_parameters * self.num_experts

    @property
    def num_linear_parameters(self) -> int:
        """Number of parameters of the linear layers, those that FP8 checkpoints have in FP8: the projections of
        attention, MLPs and experts, but not embeddings, head, norms, biases and routers."""
        return self.num_layers * self._projection_parameters + self._shared_mlp_parameters + self.num_expert_parameters

    @property
    def largest_linear_parameters(self) -> int:
        """Number of parameters of the largest linear layer; experts of a layer are computed together."""
        experts = 2 * self.hidden_size * self.expert_intermediate_size * self.num_experts
        return max(self.hidden_size * max(self.intermediate_size, self.num_heads * self.head_dim), experts)

    @property
    def num_matmul_parameters(self) -> int:
        """Number of parameters that a text token is multiplied with: the active ones without the vision towers, the
        expert for actions and the table in which its embedding is looked up."""
        predicts = self.tied_embeddings and self.expert is None
        looked_up = 0 if predicts else self.vocab_size * self.hidden_size
        expert = self.expert.num_parameters if self.expert else 0
        return self.num_active_parameters - looked_up - self.vision_parameters - expert

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters in bf16."""
        return BYTES_PER_PARAMETER * self.num_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, in bf16; with latent attention, of the vector that they
        are computed from, and of the key that all heads share."""
        if self.latent is not None:
            return BYTES_PER_PARAMETER * self.num_layers * (self.latent.kv_rank + self.latent.rope_dim)
        return 2 * BYTES_PER_PARAMETER * self.num_layers * self.num_kv_heads * self.head_dim

    def forward_flops(self, context_tokens: float) -> float:
        """Operations of a forward pass for one text token that attends to `context_tokens` tokens on average (prefill,
        decode, log-probabilities)."""
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * context_tokens
        return 2.0 * self.num_matmul_parameters + attention

    @property
    def vision_flops(self) -> float:
        """Operations of a forward pass of one camera's image through the vision towers and the projector."""
        return 2.0 * self.vision_parameters * self.num_patches * self.patches_per_token

    @property
    def _attention_parameters(self) -> int:
        """Number of attention parameters in one layer, with its two norms."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        bias = q + 2 * kv if self.qkv_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        norms += 0 if self.latent is None else self.latent.q_rank + self.latent.kv_rank
        return self._projection_parameters + bias + norms

    @property
    def _projection_parameters(self) -> int:
        """Number of parameters of the linear layers of attention in one layer, without biases."""
        if self.latent is not None:
            return self.latent.linear_parameters(self.hidden_size, self.num_heads)
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def _shared_mlp_parameters(self) -> int:
        """Number of parameters of all MLPs that every token goes through: dense ones and shared experts."""
        num_dense = self.num_layers - self.num_expert_layers
        columns = num_dense * self.intermediate_size + self.num_expert_layers * self.shared_intermediate_size
        return 3 * self.hidden_size * columns

    @property
    def _expert_parameters(self) -> int:
        """Number of parameters of one expert in one layer: gate, up and down."""
        return 3 * self.hidden_size * self.expert_intermediate_size

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, name: str = "", source: str = "config.json") -> "ModelShape":
        """The shape in a Hugging Face configuration.

        Raises:
            ProfileError: a model type that is not of this family, or a missing or impossible number; names the key.
        """
        kind = config.get("model_type")
        if kind in _OF_VISION_LANGUAGE:
            return _vision_language(config, name=name or str(kind), source=source)
        if kind not in _MODEL_TYPES:
            raise ProfileError(f"config.model_type={kind!r}{did_you_mean(str(kind), _MODEL_TYPES)}")
        hidden, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        num_layers, experts, num_dense, num_shared = _count(config, "num_hidden_layers"), 0, 0, 0
        if kind == "qwen3_moe":  # transformers 5 writes num_local_experts where checkpoints have num_experts
            experts = _count(config, "num_experts", config.get("num_local_experts"))
        elif kind in _DEEPSEEK_EXPERTS:
            experts = _count(config, "n_routed_experts")
            num_dense = min(num_layers, config.get("first_k_dense_replace", _DEEPSEEK_EXPERTS[kind]))
            num_shared = config.get("n_shared_experts") or 0
        expert_width = _count(config, "moe_intermediate_size") if experts else 0
        latent = _latent(config) if kind == "deepseek_v3" else None
        return cls(
            name=name or kind,
            num_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=_count(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=_count(config, "num_key_value_heads", num_heads),
            head_dim=_count(config, "head_dim", hidden // num_heads)
            if latent is None
            else -(-(latent.query_dim + latent.value_dim) // 2),
            latent=latent,
            vocab_size=_count(config, "vocab_size"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe") or (kind == "glm4_moe" and bool(config.get("use_qk_norm", False))),
            num_experts=experts,
            num_active_experts=_count(config, "num_experts_per_tok") if experts else 0,
            expert_intermediate_size=expert_width,
            shared_intermediate_size=num_shared * expert_width,
            num_dense_layers=num_dense,
            source=source,
        )

    @classmethod
    def from_folder(cls, folder: str | Path, *, read: "Callable[..., ModelShape] | None" = None) -> "ModelShape":
        """The shape in `folder/config.json`.

        Args:
            read: makes a shape of a configuration, as `from_config`, which is the default.

        Raises:
            ProfileError: no such file, not JSON, or not a configuration that `read` knows; names the file.
        """
        path = Path(folder) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as e:
            raise ProfileError(f"{path}: {e.strerror}; give the folder of a Hugging Face model") from e
        except (ValueError, RecursionError) as e:
            raise ProfileError(f"{path} is not valid JSON: {e}") from e
        if not isinstance(config, dict):
            raise ProfileError(f"{path} holds no object; expected a Hugging Face configuration")
        try:
            return (read or cls.from_config)(config, name=Path(folder).resolve().name, source=str(path))
        except ProfileError as e:
            raise ProfileError(f"{path}: {e}") from e


def find_model(name: str) -> ModelShape:
    """The shape of that public model, also of its `-Instruct` variant, which has the same.

    Raises:
        ProfileError: there is none; says which there are.
    """
    by_name = {key.lower(): shape for key, shape in MODELS.items()}
    try:
        return by_name[name.lower().removesuffix("-instruct")]
    except KeyError:
        raise ProfileError(
            f"model={name!r} is neither the folder of a model nor a public model whose shape is known"
            f"{did_you_mean(name, MODELS)}"
        ) from None


def resolve_model(model: str | Path | ModelShape) -> ModelShape:
    """A shape as it is, the shape in a folder, or that of a public model.

    Raises:
        ProfileError: neither a folder with a config.json nor a known name.
    """
    if isinstance(model, ModelShape):
        return model
    return ModelShape.from_folder(model) if Path(model).is_dir() else find_model(str(model))


_OF_VISION_LANGUAGE = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe", "smolvlm": "llama"}
"""`model_type` of a vision-language model -> that of its decoder."""
_DEEPSEEK_EXPERTS = {"glm4_moe": 1, "deepseek_v3": 3}
"""Model type with DeepSeek's names for experts -> its default of `first_k_dense_replace`."""
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", *_DEEPSEEK_EXPERTS, *_OF_VISION_LANGUAGE)

_TOWER_PARAMETERS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": 304_368_640,  # timm's model card: 304.4 M
    "vit_so400m_patch14_siglip_224": 427_680_704,  # timm's model card: 427.7 M, with its pooling head
}
_TOWER_WIDTHS = {"vit_large_patch14_reg4_dinov2.lvd142m": 1024, "vit_so400m_patch14_siglip_224": 1152}
_PATCH_SIZE = 14
LLAMA_2_7B: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
"""The keys of its config.json that vision-language models based on it leave out."""


def with_vision_towers(
    decoder: ModelShape, towers: Sequence[str], *, image_size: int, name: str, source: str
) -> ModelShape:
    """The decoder behind vision towers, which look at the same picture, and a projector of three linear layers.

    Args:
        towers: names in timm.
        image_size: pixels of a side.

    Raises:
        ProfileError: a tower that is not known.
    """
    for tower in towers:
        if tower not in _TOWER_PARAMETERS:
            raise ProfileError(f"config.timm_model_ids: {tower!r}{did_you_mean(str(tower), _TOWER_PARAMETERS)}")
    width, hidden = sum(_TOWER_WIDTHS[tower] for tower in towers), decoder.hidden_size
    projector = 4 * width * width + 4 * width * hidden + hidden * hidden + 4 * width + 2 * hidden
    return replace(
        decoder,
        name=name,
        vision_parameters=sum(_TOWER_PARAMETERS[tower] for tower in towers) + projector,
        num_patches=(image_size // _PATCH_SIZE) ** 2,
        source=source,
    )


def _vision_language(config: Mapping[str, Any], *, name: str, source: str) -> ModelShape:
    """The decoder with the parameters of its vision tower. What the tower computes is not counted.

    Args:
        config: sizes of the decoder are in `text_config`, or beside `vision_config` in older files.
    """
    kind, vision = config["model_type"], config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ProfileError("config.vision_config is missing; add it")
    text = {**config, **(config.get("text_config") or {}), "model_type": _OF_VISION_LANGUAGE[kind]}
    text["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    decoder = ModelShape.from_config(text, name=name, source=source)
    width, inner = _count(vision, "hidden_size"), _count(vision, "intermediate_size")
    patch = 3 * _count(vision, "patch_size") ** 2
    attention = 4 * width * width + 4 * width
    if kind == "smolvlm":
        num_layers = _count(vision, "num_hidden_layers")
        layer = attention + 2 * width * inner + inner + width + 4 * width
        side = _count(vision, "image_size") // _count(vision, "patch_size")
        merged = width * _count(config, "scale_factor") ** 2
        projector = merged * decoder.hidden_size
        tower = patch * width + width + side * side * width + num_layers * layer + 2 * width + projector
        widths = num_layers * (8 * width + 2 * (width + inner)) + merged + decoder.hidden_size
        return replace(decoder, vision_parameters=tower, vision_widths=widths)
    num_layers, merged = _count(vision, "depth"), width * _count(vision, "spatial_merge_size", 2) ** 2
    patch *= _count(vision, "temporal_patch_size", 2)
    merger = merged * merged + merged + merged * decoder.hidden_size + decoder.hidden_size
    merger_widths = 3 * merged + decoder.hidden_size
    if kind == "qwen2_5_vl":
        layer = attention + 3 * width * inner + 2 * inner + width + 2 * width
        tower = patch * width + num_layers * layer + merger + width
        widths = num_layers * (6 * width + 3 * (width + inner)) + merger_widths
        return replace(decoder, vision_parameters=tower, vision_widths=widths)
    layer = attention + 2 * width * inner + inner + width + 4 * width
    num_deep = len(vision.get("deepstack_visual_indexes") or ())
    tower = patch * width + width + _count(vision, "num_position_embeddings") * width + num_layers * layer
    return replace(
        decoder,
        vision_parameters=tower + merger + 2 * width + num_deep * (merger + 2 * merged),
        vision_widths=num_layers * (6 * width + 2 * (width + inner)) + (1 + num_deep) * merger_widths,
    )


def _gemma(name: str, hidden: int, intermediate: int, *, vocab_size: int, **more: Any) -> ModelShape:
    """Gemma as pi0 has it: 18 layers, 8 heads of 256, one of keys and values (arXiv:2410.24164, appendix B)."""
    return ModelShape(
        name=name,
        num_layers=18,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=8,
        num_kv_heads=1,
        head_dim=256,
        vocab_size=vocab_size,
        tied_embeddings=True,
        **more,
    )


def _paligemma_with_expert(name: str) -> ModelShape:
    """PaliGemma-3B, and an expert of 0.3e9 parameters (arXiv:2410.24164, appendix B). The adaptive norms of pi0.5
    (0.12e9 parameters, once for each chunk) are left out."""
    siglip, width = 412_442_352, 1152  # PaliGemma's tower has no pooling head (google/paligemma-3b-pt-224)
    return _gemma(
        name,
        2048,
        16_384,
        vocab_size=257_152,
        vision_parameters=siglip + width * 2048 + 2048,
        num_patches=256,
        expert=_gemma("expert", 1024, 4096, vocab_size=0),
        source="arXiv:2410.24164, appendix B",
    )


def _smolvla() -> ModelShape:
    """The first 16 layers of SmolVLM2-500M, and an expert of three quarters of its width (arXiv:2506.01844, LeRobot's
    configuration_smolvla.py). Half of the expert's layers project keys and values from 320 numbers, not from 720 (2e6
    parameters less); this is left out."""
    heads: dict[str, Any] = {"num_layers": 16, "num_heads": 15, "num_kv_heads": 5, "head_dim": 64}
    siglip, width, pixel_shuffle = 86_433_024, 768, 16  # SigLIP B/16 for 512 pixels, without a pooling head
    return ModelShape(
        name="SmolVLA",
        hidden_size=960,
        intermediate_size=2560,
        vocab_size=49_280,
        tied_embeddings=True,  # no token is predicted: the head is not used
        vision_parameters=siglip + width * pixel_shuffle * 960,
        num_patches=64,
        patches_per_token=pixel_shuffle,
        expert=ModelShape(
            name="expert", hidden_size=720, intermediate_size=2048, vocab_size=0, tied_embeddings=True, **heads
        ),
        source="LeRobot, configuration_smolvla.py; huggingface.co/HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
        **heads,
    )


def _latent(config: Mapping[str, Any]) -> LatentShape:
    return LatentShape(
        q_rank=_count(config, "q_lora_rank") if config.get("q_lora_rank") else 0,
        kv_rank=_count(config, "kv_lora_rank"),
        nope_dim=_count(config, "qk_nope_head_dim"),
        rope_dim=_count(config, "qk_rope_head_dim"),
        value_dim=_count(config, "v_head_dim"),
    )


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ProfileError(f"config.{key} is missing; add it")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ProfileError(f"config.{key}={value!r} must be an integer of at least 1")
    return value


def _public(name: str, repository: str, kind: str, **config: Any) -> ModelShape:
    source = f"config.json of huggingface.co/{repository}"
    return ModelShape.from_config({"model_type": kind, **config}, name=name, source=source)


def _qwen25(
    size: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> ModelShape:
    return _public(
        f"Qwen2.5-{size}",
        f"Qwen/Qwen2.5-{size}",
        "qwen2",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **{"vocab_size": 152064, **more},
    )


def _qwen25_vl(
    size: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> ModelShape:
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14}
    return _public(
        f"Qwen2.5-VL-{size}",
        f"Qwen/Qwen2.5-VL-{size}-Instruct",
        "qwen2_5_vl",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vision_config=tower,
        **more,
    )


def _distilled(size: str, hidden: int, intermediate: int, heads: int, kv_heads: int, *, vocab_size: int) -> ModelShape:
    """The shape of Qwen2.5-Math, with a head of its own at either size."""
    return _public(
        f"DeepSeek-R1-Distill-Qwen-{size}",
        f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}",
        "qwen2",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=28,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab_size,
    )


def _glm45(name: str, hidden: int, intermediate: int, layers: int, experts: int, width: int, **more: Any) -> ModelShape:
    return _public(
        name,
        f"zai-org/{name}",
        "glm4_moe",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        attention_bias=True,
        vocab_size=151552,
        n_routed_experts=experts,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=width,
        **more,
    )


def _openvla_7b(name: str, repository: str) -> ModelShape:
    return with_vision_towers(
        ModelShape.from_config({**LLAMA_2_7B, "vocab_size": 32064}),
        list(_TOWER_PARAMETERS),
        image_size=224,
        name=name,
        source=f"config.json of huggingface.co/{repository}",
    )


MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _qwen25("0.5B", 896, 4864, 24, 14, 2, vocab_size=151936, tie_word_embeddings=True),
        _qwen25("1.5B", 1536, 8960, 28, 12, 2, vocab_size=151936, tie_word_embeddings=True),
        _qwen25("3B", 2048, 11008, 36, 16, 2, vocab_size=151936, tie_word_embeddings=True),
        _qwen25("7B", 3584, 18944, 28, 28, 4),
        _qwen25("32B", 5120, 27648, 64, 40, 8),
        _qwen25_vl("3B", 2048, 11008, 36, 16, 2, vocab_size=151936, tie_word_embeddings=True),
        _qwen25_vl("7B", 3584, 18944, 28, 28, 4, vocab_size=152064),
        _distilled("1.5B", 1536, 8960, 12, 2, vocab_size=151936),
        _distilled("7B", 3584, 18944, 28, 4, vocab_size=152064),
        _public(
            "Qwen3-8B",
            "Qwen/Qwen3-8B",
            "qwen3",
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
        ),
        _public(
            "Qwen3-30B-A3B",
            "Qwen/Qwen3-30B-A3B",
            "qwen3_moe",
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
        _glm45("GLM-4.5", 5120, 12288, 92, 160, 1536, first_k_dense_replace=3, use_qk_norm=True),
        _glm45("GLM-4.5-Air", 4096, 10944, 46, 128, 1408, first_k_dense_replace=1),
        _public(
            "DeepSeek-V3",
            "deepseek-ai/DeepSeek-V3",
            "deepseek_v3",
            hidden_size=7168,
            intermediate_size=18432,
            num_hidden_layers=61,
            num_attention_heads=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            vocab_size=129280,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
            first_k_dense_replace=3,
        ),
        _openvla_7b("OpenVLA-7B", "openvla/openvla-7b"),
        _openvla_7b("OpenVLA-OFT", "moojink/openvla-7b-oft-finetuned-libero-spatial"),
        _paligemma_with_expert("pi0"),
        _paligemma_with_expert("pi0.5"),
        _smolvla(),
    )
}
"""Name -> shape."""
