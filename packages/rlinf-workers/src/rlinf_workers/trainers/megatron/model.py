"""The GPTModel of megatron-core with this rank's shard of a Hugging Face model.

Layers follow megatron-core's local spec, without Transformer Engine; attention is torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from rlinf_comm.weights import Layout
from rlinf_comm.weights.layouts import TransformerShape, megatron_layout, rounded_up
from rlinf_workers.trainers.megatron.attention import CausalAttention
from rlinf_workers.trainers.megatron.heads import Head
from rlinf_workers.trainers.megatron.latent_attention import LatentSelfAttention, install
from rlinf_workers.trainers.megatron.options import MegatronOptions
from rlinf_workers.trainers.megatron.queries import Frequencies, Query
from rlinf_workers.trainers.megatron.routers import ReplayedRouter, replay
from rlinf_workers.trainers.megatron.spec import rope_of, rope_type, variant_problem

VOCAB_MULTIPLE = 8
"""The embedding rows on each rank are a multiple of it, for tensor cores in bfloat16."""


LATENT_EPSILON = 1e-6


def layout_of(shape: TransformerShape, options: MegatronOptions, num_ranks: int, dtype: str) -> Layout:
    """The canonical tensors on each rank: one replica's layout, repeated for every replica."""
    of_replica = megatron_layout(
        shape,
        tp=options.tensor_parallel,
        pp=options.pipeline_parallel,
        dp=options.num_row_slices,
        virtual_stages=options.virtual_pipeline_parallel,
        layers_by_stage=options.layers_by_chunk(shape.num_layers),
        ep=options.expert_parallel,
        expert_tp=options.expert_tensor_parallel,
        transformer_engine=False,
        experts="sequential",
        vocab_multiple=VOCAB_MULTIPLE,
        dtype=dtype,
    )
    return Layout(of_replica.specs, of_replica.ranks * (num_ranks // options.ranks_per_replica))


def make_chunks(config: Any, shape: TransformerShape, options: MegatronOptions, head: Head) -> list[AnsweringModel]:
    """This rank's shard, with uninitialized weights; of a virtual pipeline its chunks, in the order of their layers.

    Args:
        config: transformers' config.
        shape: shape of the model with its head.

    Raises: ValueError for a variant of the architecture that megatron-core would compute differently.
    """
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 uses the name also without Transformer Engine
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010
    numbers = [None] if options.num_chunks is None else range(options.num_chunks)
    return [_make_chunk(config, shape, options, head, number) for number in numbers]


def joined(chunks: Sequence[AnsweringModel]) -> nn.Module:
    """One module, whose parameters have the names of the layout."""
    if len(chunks) == 1:
        return chunks[0]
    return nn.ModuleDict({f"model{number}": chunk for number, chunk in enumerate(chunks)})


def _make_chunk(
    config: Any, shape: TransformerShape, options: MegatronOptions, head: Head, number: int | None
) -> AnsweringModel:
    core_config = _transformer_config(config, shape, options)
    spec = get_gpt_decoder_block_spec(
        core_config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=number
    )
    _own_parts(spec)
    model = AnsweringModel(
        config=core_config,
        transformer_layer_spec=spec,  # pyright: ignore[reportArgumentType], a block's spec is accepted too
        vocab_size=rounded_up(shape.vocab, VOCAB_MULTIPLE * options.tensor_parallel),
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_percent=_rotated_share(config),
        rotary_base=_rope_base(config),  # pyright: ignore[reportArgumentType], it is only a divisor
        vp_stage=number,
    )
    if (rotations := getattr(model, "rotary_pos_emb", None)) is not None:
        rotations.cp_group = None  # a slice of padded rows has whole ones
    model.head, model.num_words = head, shape.vocab
    model.frequencies = _frequencies(config, model)
    if shape.latent is not None:
        install(model, model.frequencies, is_interleaved=getattr(config, "rope_interleave", True))
    if model.post_process:
        head.fit(model)
    num_parts = options.tensor_parallel if options.sequence_parallel else 1
    replay(model, shape, parallel_state.get_tensor_model_parallel_rank() % num_parts, num_parts)
    if model.pre_process and config.pad_token_id is not None:
        model.embedding.word_embeddings.register_forward_hook(partial(_keep_padding, core_config, config.pad_token_id))
    return model


class AnsweringModel(GPTModel):
    """Returns the outputs for `query` instead of logits."""

    head: Head
    query: Query
    """The query of the next call, on the last stage."""
    num_words: int
    """Vocabulary size, without padding."""
    frequencies: Frequencies

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """As GPTModel's, which gives attention its `packed_seq_params`."""
        if (row := named.get("packed_seq_params")) is not None:
            named["packed_seq_params"] = row.at(named["position_ids"][0], self.frequencies)
        return super().forward(*arguments, **named)

    def _preprocess(self, *arguments: Any, **named: Any) -> Any:
        """As GPTModel's, without rotations for a packed row, which has them already: megatron-core would keep each
        layer's own."""
        decoder_input, rotations, *others = super()._preprocess(*arguments, **named)
        return decoder_input, rotations if named.get("packed_seq_params") is None else None, *others

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The head's outputs on the last stage; on other stages, the hidden states for the next stage."""
        return self.head.answers(self, hidden_states, self.query) if self.post_process else hidden_states


def _keep_padding(
    config: TransformerConfig, padding: int, _: nn.Module, arguments: tuple[Tensor], embeddings: Tensor
) -> None:
    """Drops the gradient of the padding token's embedding, as transformers does; a policy may sample it like any token.

    Args:
        arguments: the token ids [R, S].
        embeddings: [R, S, H], or this rank's positions [S / tp, R, H].
    """
    if not embeddings.requires_grad:
        return
    is_padding = arguments[0] == padding
    if config.sequence_parallel:
        parts = is_padding.T.chunk(config.tensor_model_parallel_size)
        is_padding = parts[parallel_state.get_tensor_model_parallel_rank()]
    embeddings.register_hook(lambda gradient: gradient.masked_fill(is_padding[..., None], 0.0))


def _frequencies(config: Any, model: GPTModel) -> Frequencies:
    """megatron-core's own, which transformers computes alike; of latent attention those of transformers, for YaRN."""
    if not getattr(model.config, "multi_latent_attention", False):
        return Frequencies(of_pairs=model.rotary_pos_emb.inv_freq)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope_of(config.to_dict())
    if rope_type(rope) == "default":
        powers = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float) / config.qk_rope_head_dim
        return Frequencies(of_pairs=1.0 / (_rope_base(config) ** powers))
    of_pairs, scaling = ROPE_INIT_FUNCTIONS[rope_type(rope)](config)
    return Frequencies(of_pairs=of_pairs, scaling=scaling)


class RMSNorm:
    """torch's RMSNorm, which megatron-core rejects under sequence parallelism; marked so that gradients are summed."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.RMSNorm:  # pyright: ignore
        norm = nn.RMSNorm(hidden_size, eps=eps)
        for parameter in norm.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010, megatron-core's attribute
        return norm


class LatentNorm(RMSNorm):
    """That of latent vectors, whose epsilon is not the config's in transformers' models."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.RMSNorm:  # pyright: ignore
        return RMSNorm(config, hidden_size, LATENT_EPSILON)  # pyright: ignore[reportReturnType]


def _own_parts(spec: Any) -> None:
    """Installs our norms, attention and routers in a block's spec."""
    spec.layer_norm = RMSNorm
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        if hasattr(parts.mlp.submodules, "router"):
            parts.mlp.submodules.router = ReplayedRouter
        attention = parts.self_attention.submodules
        attention.core_attention = CausalAttention
        if hasattr(attention, "kv_layernorm"):
            parts.self_attention.module = LatentSelfAttention
            attention.q_layernorm = attention.kv_layernorm = LatentNorm
            continue
        for name in ("q_layernorm", "k_layernorm"):
            if isinstance(getattr(attention, name), type) and "Identity" not in getattr(attention, name).__name__:
                setattr(attention, name, RMSNorm)


def _transformer_config(config: Any, shape: TransformerShape, options: MegatronOptions) -> TransformerConfig:
    if problem := variant_problem(config.to_dict()):
        raise ValueError(problem)
    dtype = getattr(torch, options.compute_dtype)
    settings: dict[str, Any] = {}
    if shape.num_experts:
        settings |= {
            "num_moe_experts": shape.num_experts,
            "moe_ffn_hidden_size": shape.expert_intermediate,
            "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.num_layers)],
            "moe_router_topk": config.num_experts_per_tok,
            "moe_router_pre_softmax": not config.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": False,
            "moe_shared_expert_intermediate_size": shape.shared_intermediate or None,
        }
    if shape.router_bias:
        settings |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,  # as in transformers, whose models do not change it
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_router_dtype": "fp32",
        }
        if config.n_group > 1:
            settings |= {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
    kind = TransformerConfig
    if (latent := shape.latent) is not None:
        kind, rope = MLATransformerConfig, rope_of(config.to_dict())
        settings |= {
            "q_lora_rank": latent.q_rank or None,
            "kv_lora_rank": latent.kv_rank,
            "qk_head_dim": latent.nope_dim,
            "qk_pos_emb_head_dim": latent.rope_dim,
            "v_head_dim": latent.value_dim,
            "rope_type": "rope",  # not used: LatentSelfAttention has transformers' frequencies
            "rotary_scaling_factor": 1.0 if rope_type(rope) == "default" else rope["factor"],
            "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,  # these two determine the scale of the scores
        }
    if options.recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    chunks = [["decoder"] * count for count in options.layers_by_chunk(shape.num_layers)]
    if len({len(chunk) for chunk in chunks}) > 1:
        settings["pipeline_model_parallel_layout"] = [["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], "loss"]]
    return kind(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate or shape.expert_intermediate,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        tensor_model_parallel_size=options.tensor_parallel,
        sequence_parallel=options.sequence_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        virtual_pipeline_model_parallel_size=options.num_chunks,
        # Between two stages, which are neighbours on both sides, the order of batched messages would be ambiguous.
        overlap_p2p_comm=options.num_chunks is not None,
        batch_p2p_comm=options.num_chunks is None,
        expert_model_parallel_size=options.expert_parallel,
        expert_tensor_parallel_size=options.expert_tensor_parallel,
        moe_token_dispatcher_type="alltoall",  # also needed by dense models for variable lengths
        variable_seq_lengths=options.pipeline_parallel > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm or shape.latent is not None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,  # sums: nothing is divided by the number of tokens, micro-batches or ranks
        # Weights get the attributes that the norm computation reads only if they are initialised, too.
        init_method=_left_alone,
        output_layer_init_method=_left_alone,
        embedding_init_method=_left_alone,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        transformer_impl="local",
        **settings,
    )


def _left_alone(weight: Tensor) -> None:
    """Skips initialization, because weights are loaded after the model exists."""


def _rope_base(config: Any) -> float:
    return float(rope_of(config.to_dict()).get("rope_theta") or config.rope_theta)


def _rotated_share(config: Any) -> float:
    """The share of each head's numbers that positions rotate; transformers 4 had it beside the others."""
    return float(
        rope_of(config.to_dict()).get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", 1.0)
    )
