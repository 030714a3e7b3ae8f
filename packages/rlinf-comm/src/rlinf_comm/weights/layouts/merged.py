"""SGLang and vLLM: q, k and v in one parameter, gate and up in one, all experts of a rank in two.

Both engines name and order these alike. Rank r of `tp` has the query heads [r H / tp, (r + 1) H / tp) and the key and
value heads that go with them; with fewer of those than ranks, neighbouring ranks hold the same one. Experts go to ranks
in order, and within an expert-parallel rank each is cut among `expert_tp` ranks.
"""

from __future__ import annotations

from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import Box, Layout, RankLayout, TensorSpec
from rlinf_comm.weights.layouts.assembly import Part, RankAssembly, check_divides, interval, rounded_up
from rlinf_comm.weights.layouts.shape import TransformerShape


def merged(
    shape: TransformerShape,
    *,
    tp: int = 1,
    ep: int = 1,
    expert_tp: int | None = None,
    vocab_tp: int | None = None,
    num_ranks: int | None = None,
    vocab_multiple: int = 64,
    dtype: str | None = None,
) -> Layout:
    """The parameters of SGLang or vLLM, by their names.

    Args:
        tp: Tensor parallelism of attention and dense MLPs; rank r has the part r % tp.
        ep: Expert parallelism.
        expert_tp: Tensor parallelism within each expert: the rest of tp when it is not given.
        vocab_tp: Parts of the embedding and the head: tp when it is not given, 1 where the engine replicates them.
        num_ranks: The ranks needed at least, max(tp, ep * expert_tp), when it is not given; more are replicas.
        vocab_multiple: To which the vocabulary is padded, 64 in both engines.
        dtype: Of the storage; the canonical one when it is not given.

    Example: SGLang with tp_size=4, dp_size=2 (attention over 2), ep_size=4: merged(shape, tp=2, ep=4, vocab_tp=1).

    Raises:
        LayoutError: sizes that do not divide; says which.
    """
    expert_tp = max(1, tp // ep) if expert_tp is None else expert_tp
    vocab_tp = tp if vocab_tp is None else vocab_tp
    needed = max(tp, ep * expert_tp if shape.num_experts else 1, vocab_tp)
    num_ranks = needed if num_ranks is None else num_ranks
    _check(shape, tp, ep, expert_tp)
    num_padded = rounded_up(shape.vocab, vocab_multiple)
    check_divides("the padded vocabulary", num_padded, "vocab_tp", vocab_tp)
    for name, size in (
        ("tp", tp),
        ("ep * expert_tp", ep * expert_tp if shape.num_experts else 1),
        ("vocab_tp", vocab_tp),
    ):
        check_divides("num_ranks", num_ranks, name, size)
    specs = shape.specs()
    ranks: dict[tuple[int, ...], RankLayout] = {}  # replicas share one
    order = []
    for rank in range(num_ranks):
        parts = (rank % tp, rank // expert_tp % ep, rank % expert_tp, rank % vocab_tp)
        order.append(parts)
        if parts not in ranks:
            ranks[parts] = _MergedRank(shape, specs, dtype, parts, (tp, ep, expert_tp, vocab_tp), num_padded).layout()
    return Layout(specs, tuple(ranks[parts] for parts in order))


def _check(shape: TransformerShape, tp: int, ep: int, expert_tp: int) -> None:
    check_divides("num_heads", shape.num_heads, "tp", tp)
    if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        raise LayoutError(f"num_kv_heads={shape.num_kv_heads} and tp={tp}: one must be a multiple of the other")
    if shape.num_experts:
        check_divides("num_experts", shape.num_experts, "ep", ep)
        check_divides("expert_intermediate", shape.expert_intermediate, "expert_tp", expert_tp)
    if not all(map(shape.has_experts, range(shape.num_layers))):
        check_divides("intermediate", shape.intermediate, "tp", tp)


class _MergedRank:
    def __init__(
        self,
        shape: TransformerShape,
        specs: dict[str, TensorSpec],
        dtype: str | None,
        parts: tuple[int, int, int, int],
        sizes: tuple[int, int, int, int],
        num_padded: int,
    ) -> None:
        self._shape = shape
        self._specs = specs
        self._rank = RankAssembly(specs, dtype)
        self._tp_rank, self._ep_rank, self._expert_tp_rank, self._vocab_rank = parts
        self._tp, self._ep, self._expert_tp, self._vocab_tp = sizes
        self._num_padded = num_padded

    def layout(self) -> RankLayout:
        rank, shape = self._rank, self._shape
        heads = (
            ["model.embed_tokens.weight"] if shape.tied_embeddings else ["model.embed_tokens.weight", "lm_head.weight"]
        )
        for name in heads:
            rank.add_vocab(name, name, self._num_padded, self._vocab_rank, self._vocab_tp)
        rank.add_whole("model.norm.weight", "model.norm.weight")
        for layer in range(shape.num_layers):
            prefix = f"model.layers.{layer}."
            self._add_attention(prefix + "self_attn.")
            for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                rank.add_whole(prefix + norm, prefix + norm)
            if shape.has_experts(layer):
                self._add_experts(prefix + "mlp.")
            else:
                self._add_mlp(prefix + "mlp.")
        return rank.layout()

    def _add_attention(self, prefix: str) -> None:
        shape, rank, hidden = self._shape, self._rank, self._shape.hidden
        num_heads = shape.num_heads // self._tp
        num_kv_heads = max(1, shape.num_kv_heads // self._tp)
        first_kv_head = self._tp_rank * shape.num_kv_heads // self._tp
        rows = [("q", self._tp_rank * num_heads, num_heads), *((part, first_kv_head, num_kv_heads) for part in "kv")]
        num_rows = (num_heads + 2 * num_kv_heads) * shape.head_dim
        for kind, width in (("weight", (hidden,)), *([("bias", ())] if shape.qkv_bias else [])):
            parts: list[Part] = []
            for part, first, count in rows:
                name = f"{prefix}{part}_proj.{kind}"
                box = interval(self._specs[name].shape, 0, first * shape.head_dim, count * shape.head_dim)
                parts.append((name, box))
            rank.add(f"{prefix}qkv_proj.{kind}", parts, (num_rows, *width))
        rank.add_slice(f"{prefix}o_proj.weight", f"{prefix}o_proj.weight", 1, self._tp_rank, self._tp)
        if shape.qk_norm:
            for part in "qk":
                rank.add_whole(f"{prefix}{part}_norm.weight", f"{prefix}{part}_norm.weight")

    def _add_mlp(self, prefix: str) -> None:
        rank = self._rank
        names = [f"{prefix}{part}_proj.weight" for part in ("gate", "up")]
        parts = [(name, rank.slice_of(name, 0, self._tp_rank, self._tp)) for name in names]
        size = self._shape.intermediate // self._tp
        rank.add(f"{prefix}gate_up_proj.weight", parts, (2 * size, self._shape.hidden))
        rank.add_slice(f"{prefix}down_proj.weight", f"{prefix}down_proj.weight", 1, self._tp_rank, self._tp)

    def _add_experts(self, prefix: str) -> None:
        shape, rank = self._shape, self._rank
        rank.add_whole(f"{prefix}gate.weight", f"{prefix}gate.weight")
        count = shape.num_experts // self._ep
        experts = range(self._ep_rank * count, (self._ep_rank + 1) * count)
        size = shape.expert_intermediate // self._expert_tp
        first = self._expert_tp_rank * size
        rows, columns = Box((first, 0), (size, shape.hidden)), Box((0, first), (shape.hidden, size))
        prefix += "experts."
        gate_up = [(f"{prefix}{expert}.{part}_proj.weight", rows) for expert in experts for part in ("gate", "up")]
        rank.add(f"{prefix}w13_weight", gate_up, (count, 2 * size, shape.hidden))
        down = [(f"{prefix}{expert}.down_proj.weight", columns) for expert in experts]
        rank.add(f"{prefix}w2_weight", down, (count, shape.hidden, size))
