"""Attention over a packed row: a completion attends to its prompt and itself, a prompt to itself. The tokens of an
episode form a tree: a row that branched attends to its prompt, to what it shares with earlier rows, and to itself.

transformers lets you register an attention function under a name (`AttentionInterface`). Ours gets `attend`, an
argument of the model's call that reaches every layer, and uses no mask: each block of related tokens is gathered from
the row and computed by one call of torch's scaled_dot_product_attention. On GPUs, in bfloat16, one call computes all
blocks (variable_length.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from rlinf_workers.models import variable_length
from rlinf_workers.models.placement import HOST, to_device
from rlinf_workers.models.variable_length import Sequences

NAME = "rlinf_packed"
MIN_SPREAD_TOKENS = 16
"""Completions whose lengths differ by no more than this share a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBlock:
    """Rows of one call: b sequences with K keys each; the last Q of them are also queries.

    Example: a prompt of two tokens at 0 in the packed row, with completions of two at 2 and of one at 4:
        queries = [[2, 3], [4, 4]], keys = [[0, 1, 2, 3], [0, 1, 4, 4]]
    Padding is at the end, where causality hides it.
    """

    queries: Tensor
    """[b, Q] int64, positions in the packed row; a shorter sequence repeats its last."""
    keys: Tensor
    """[b, K] int64"""
    lengths: Tensor
    """[b] int64, queries of each sequence that are no padding."""

    def to(self, device: torch.device) -> AttentionBlock:
        return AttentionBlock(
            queries=to_device(self.queries, device), keys=to_device(self.keys, device), lengths=self.lengths
        )

    def sequences(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The queries and the keys of each sequence, without padding."""
        num_before = self.keys.shape[1] - self.queries.shape[1]
        for queries, keys, length in zip(self.queries, self.keys, self.lengths.tolist(), strict=True):
            yield queries[:length], keys[: num_before + length]


class PackedAttention:
    """The attention of each token of a packed row.

    Args:
        blocks: every token of the row is a query in exactly one of them.
        answers: [N] int64, index of each token's result in the concatenated results of all blocks.
        device: on which it is computed; blocks and answers are in host memory.
    """

    def __init__(self, blocks: Sequence[AttentionBlock], answers: Tensor, device: torch.device = HOST) -> None:
        self.blocks, self._answers, self._device = blocks, answers, device
        self._moved: tuple[Sequence[AttentionBlock], Tensor] | None = None
        """Blocks and answers on the device."""
        self._sequences: Sequences | None = None
        """The same for one call of a kernel for sequences of any length."""
        self.num_calls = 0
        """Layers that have used it so far; 0 after a forward pass: the model has another attention."""

    def to(self, device: torch.device) -> PackedAttention:
        return PackedAttention(self.blocks, self._answers, device)

    def cut(self, part: int, num_parts: int) -> PackedAttention:
        """The attention of some of the queries of each block, equally much work in each part; the other results are
        0."""
        blocks: list[AttentionBlock] = []
        answers = torch.full((sum(block.queries.numel() for block in self.blocks) + 1,), -1)
        first = num_answers = 0
        for block in self.blocks:
            (num_rows, num_queries), num_keys = block.queries.shape, block.keys.shape[1]
            numbers = torch.arange(first, first + num_rows * num_queries).view(num_rows, num_queries)
            first += num_rows * num_queries
            ends = [num_queries * piece // (2 * num_parts) for piece in range(2 * num_parts + 1)]
            for piece in (part, 2 * num_parts - 1 - part):  # later queries have more keys
                chosen = slice(ends[piece], ends[piece + 1])
                if chosen.start == chosen.stop:
                    continue
                keys = block.keys[:, : num_keys - num_queries + chosen.stop]
                lengths = (block.lengths - chosen.start).clamp(0, chosen.stop - chosen.start)
                blocks.append(AttentionBlock(queries=block.queries[:, chosen], keys=keys, lengths=lengths))
                own = numbers[:, chosen].flatten()
                answers[own] = torch.arange(num_answers, num_answers + len(own))
                num_answers += len(own)
        answers = torch.where(answers < 0, num_answers, answers)
        return PackedAttention(blocks, answers[self._answers], self._device)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """[1, N, H, V] of queries [1, H, N, D], keys [1, KV, N, D] and values [1, KV, N, V], with V of at most D.

        Args:
            window: a token attends to this many tokens, including itself; None: all before it.
            softcap: scores are softcap * tanh(score / softcap); None: unchanged.
        """
        self.num_calls += 1
        width, value = value.shape[-1], as_wide(value, query)
        kernel = None if softcap is not None else variable_length.kernel_for(query)
        if kernel is not None:
            tokens = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [N, H, D] each
            return self._as_sequences().attend(kernel, *tokens, scale=scale, window=window)[None, ..., :width]
        rows = [tensor[0].transpose(0, 1).flatten(1) for tensor in (query, key, value)]  # [N, H * D] each
        size, outputs = query.shape[-1], []
        if self._moved is None:
            self._moved = [block.to(self._device) for block in self.blocks], to_device(self._answers, self._device)
        blocks, places_of_answers = self._moved
        for block in blocks:
            q, k, v = (
                row.index_select(0, places.flatten()).view(*places.shape, -1, size).transpose(1, 2)
                for row, places in zip(rows, (block.queries, block.keys, block.keys), strict=True)
            )
            answer = _causal(q, k, v, scale, window, softcap)  # [b, H, Q, D]
            outputs.append(answer.transpose(1, 2).flatten(2).flatten(0, 1))
        outputs.append(rows[0].new_zeros(1, rows[0].shape[1]))  # of a query that is not computed here
        answers = torch.cat(outputs).index_select(0, places_of_answers)
        return answers.view(1, len(answers), -1, size)[..., :width]

    def _as_sequences(self) -> Sequences:
        if self._sequences is None:
            pairs = (pair for block in self.blocks for pair in block.sequences())
            self._sequences = Sequences.of(pairs, len(self._answers)).to(self._device)
        return self._sequences


def as_wide(value: Tensor, query: Tensor) -> Tensor:
    """Values with zeros behind them, as long as queries; latent attention has shorter ones, and kernels one width."""
    missing = query.shape[-1] - value.shape[-1]
    return pad(value, (0, missing)) if missing else value


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """[b, H, Q, D]; the queries belong to the last Q keys."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    if num_keys <= (window or num_keys):
        window = None
    if window is None and softcap is None and num_queries == num_keys:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    sees = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
    if window is not None:
        sees = sees.triu(num_keys - num_queries - window + 1)
    if softcap is None and not q.is_cuda:
        return scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=True)
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    if softcap is None:  # CUDA's fast kernels do not support a mask with shared keys
        return scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale)
    scores = softcap * (q @ k.mT * scale / softcap).tanh()
    return scores.masked_fill(~sees, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def attention_of(
    prompt_lengths: Tensor,
    prompt_starts: Tensor,
    lengths: Tensor,
    starts: Tensor,
    prompts: Tensor,
    shared: Mapping[int, Tensor] | None = None,
) -> PackedAttention:
    """One call per prompt length, and one per group of completions of similar length with equally many tokens before
    them.

    Args:
        prompt_lengths, prompt_starts: [P] int64, length and start of each prompt in the packed row.
        lengths, starts: [B] int64, of completions; those of length 0 are not in the row.
        prompts: [B] int64, the prompt of each.
        shared: completion -> [K] int64, the places of the tokens between its prompt and `starts`, which belong to
            other completions of the prompt.
    """
    shared = shared or {}
    row = _RowBlocks(int(prompt_lengths.sum() + lengths.sum()))
    has_prompt_alone = torch.ones(len(lengths), dtype=torch.bool)
    has_prompt_alone[list(shared)] = False
    for length in prompt_lengths.unique().tolist():
        places = prompt_starts[:, None] + torch.arange(length)  # [P, L], right for prompts of this length
        are_such = prompt_lengths == length
        row.add(places[are_such], places[are_such], prompt_lengths[are_such])
        rows = (are_such[prompts] & (lengths > 0) & has_prompt_alone).nonzero()[:, 0]
        row.add_after(lambda alike, places=places: places[prompts[alike]], rows, lengths, starts)
    before: dict[int, dict[int, Tensor]] = {}
    for completion, places in shared.items():
        if lengths[completion]:
            of_prompt = prompt_starts[prompts[completion]] + torch.arange(int(prompt_lengths[prompts[completion]]))
            all_places = torch.cat([of_prompt, places])
            before.setdefault(len(all_places), {})[completion] = all_places
    for of_length in before.values():
        rows = torch.tensor(list(of_length))
        row.add_after(
            lambda alike, of_length=of_length: torch.stack([of_length[one] for one in alike.tolist()]),
            rows,
            lengths,
            starts,
        )
    return row.attention()


def attention_of_sequences(lengths: Tensor, starts: Tensor) -> PackedAttention:
    """One call for sequences of similar length, each of which sees itself alone.

    Args:
        lengths, starts: [B] int64, where sequences begin in the packed row.
    """
    row = _RowBlocks(int(lengths.sum()))
    for alike in _of_similar_length(lengths.argsort(descending=True, stable=True), lengths):
        inside = torch.arange(int(lengths[alike[0]])).expand(len(alike), -1)
        places = starts[alike, None] + inside.minimum(lengths[alike, None] - 1)
        row.add(places, places, lengths[alike])
    return row.attention()


class _RowBlocks:
    """Collects the blocks of a packed row of `num_tokens` tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._blocks: list[AttentionBlock] = []
        self._answers = torch.empty(num_tokens, dtype=torch.int64)
        self._num_answers = 0

    def add(self, queries: Tensor, keys: Tensor, num_tokens: Tensor) -> None:
        """Adds a block; `num_tokens`: [b], of each row of queries, the rest of which is padding."""
        is_real = torch.arange(queries.shape[1]) < num_tokens[:, None]
        self._answers[queries[is_real]] = self._num_answers + is_real.flatten().nonzero()[:, 0]
        self._num_answers += queries.numel()
        self._blocks.append(AttentionBlock(queries=queries, keys=keys, lengths=num_tokens))

    def add_after(self, before: Callable[[Tensor], Tensor], rows: Tensor, lengths: Tensor, starts: Tensor) -> None:
        """Adds completions that follow equally many tokens.

        Args:
            before: completions [b] -> [b, K], the places of the tokens before them.
            rows: [n], the completions; none is empty.
            lengths, starts: as for `attention_of`.
        """
        for alike in _of_similar_length(rows[lengths[rows].argsort(descending=True, stable=True)], lengths):
            inside = torch.arange(int(lengths[alike[0]])).expand(len(alike), -1)
            queries = starts[alike, None] + inside.minimum(lengths[alike, None] - 1)
            self.add(queries, torch.cat([before(alike), queries], 1), lengths[alike])

    def attention(self) -> PackedAttention:
        return PackedAttention(self._blocks, self._answers)


def _of_similar_length(rows: Tensor, lengths: Tensor) -> Iterator[Tensor]:
    """Groups rows, the longest first; a new group begins when a row is a quarter shorter than the first of its
    group."""
    while len(rows):
        longest = int(lengths[rows[0]])
        num_alike = int((lengths[rows] >= longest - max(longest // 4, MIN_SPREAD_TOKENS)).sum())
        yield rows[:num_alike]
        rows = rows[num_alike:]


@contextmanager
def packed(model: Any) -> Iterator[None]:
    """Makes the model's layers use the `attend` argument of its call, if they pass all arguments to the attention
    function; roles/language/probe.py verifies that an architecture computes the same this way."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    with decoder_attention(model, NAME):
        yield


@contextmanager
def decoder_attention(model: Any, name: str) -> Iterator[None]:
    """Context in which the layers of a language model, not those of its vision tower, use the attention function that
    is registered under this name."""
    config = model.config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


@torch.compiler.disable
def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Callable[..., Tensor],
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it; it is no part of a compiled layer."""
    return attend(query, key, value, scale=scaling, window=sliding_window, softcap=softcap), None
