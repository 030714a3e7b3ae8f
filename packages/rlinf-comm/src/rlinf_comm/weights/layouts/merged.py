"""SGLang and vLLM: q, k and v in one parameter, gate and up in one, all experts of a rank in two.

Both engines use the same names and order for these. The other tensors of DeepSeek and of shared experts are named as in
SGLang (0.5.23: models/deepseek_v2.py, deepseek_nextn.py and qwen2_moe.py, layers/quantization/fp8.py; for GLM a later
glm4_moe.py and glm4_moe_nextn.py).

Rank r of `tp` has the query heads [r H / tp, (r + 1) H / tp) and their key and value heads; with fewer of those than
ranks, neighbouring ranks hold the same one. Experts are assigned to expert-parallel ranks in order, and each is split
among `expert_tp` ranks.

Latent attention: `fused_qkv_a_proj_with_mqa` holds the rows of q_a_proj and then of kv_a_proj_with_mqa, replicated on
every rank; the up-projections from the latent vectors are split by heads. SGLang computes `w_kc` and `w_vc` from
kv_b_proj after loading weights: call `model.post_load_weights()` after each sync. GLM's routers compute from a float32
copy, `_weight_fp32`, which is to be renewed as well. Shared experts are a separate MLP here, so start SGLang with
--disable-shared-experts-fusion.

A vision tower keeps its place in front of the decoder, whose parameters have the names that they have without one:
`visual.blocks.0.attn.qkv.weight` and `model.layers.0.self_attn.qkv_proj.weight`. That of SmolVLM keeps its own names.

The layer for multi-token prediction is SGLang's draft model, a separate module with the target's embedding and head.
Its buffer names have the prefix `draft.`.

FP8 weights keep their block-wise scales, as in `qkv_proj.weight_scale_inv` and `experts.w13_weight_scale_inv`. An
engine may rearrange weights and scales for its kernels; a layout describes them as loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import Box, Layout, RankLayout, TensorSpec
from rlinf_comm.weights.layouts.assembly import Part, RankAssembly, check_divides, interval, rounded_up
from rlinf_comm.weights.layouts.canonical import MTP_OWN
from rlinf_comm.weights.layouts.shape import TransformerShape
from rlinf_comm.weights.layouts.tower import TowerSizes


def merged_layout(
    shape: TransformerShape,
    *,
    tp: int = 1,
    ep: int = 1,
    expert_tp: int | None = None,
    shared_tp: int | None = None,
    vocab_tp: int | None = None,
    tower_tp: int | None = None,
    tower_width: int | None = None,
    positions_tp: int | None = None,
    num_ranks: int | None = None,
    vocab_multiple: int = 64,
    dtype: str | None = None,
) -> Layout:
    """The parameters of SGLang or vLLM, by their names.

    Args:
        tp: Tensor parallelism of attention and dense MLPs; rank r has shard r % tp.
        ep: Expert parallelism.
        expert_tp: Tensor parallelism within each expert; by default the rest of tp.
        shared_tp: Tensor parallelism of the shared experts; by default tp, 1 if they are replicated.
        vocab_tp: Number of shards of the embedding and the head; by default tp, 1 if the engine replicates them.
        tower_tp: Tensor parallelism of the vision tower; by default tp, 1 if the engine replicates it.
        tower_width: Rows of the MLPs in the tower's blocks, with padding; by default those of the model.
        positions_tp: Tensor parallelism of the tower's position embedding; by default every rank has it whole.
        num_ranks: Number of ranks; by default the minimum, max(tp, ep * expert_tp); additional ranks are replicas.
        vocab_multiple: The vocabulary is padded to a multiple of this, 64 in both engines.
        dtype: The dtype of the storage; by default the canonical one.

    Example: SGLang with tp_size=4, dp_size=2 (attention over 2), ep_size=4: merged(shape, tp=2, ep=4, vocab_tp=1).

    Raises:
        LayoutError: sizes that do not divide.
    """
    expert_tp = max(1, tp // ep) if expert_tp is None else expert_tp
    shared_tp = tp if shared_tp is None else shared_tp
    vocab_tp = tp if vocab_tp is None else vocab_tp
    tower = TowerSizes(tp=tp if tower_tp is None else tower_tp, mlp_width=tower_width, positions_tp=positions_tp)
    needed = max(tp, ep * expert_tp if shape.num_experts else 1, shared_tp, vocab_tp)
    num_ranks = needed if num_ranks is None else num_ranks
    sizes = _Sizes(tp=tp, ep=ep, expert_tp=expert_tp, shared_tp=shared_tp, vocab_tp=vocab_tp, tower=tower)
    _check(shape, sizes)
    num_padded = rounded_up(shape.vocab, vocab_multiple)
    check_divides("the padded vocabulary", num_padded, "vocab_tp", vocab_tp)
    for name, size in (
        ("tp", tp),
        ("ep * expert_tp", ep * expert_tp if shape.num_experts else 1),
        ("shared_tp", shared_tp),
        ("vocab_tp", vocab_tp),
        ("tower_tp", tower.tp),
    ):
        check_divides("num_ranks", num_ranks, name, size)
    specs = shape.specs()
    ranks: dict[tuple[int, ...], RankLayout] = {}  # replicas share one
    order = []
    for rank in range(num_ranks):
        place = (rank % tp, rank // expert_tp % ep, rank % expert_tp, rank % shared_tp, rank % vocab_tp)
        order.append(place)
        if place not in ranks:
            assembly = RankAssembly(specs, dtype, shape.fp8_block)
            ranks[place] = _MergedRank(shape, specs, assembly, place, sizes, num_padded).layout()
    return Layout(specs, tuple(ranks[place] for place in order))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    tp: int
    ep: int
    expert_tp: int
    shared_tp: int
    vocab_tp: int
    tower: TowerSizes


def _check(shape: TransformerShape, sizes: _Sizes) -> None:
    if shape.value_head:
        raise LayoutError("value_head: an engine generates tokens, but a critic's head has no row for each token")
    tp = sizes.tp
    check_divides("num_heads", shape.num_heads, "tp", tp)
    if shape.latent is None and shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        raise LayoutError(f"num_kv_heads={shape.num_kv_heads} and tp={tp}: one must be a multiple of the other")
    if shape.num_experts:
        check_divides("num_experts", shape.num_experts, "ep", sizes.ep)
        check_divides("expert_intermediate", shape.expert_intermediate, "expert_tp", sizes.expert_tp)
        check_divides("shared_intermediate", shape.shared_intermediate, "shared_tp", sizes.shared_tp)
    if not all(map(shape.has_experts, range(shape.num_layers + shape.mtp_layers))):
        check_divides("intermediate", shape.intermediate, "tp", tp)
    if shape.mtp_layers > 1:
        raise LayoutError(
            f"mtp_layers={shape.mtp_layers}: SGLang's draft model has one; use shapes with mtp_layers=1 on both "
            "sides, and leave the other layers out at the trainer"
        )


class _MergedRank:
    def __init__(
        self,
        shape: TransformerShape,
        specs: dict[str, TensorSpec],
        assembly: RankAssembly,
        place: tuple[int, int, int, int, int],
        sizes: _Sizes,
        num_padded: int,
    ) -> None:
        self._shape = shape
        self._specs = specs
        self._rank = assembly
        self._tp_rank, self._ep_rank, self._expert_tp_rank, self._shared_rank, self._vocab_rank = place
        self._sizes = sizes
        self._num_padded = num_padded

    def layout(self) -> RankLayout:
        rank, shape = self._rank, self._shape
        if shape.tower is not None:
            shape.tower.add_to(rank, self._tp_rank % self._sizes.tower.tp, self._sizes.tower)
        decoder = shape.decoder_prefix
        heads = {"model.embed_tokens.weight": f"{decoder}embed_tokens.weight"}
        if not shape.tied_embeddings:
            heads["lm_head.weight"] = "lm_head.weight"
        for here, there in heads.items():
            rank.add_vocab(here, there, self._num_padded, self._vocab_rank, self._sizes.vocab_tp)
        rank.add_whole("model.norm.weight", f"{decoder}norm.weight")
        for layer in range(shape.num_layers):
            self._add_layer(f"model.layers.{layer}.", f"{decoder}layers.{layer}.", shape.has_experts(layer))
        if shape.mtp_layers:
            there = f"{decoder}layers.{shape.num_layers}."
            for name in MTP_OWN:
                rank.add_whole(f"draft.model.{name}", there + name)
            self._add_layer("draft.model.decoder.", there, shape.has_experts(shape.num_layers))
        return rank.layout()

    def _add_layer(self, here: str, there: str, has_experts: bool) -> None:
        add_attention = self._add_latent if self._shape.latent is not None else self._add_attention
        add_attention(here + "self_attn.", there + "self_attn.")
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            self._rank.add_whole(here + norm, there + norm)
        if has_experts:
            self._add_experts(here + "mlp.", there + "mlp.")
        else:
            self._add_mlp(here + "mlp.", there + "mlp.", self._tp_rank, self._sizes.tp)

    def _add_attention(self, here: str, there: str) -> None:
        shape, rank, hidden, tp = self._shape, self._rank, self._shape.hidden, self._sizes.tp
        num_heads = shape.num_heads // tp
        num_kv_heads = max(1, shape.num_kv_heads // tp)
        first_kv_head = self._tp_rank * shape.num_kv_heads // tp
        rows = [("q", self._tp_rank * num_heads, num_heads), *((part, first_kv_head, num_kv_heads) for part in "kv")]
        num_rows = (num_heads + 2 * num_kv_heads) * shape.head_dim
        for kind, width in (("weight", (hidden,)), *([("bias", ())] if shape.qkv_bias else [])):
            parts: list[Part] = []
            for part, first, count in rows:
                name = f"{there}{part}_proj.{kind}"
                box = interval(self._specs[name].shape, 0, first * shape.head_dim, count * shape.head_dim)
                parts.append((name, box))
            rank.add_linear(f"{here}qkv_proj.{kind}", parts, (num_rows, *width))
        rank.add_slice(f"{here}o_proj.weight", f"{there}o_proj.weight", 1, self._tp_rank, tp)
        if shape.qk_norm:
            for part in "qk":
                rank.add_whole(f"{here}{part}_norm.weight", f"{there}{part}_norm.weight")

    def _add_latent(self, here: str, there: str) -> None:
        rank, latent = self._rank, self._shape.latent
        assert latent is not None, "shapes without latent attention have _add_attention"
        down = ["q_a_proj.weight", "kv_a_proj_with_mqa.weight"] if latent.q_rank else ["kv_a_proj_with_mqa.weight"]
        parts = [(there + name, rank.whole(there + name)) for name in down]
        fused = "fused_qkv_a_proj_with_mqa.weight" if latent.q_rank else down[0]
        rank.add_linear(here + fused, parts, (sum(box.shape[0] for _, box in parts), self._shape.hidden))
        for norm in ("q_a_layernorm.weight", "kv_a_layernorm.weight")[0 if latent.q_rank else 1 :]:
            rank.add_whole(here + norm, there + norm)
        query = "q_b_proj.weight" if latent.q_rank else "q_proj.weight"
        for name, dim in ((query, 0), ("kv_b_proj.weight", 0), ("o_proj.weight", 1)):
            rank.add_slice(here + name, there + name, dim, self._tp_rank, self._sizes.tp)

    def _add_mlp(self, here: str, there: str, part: int, num_parts: int) -> None:
        rank = self._rank
        names = [f"{there}{half}_proj.weight" for half in ("gate", "up")]
        parts = [(name, rank.slice_of(name, 0, part, num_parts)) for name in names]
        num_rows, hidden = parts[0][1].shape
        rank.add_linear(f"{here}gate_up_proj.weight", parts, (2 * num_rows, hidden))
        rank.add_slice(f"{here}down_proj.weight", f"{there}down_proj.weight", 1, part, num_parts)

    def _add_experts(self, here: str, there: str) -> None:
        shape, rank, sizes = self._shape, self._rank, self._sizes
        rank.add_whole(f"{here}gate.weight", f"{there}gate.weight")
        if shape.router_bias:
            rank.add_whole(f"{here}gate.e_score_correction_bias", f"{there}gate.e_score_correction_bias")
        if shape.shared_intermediate:
            shared = shape.shared_prefix.removeprefix("mlp.")
            self._add_mlp(here + shared, there + shared, self._shared_rank, sizes.shared_tp)
        if shape.shared_gate:
            rank.add_whole(f"{here}shared_expert_gate.weight", f"{there}shared_expert_gate.weight")
        count = shape.num_experts // sizes.ep
        experts = range(self._ep_rank * count, (self._ep_rank + 1) * count)
        size = shape.expert_intermediate // sizes.expert_tp
        first = self._expert_tp_rank * size
        rows, columns = Box((first, 0), (size, shape.hidden)), Box((0, first), (shape.hidden, size))
        gate_up = [
            (f"{there}experts.{expert}.{part}_proj.weight", rows) for expert in experts for part in ("gate", "up")
        ]
        rank.add_linear(f"{here}experts.w13_weight", gate_up, (count, 2 * size, shape.hidden))
        down = [(f"{there}experts.{expert}.down_proj.weight", columns) for expert in experts]
        rank.add_linear(f"{here}experts.w2_weight", down, (count, shape.hidden, size))
