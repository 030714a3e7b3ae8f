"""Megatron-Core: the parameters of a GPTModel on each rank.

Ranks are ordered as Megatron orders them: tensor parallel fastest, then data parallel, then pipeline; for experts
expert-tensor parallel fastest, then expert parallel, then their data parallel, then pipeline.

Query, key and value rows are interleaved by group, [q q k v | q q k v | ...], and split evenly. With more ranks than
groups, groups are split, too: Megatron then gathers the activations and replicates no weight.

In latent attention, the up-projections from the latent vectors are split by heads. The layers that compute the latent
vectors are replicated with Transformer Engine and split by rows in the local spec. Shared experts are split among `tp`
ranks, routed ones among expert-parallel ranks. Layers for multi-token prediction are on the last stage, which has a
second copy of the embedding for them if pp > 1.

Names, shapes and rank order were compared with the models of megatron-core 0.16.1 (local spec) on up to
four processes: TP 2 with one group, TP 2 PP 2 tied, TP 2 EP 4, TP 2 PP 2 with experts; Qwen2-MoE with TP 2 PP 2 EP 2;
latent attention with TP 2 and two layers for multi-token prediction. Qwen2-MoE (TP 2 EP 2) and DeepSeek-V3 (one
process), filled from transformers' models by these layouts, gave the logits that transformers gives. The names of
Transformer Engine's modules are read from the layer specs there (models/gpt/gpt_layer_specs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import Block, Box, Layout, RankLayout, TensorSpec
from rlinf_comm.weights.layouts.assembly import Part, RankAssembly, check_divides, interval, rounded_up
from rlinf_comm.weights.layouts.shape import TransformerShape


def megatron_layout(
    shape: TransformerShape,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    ep: int = 1,
    expert_tp: int = 1,
    layers_by_stage: Sequence[int] | None = None,
    virtual_stages: int = 1,
    transformer_engine: bool = True,
    experts: Literal["te_grouped", "grouped", "sequential"] = "te_grouped",
    mtp_layer: Literal["transformer_layer", "mtp_model_layer"] = "transformer_layer",
    vocab_multiple: int = 128,
    dtype: str | None = None,
) -> Layout:
    """The parameters of a Megatron-Core GPTModel, by their names, which count layers from 0 in each stage.

    `mlp.router.expert_bias` is a buffer, not a parameter: with `router_bias` in the shape, pass
    `dict(model.named_parameters()) | dict(model.named_buffers())` without `*.local_tokens_per_expert`.

    Args:
        tp, pp, ep, expert_tp: Megatron's parallel sizes. Megatron's default for expert_tp is tp; pass it explicitly.
        dp: Number of data-parallel replicas; by default the smallest number that the experts need.
        layers_by_stage: Number of layers of each pipeline stage, with virtual stages of each model chunk in the order
            of the forward pass; by default an even split.
        virtual_stages: Number of model chunks of each rank, which hold every pp-th part of the layers. With several,
            buffers are named as in Megatron's checkpoints: `model0.decoder...`, `model1.decoder...`.
        transformer_engine: Use the names of the Transformer Engine layer spec, in which norms belong to the next linear
            layer; otherwise those of the local spec.
        experts: "te_grouped" is TEGroupedMLP (`linear_fc1.weight0`, ...), "grouped" is GroupedMLP (`weight1` and
            `weight2`, transposed), "sequential" is SequentialMLP (`local_experts.0`, ...).
        mtp_layer: megatron-core's name of the decoder layer in a layer for multi-token prediction: `transformer_layer`
            in 0.16, `mtp_model_layer` in 0.19.
        vocab_multiple: make_vocab_size_divisible_by; the vocabulary is padded to a multiple of this times tp.
        dtype: The dtype of the storage; by default the canonical one.

    Raises:
        LayoutError: sizes that do not divide; or FP8 weights, which Megatron does not keep as plain tensors.
    """
    if shape.fp8_scales is not None:
        raise LayoutError(
            "Megatron holds FP8 weights as Transformer Engine's own tensors, which no layout describes; pass a shape "
            "with fp8_scales=None, as from TransformerShape.from_config(config, dtype='bfloat16')"
        )
    if shape.tower is not None:
        raise LayoutError("megatron_layout has no place for a vision tower; train the model with FSDP")
    dp = max(1, ep * expert_tp // tp) if dp is None and shape.num_experts else dp or 1
    chunks = _chunks(shape, pp, layers_by_stage, virtual_stages)
    _check(shape, tp, pp, dp, ep, expert_tp, transformer_engine)
    specs = shape.specs()
    sizes = _Sizes(tp=tp, pp=pp, ep=ep, expert_tp=expert_tp, num_padded=rounded_up(shape.vocab, vocab_multiple * tp))
    ranks: dict[tuple[int, ...], RankLayout] = {}  # replicas share one
    order = []
    for rank in range(tp * dp * pp):
        within = rank % (tp * dp)
        place = (within % tp, rank // (tp * dp), within // expert_tp % ep, within % expert_tp)
        order.append(place)
        if place not in ranks:
            assembly = RankAssembly(specs, dtype)
            built = _MegatronRank(shape, specs, assembly, place, sizes, transformer_engine, experts, mtp_layer)
            for number in range(virtual_stages):
                prefix = f"model{number}." if virtual_stages > 1 else ""
                built.add_chunk(prefix, number * pp + place[1], chunks)
            ranks[place] = assembly.layout()
    return Layout(specs, tuple(ranks[place] for place in order))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    tp: int
    pp: int
    ep: int
    expert_tp: int
    num_padded: int
    """Rows of the padded embedding."""


def _chunks(
    shape: TransformerShape, pp: int, layers_by_stage: Sequence[int] | None, virtual_stages: int
) -> list[range]:
    """The layers of each model chunk, in the order of the forward pass."""
    if virtual_stages > 1 and pp == 1:
        raise LayoutError(f"virtual_stages={virtual_stages} with pp=1; it needs pp > 1")
    num_chunks = pp * virtual_stages
    if layers_by_stage is None:
        check_divides("num_layers", shape.num_layers, "pp" if num_chunks == pp else "pp * virtual_stages", num_chunks)
        layers_by_stage = [shape.num_layers // num_chunks] * num_chunks
    if len(layers_by_stage) != num_chunks or sum(layers_by_stage) != shape.num_layers:
        raise LayoutError(
            f"layers_by_stage={list(layers_by_stage)} for pp={pp}, virtual_stages={virtual_stages} and "
            f"num_layers={shape.num_layers}; give the number of layers of each stage, or of each of its chunks"
        )
    ends = [sum(layers_by_stage[: stage + 1]) for stage in range(num_chunks)]
    return [range(end - count, end) for end, count in zip(ends, layers_by_stage, strict=True)]


def _check(
    shape: TransformerShape, tp: int, pp: int, dp: int, ep: int, expert_tp: int, transformer_engine: bool
) -> None:
    check_divides("num_heads", shape.num_heads, "tp", tp)
    if shape.latent is None:
        if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
            raise LayoutError(f"num_kv_heads={shape.num_kv_heads} and tp={tp}: one must be a multiple of the other")
        check_divides("the rows of q, k and v", shape.q_rows + 2 * shape.kv_rows, "tp", tp)
    elif not transformer_engine:
        check_divides("q_rank", shape.latent.q_rank, "tp", tp)
        check_divides("kv_rank + rope_dim", shape.latent.kv_rank + shape.latent.rope_dim, "tp", tp)
    if shape.num_experts:
        check_divides("num_experts", shape.num_experts, "ep", ep)
        check_divides("expert_intermediate", shape.expert_intermediate, "expert_tp", expert_tp)
        check_divides("shared_intermediate", shape.shared_intermediate, "tp", tp)
        check_divides("tp * dp", tp * dp, "ep * expert_tp", ep * expert_tp)
    if not all(map(shape.has_experts, range(shape.num_layers + shape.mtp_layers))):
        check_divides("intermediate", shape.intermediate, "tp", tp)
    if shape.mtp_layers:
        if shape.tied_embeddings and pp > 1:
            raise LayoutError(
                f"mtp_layers={shape.mtp_layers} with tied_embeddings and pp={pp}: the last stage would store the "
                "embedding twice, which a layout cannot describe; use pp=1, or leave the layers out"
            )
        check_divides("hidden", shape.hidden, "tp", tp)


class _MegatronRank:
    def __init__(
        self,
        shape: TransformerShape,
        specs: dict[str, TensorSpec],
        assembly: RankAssembly,
        place: tuple[int, int, int, int],
        sizes: _Sizes,
        transformer_engine: bool,
        experts: str,
        mtp_layer: str,
    ) -> None:
        self._shape = shape
        self._specs = specs
        self._rank = assembly
        self._tp_rank, _, self._ep_rank, self._expert_tp_rank = place
        self._sizes = sizes
        self._transformer_engine = transformer_engine
        self._mtp_layer = mtp_layer
        self._add_experts = {
            "te_grouped": self._add_te_grouped,
            "grouped": self._add_grouped,
            "sequential": self._add_sequential,
        }[experts]

    def add_chunk(self, prefix: str, number: int, chunks: Sequence[range]) -> None:
        """Adds a model chunk; the first has the embedding, the last one the head."""
        rank, last = self._rank, number == len(chunks) - 1
        embedding = "model.embed_tokens.weight"
        if number == 0 or (last and self._shape.mtp_layers):
            self._add_vocab(prefix + "embedding.word_embeddings.weight", embedding)
        for index, layer in enumerate(chunks[number]):
            here = f"{prefix}decoder.layers.{index}."
            self._add_layer(here, f"model.layers.{layer}.", self._shape.has_experts(layer))
        if last:
            rank.add_whole(prefix + "decoder.final_layernorm.weight", "model.norm.weight")
            for index in range(self._shape.mtp_layers):
                self._add_mtp(f"{prefix}mtp.layers.{index}.", self._shape.num_layers + index)
            if self._shape.value_head:  # replicated on the ranks of the last stage
                for part in ("weight", "bias"):
                    rank.add_whole(f"{prefix}output_layer.{part}", f"lm_head.{part}")
            elif not self._shape.tied_embeddings:
                self._add_vocab(prefix + "output_layer.weight", "lm_head.weight")
            elif number > 0:  # a copy of the embedding
                self._add_vocab(prefix + "output_layer.weight", embedding)

    def _add_mtp(self, here: str, layer: int) -> None:
        there = f"model.layers.{layer}."
        for norm in ("enorm.weight", "hnorm.weight"):
            self._rank.add_whole(here + norm, there + norm)
        self._add_cut(here + "eh_proj.weight", there + "eh_proj.weight", 0)
        self._rank.add_whole(here + "final_layernorm.weight", there + "shared_head.norm.weight")
        self._add_layer(f"{here}{self._mtp_layer}.", there, self._shape.has_experts(layer))

    def _add_vocab(self, buffer: str, name: str) -> None:
        self._rank.add_vocab(buffer, name, self._sizes.num_padded, self._tp_rank, self._sizes.tp)

    def _add_layer(self, here: str, there: str, has_experts: bool) -> None:
        rank, fused = self._rank, self._transformer_engine
        add_attention = self._add_latent if self._shape.latent is not None else self._add_attention
        add_attention(here, there)
        in_fc1 = fused and not has_experts
        norm = here + ("mlp.linear_fc1.layer_norm_weight" if in_fc1 else "pre_mlp_layernorm.weight")
        rank.add_whole(norm, there + "post_attention_layernorm.weight")
        if has_experts:
            self._add_router(here + "mlp.", there + "mlp.")
            self._add_experts(here + "mlp.experts.", there + "mlp.experts.")
        else:
            self._add_mlp(here + "mlp.linear_fc1.weight", here + "mlp.linear_fc2.weight", there + "mlp.",
                          self._tp_rank, self._sizes.tp)  # fmt: skip

    def _add_attention(self, here: str, there: str) -> None:
        rank, attention = self._rank, here + "self_attention."
        in_qkv = self._transformer_engine
        norm = attention + "linear_qkv.layer_norm_weight" if in_qkv else here + "input_layernorm.weight"
        rank.add_whole(norm, there + "input_layernorm.weight")
        for kind in ("weight", "bias") if self._shape.qkv_bias else ("weight",):
            parts = self._qkv_parts(there + "self_attn.", kind)
            num_rows = sum(box.shape[0] for _, box in parts)
            rank.add(f"{attention}linear_qkv.{kind}", parts, (num_rows, *parts[0][1].shape[1:]))
        self._add_cut(attention + "linear_proj.weight", there + "self_attn.o_proj.weight", 1)
        if self._shape.qk_norm:
            for part in "qk":
                rank.add_whole(f"{attention}{part}_layernorm.weight", f"{there}self_attn.{part}_norm.weight")

    def _add_latent(self, here: str, there: str) -> None:
        """In Transformer Engine the norms of the latent vectors belong to the next layers, as elsewhere; the norm
        before the attention does not, since two layers follow it."""
        rank, fused, latent = self._rank, self._transformer_engine, self._shape.latent
        assert latent is not None, "shapes without latent attention have _add_attention"
        rank.add_whole(here + "input_layernorm.weight", there + "input_layernorm.weight")
        here, there = here + "self_attention.", there + "self_attn."
        projections = [
            ("kv", "kv_a_proj_with_mqa", "kv_b_proj"),
            *([("q", "q_a_proj", "q_b_proj")] * (latent.q_rank > 0)),
        ]
        for part, down, up in projections:
            down_name, down_there = f"{here}linear_{part}_down_proj.weight", f"{there}{down}.weight"
            if fused:
                rank.add_whole(down_name, down_there)
            else:
                self._add_cut(down_name, down_there, 0)
            norm = f"linear_{part}_up_proj.layer_norm_weight" if fused else f"{part}_layernorm.weight"
            rank.add_whole(here + norm, f"{there}{part}_a_layernorm.weight")
            self._add_cut(f"{here}linear_{part}_up_proj.weight", f"{there}{up}.weight", 0)
        if not latent.q_rank:
            self._add_cut(here + "linear_q_proj.weight", there + "q_proj.weight", 0)
        self._add_cut(here + "linear_proj.weight", there + "o_proj.weight", 1)

    def _add_cut(self, buffer: str, name: str, dim: int) -> None:
        self._rank.add_slice(buffer, name, dim, self._tp_rank, self._sizes.tp)

    def _add_router(self, here: str, there: str) -> None:
        """Adds the router and the shared experts of a layer with experts."""
        rank, shape = self._rank, self._shape
        rank.add_whole(here + "router.weight", there + "gate.weight")
        if shape.router_bias:
            rank.add_whole(here + "router.expert_bias", there + "gate.e_score_correction_bias")
        if shape.shared_intermediate:
            shared = here + "shared_experts."
            self._add_mlp(shared + "linear_fc1.weight", shared + "linear_fc2.weight",
                          there + shape.shared_prefix.removeprefix("mlp."), self._tp_rank, self._sizes.tp)  # fmt: skip
        if shape.shared_gate:
            rank.add_whole(here + "shared_experts.gate_weight", there + "shared_expert_gate.weight")

    def _qkv_parts(self, prefix: str, kind: str) -> list[Part]:
        """This rank's even part of the interleaved rows, even if it splits heads."""
        shape = self._shape
        num_queries = shape.num_heads // shape.num_kv_heads
        num_rows = (shape.q_rows + 2 * shape.kv_rows) // self._sizes.tp
        first, stop = self._tp_rank * num_rows, (self._tp_rank + 1) * num_rows
        parts = []
        at = 0  # row of the interleaved matrix
        for group in range(shape.num_kv_heads):
            for part, count in (("q", num_queries), ("k", 1), ("v", 1)):
                length = count * shape.head_dim
                low, high = max(first, at), min(stop, at + length)
                if low < high:
                    name = f"{prefix}{part}_proj.{kind}"
                    row = group * length + low - at
                    parts.append((name, interval(self._specs[name].shape, 0, row, high - low)))
                at += length
        return parts

    def _add_mlp(self, fc1: str, fc2: str, prefix: str, rank: int, num_ranks: int) -> None:
        names = [f"{prefix}{part}_proj.weight" for part in ("gate", "up")]
        parts = [(name, self._rank.slice_of(name, 0, rank, num_ranks)) for name in names]
        num_rows, hidden = parts[0][1].shape
        self._rank.add(fc1, parts, (2 * num_rows, hidden))
        self._rank.add_slice(fc2, f"{prefix}down_proj.weight", 1, rank, num_ranks)

    @property
    def _experts(self) -> range:
        count = self._shape.num_experts // self._sizes.ep
        return range(self._ep_rank * count, (self._ep_rank + 1) * count)

    def _add_te_grouped(self, here: str, there: str) -> None:
        for index, expert in enumerate(self._experts):
            fc1, fc2 = f"{here}linear_fc1.weight{index}", f"{here}linear_fc2.weight{index}"
            self._add_mlp(fc1, fc2, f"{there}{expert}.", self._expert_tp_rank, self._sizes.expert_tp)

    def _add_sequential(self, here: str, there: str) -> None:
        for index, expert in enumerate(self._experts):
            prefix = f"{here}local_experts.{index}."
            fc1, fc2 = f"{prefix}linear_fc1.weight", f"{prefix}linear_fc2.weight"
            self._add_mlp(fc1, fc2, f"{there}{expert}.", self._expert_tp_rank, self._sizes.expert_tp)

    def _add_grouped(self, here: str, there: str) -> None:
        """weight1 [H, E 2I] is used as [E, H, gate I | up I] and weight2 [E I, H] as [E, I, H]: both are transposed."""
        hidden, count = self._shape.hidden, len(self._experts)
        size = self._shape.expert_intermediate // self._sizes.expert_tp
        first = self._expert_tp_rank * size
        rows, columns = Box((first, 0), (size, hidden)), Box((0, first), (hidden, size))
        shape1, shape2 = (hidden, count * 2 * size), (count * size, hidden)
        for index, expert in enumerate(self._experts):
            for half, part in enumerate(("gate", "up")):
                offset = index * hidden * 2 * size + half * size
                name = f"{there}{expert}.{part}_proj.weight"
                self._rank.add_block(Block(name, rows, f"{here}weight1", offset, (1, 2 * size)), shape1)
            block = Block(
                f"{there}{expert}.down_proj.weight", columns, f"{here}weight2", index * size * hidden, (1, hidden)
            )
            self._rank.add_block(block, shape2)
