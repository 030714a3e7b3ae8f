"""The option `keep_turns`: a turn that continues an earlier one computes only what was added.

Keys and values of completions that have ended are kept, the latest used ones up to a number of bytes. A prompt takes
over the longest beginning that one of them shares with it.

What is kept must not decide numbers. So every token of a prompt is computed as decoding would compute it: with one
query over a multiple of 16 keys, in at least 16 rows, and in as many that no tensor ends in the middle of 32 numbers
(`num_rows`). On a CPU such a row rounds the same whatever is beside it, so keys and values are equal to the bit whether
they were kept or are computed again. The reasons, with torch 2.13 on AVX-512 and one thread: products of fewer than 16
rows and at least 192 inputs sum in another order; elementwise functions compute the last, incomplete 32 numbers of a
tensor by scalar code, which rounds otherwise.

In the last bits, numbers differ from those of a prompt in one piece, which the engine computes without the option. On a
GPU, rows of another batch may round differently, as in slots.py.

A picture is known by its digest: sequences share a beginning with pictures if these are the same ones
(`with_references`). Of a picture that is partly kept, the vision tower computes the whole, which has the same bits.

Legend: N tokens that are computed together, L tokens of a sequence, K columns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, Cache

from rlinf_workers.engines.huggingface.masks import token_masks
from rlinf_workers.engines.huggingface.rows import row_tokens
from rlinf_workers.models.cache_argument import as_cache
from rlinf_workers.models.packed_attention import decoder_attention
from rlinf_workers.models.picture_texts import TILED
from rlinf_workers.models.pictures import has_rope_positions, picture_places, rope_positions, seen
from rlinf_workers.roles.language.history_pictures import with_references
from rlinf_workers.roles.records.pictures import Pictures, ProcessedPicture

ATTENTION = "rlinf_kept_turns"
TOKENS_AT_ONCE = 2048
"""Of a forward pass, so that masks stay small."""
FEWEST_ROWS, VECTOR = 16, 32
"""Rows of a product, and numbers that elementwise functions compute at once; see the module."""
Layers = list[Tensor]
"""Keys or values, [heads, L or more, size] each layer."""


class KeptTurns:
    """Keys and values of sequences by their tokens.

    Args:
        model: computes them.

    Attributes:
        max_bytes: of what is kept.
        num_bytes: kept now.
        num_kept, num_computed: tokens of prompts so far that were taken over, and that were computed.
    """

    def __init__(self, model: Any, max_bytes: int = 0) -> None:
        self._model = model
        self._row_step = _row_step(model.config.get_text_config())
        self.max_bytes, self.num_bytes = max_bytes, 0
        self.num_kept, self.num_computed = 0, 0
        self._turns: OrderedDict[bytes, tuple[Layers, Layers]] = OrderedDict()
        """By tokens; the latest used ones are last."""
        self._ordered: list[bytes] = []
        """Neighbours share the longest beginnings."""

    def clear(self) -> None:
        """Forgets everything."""
        self._turns.clear()
        self._ordered.clear()
        self.num_bytes = 0

    def add(self, token_ids: Tensor, keys: Layers, values: Layers, pictures: Pictures | None = None) -> None:
        """Keeps copies of the keys and values of a sequence, and forgets those of its beginnings.

        Args:
            token_ids: [L] int64 on the CPU
            keys, values: [heads, L, size] each layer
            pictures: among the tokens.
        """
        num_bytes = sum(layer.nbytes for layer in (*keys, *values))
        name = _name(with_references(token_ids, pictures))
        place = bisect_left(self._ordered, name)
        if num_bytes > self.max_bytes or (place < len(self._ordered) and self._ordered[place].startswith(name)):
            return
        if place and name.startswith(self._ordered[place - 1]):
            place -= 1
            self._forget(self._ordered[place])
        self._turns[name] = [layer.clone() for layer in keys], [layer.clone() for layer in values]
        self._ordered.insert(place, name)
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            self._forget(next(iter(self._turns)))

    def longest(self, token_ids: Tensor) -> tuple[int, Layers, Layers]:
        """Number of the first tokens that a kept sequence begins with, and its keys and values.

        Args:
            token_ids: as of `with_references`.
        """
        name = _name(token_ids)
        place = bisect_left(self._ordered, name)
        length, best = max(
            ((_num_shared(one, name), one) for one in self._ordered[max(0, place - 1) : place + 1]), default=(0, b"")
        )
        if length == 0:
            return 0, [], []
        self._turns.move_to_end(best)
        return length, *self._turns[best]

    def num_rows(self, num_tokens: int) -> int:
        """Rows in which this many tokens are computed."""
        return max(FEWEST_ROWS, -(-num_tokens // self._row_step) * self._row_step)

    def prefill(
        self, sequences: Sequence[Tensor], pictures: Sequence[Pictures | None] | None = None
    ) -> list[tuple[Layers, Layers, Tensor]]:
        """Keys and values of sequences, and the logits after their last tokens, [V].

        Args:
            pictures: of each sequence; None: all are text alone.

        Raises: ValueError for pictures of a model that divides them into tiles, since a tile cannot be cut.
        """
        pictures = [None] * len(sequences) if pictures is None else pictures
        if any(pictures) and self._model.config.model_type in TILED:
            raise ValueError(f"engine_options.keep_turns: does not support pictures of {self._model.config.model_type}")
        growing = [self._begun(*pair) for pair in zip(sequences, pictures, strict=True)]
        left = growing
        while left:
            portions = _portions(left)
            _forward(self._model, portions, self.num_rows(portions[-1].rows.stop))
            left = [one for one in left if one.logits is None]
        return [one.result() for one in growing]

    def _begun(self, token_ids: Tensor, pictures: Pictures | None) -> _Growing:
        names = with_references(token_ids, pictures)
        length, keys, values = self.longest(names[:-1])  # the last one is computed for its logits
        self.num_kept += length
        self.num_computed += len(token_ids) - length
        growing = _Growing(token_ids=token_ids, pictures=pictures)
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            growing.write(layer, key[:, :length], value[:, :length], 0)
        growing.num_done = length
        return growing

    def _forget(self, name: bytes) -> None:
        keys, values = self._turns.pop(name)
        del self._ordered[bisect_left(self._ordered, name)]
        self.num_bytes -= sum(layer.nbytes for layer in (*keys, *values))


def _row_step(config: Any) -> int:
    """Rows of a tensor with a whole number of vectors, whichever of the model's sizes a row has."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return VECTOR // gcd(VECTOR, config.hidden_size, config.intermediate_size, head)


def _name(token_ids: Tensor) -> bytes:
    """Bytes in the order of token ids."""
    return token_ids.numpy().astype(">u8").tobytes()


def _num_shared(one: bytes, other: bytes) -> int:
    """Number of tokens with which both begin."""
    length = min(len(one), len(other))
    differs = np.frombuffer(one[:length], ">u8") != np.frombuffer(other[:length], ">u8")
    return int(differs.argmax()) if differs.any() else len(differs)


@dataclass(kw_only=True, slots=True)
class _Growing:
    """A sequence whose first `num_done` tokens have keys and values."""

    token_ids: Tensor
    """[L] int64 on the CPU"""
    pictures: Pictures | None = None
    """Among these."""
    num_done: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    """[heads, K, size] each layer"""
    values: dict[int, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        """Sets keys and values, [heads, n, size], of the tokens from `start` on."""
        for columns, new in ((self.keys, keys), (self.values, values)):
            if layer not in columns:
                columns[layer] = new.new_zeros(new.shape[0], row_tokens(len(self.token_ids)), new.shape[2])
            columns[layer][:, start : start + new.shape[1]] = new

    def result(self) -> tuple[Layers, Layers, Tensor]:
        assert self.logits is not None, "all tokens are computed"
        length, layers = len(self.token_ids), sorted(self.keys)
        return (
            [self.keys[layer][:, :length] for layer in layers],
            [self.values[layer][:, :length] for layer in layers],
            self.logits,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Portion:
    """Tokens of a sequence in a forward pass."""

    sequence: _Growing
    rows: slice
    """Of the pass."""
    places: slice
    """Of the sequence."""


def _portions(sequences: Sequence[_Growing]) -> list[_Portion]:
    """The next missing tokens of sequences, as many as are computed at once."""
    portions, num_tokens = list[_Portion](), 0
    for one in sequences:
        size = min(len(one.token_ids) - one.num_done, TOKENS_AT_ONCE - num_tokens)
        if not size:
            break
        rows, places = slice(num_tokens, num_tokens + size), slice(one.num_done, one.num_done + size)
        portions.append(_Portion(sequence=one, rows=rows, places=places))
        num_tokens = rows.stop
    return portions


def _forward(model: Any, portions: Sequence[_Portion], num_rows: int) -> None:
    """One pass, with all tokens in one sequence of the model's; each attends to the keys of its own."""
    token_ids = torch.cat([one.sequence.token_ids[one.places] for one in portions])
    columns = torch.cat([torch.arange(one.places.start, one.places.stop) for one in portions])
    ends = torch.tensor([one.rows.stop - 1 for one in portions])
    pictures, is_picture, positions = _pictures_of(portions)
    positions = columns if positions is None else positions
    padding = 0, num_rows - len(token_ids)
    token_ids, columns, positions = (pad(one, padding).to(model.device) for one in (token_ids, columns, positions))
    ends = pad(ends, (0, max(0, FEWEST_ROWS - len(ends)))).to(model.device)
    num_keys = max(row_tokens(one.places.stop) for one in portions)
    AttentionInterface.register(ATTENTION, partial(_attention, portions))
    there = tuple(picture for picture, _ in pictures)
    of_pass = [Pictures(pictures=there, begins=(0,) * len(there))] if there else []
    with (
        decoder_attention(model, ATTENTION),
        token_masks(ATTENTION, columns, num_keys),
        seen(model, of_pass, pad(is_picture, padding), [part for _, part in pictures]) as arguments,
    ):
        output = model(
            input_ids=token_ids[None],
            position_ids=positions[None] if positions.dim() == 1 else positions[:, None],
            attention_mask=torch.ones(1, num_keys, dtype=torch.bool, device=model.device),
            **as_cache(_NoCache(layers=[])),
            use_cache=True,
            logits_to_keep=ends,
            **arguments,
        )
    for i, one in enumerate(portions):
        one.sequence.num_done = one.places.stop
        if one.places.stop == len(one.sequence.token_ids):
            one.sequence.logits = output.logits[0, i].clone()


def _pictures_of(portions: Sequence[_Portion]) -> tuple[list[tuple[ProcessedPicture, slice]], Tensor, Tensor | None]:
    """The pictures of a pass, each with those of its tokens that are computed; [N] bool, these tokens; and [3, N], the
    positions of all tokens, where some differ from the columns."""
    pictures, is_picture, positions = list[tuple[ProcessedPicture, slice]](), [], []
    for one in portions:
        own, length, places = one.sequence.pictures, len(one.sequence.token_ids), one.places
        for begin, picture in () if own is None else zip(own.begins, own.pictures, strict=True):
            part = slice(max(0, places.start - begin), min(picture.num_tokens, places.stop - begin))
            if part.start < part.stop:
                pictures.append((picture, part))
        is_picture.append(picture_places(own, length)[places])
        positions.append(rope_positions(own, length)[:, places])
    has_rope = has_rope_positions([one.sequence.pictures for one in portions])
    return pictures, torch.cat(is_picture), torch.cat(positions, 1) if has_rope else None


class _NoCache(Cache):
    """Returns what it gets: `_attention` keeps keys and values."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def _attention(
    portions: Sequence[_Portion],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of each portion to the keys of its sequence, in the signature that transformers expects.

    Args:
        query: [1, heads, N, size]
        key, value: [1, key heads, N, size]
        attention_mask: [1, 1, N, K] bool
    Returns: [1, N, heads, size]; 0 for rows of no portion.
    """
    output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
    for one in portions:
        one.sequence.write(module.layer_idx, key[0, :, one.rows], value[0, :, one.rows], one.places.start)
        num_keys = row_tokens(one.places.stop)
        keys, values = (columns[module.layer_idx][:, :num_keys] for columns in (one.sequence.keys, one.sequence.values))
        attend = _attend_by_row if query.device.type == "cpu" else _attend
        output[0, one.rows] = attend(
            query[0, :, one.rows], keys, values, attention_mask[0, 0, one.rows, :num_keys], options.get("scaling")
        )
    return output, None


def _attend_by_row(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Each query [heads, n, size] by itself, as in a decode step. Returns [n, heads, size]."""
    repeats = query.shape[0] // keys.shape[0]
    keys, values = (
        one.repeat_interleave(repeats, 0)[None].expand(query.shape[1], -1, -1, -1) for one in (keys, values)
    )
    rows = query.transpose(0, 1)[:, :, None]
    return scaled_dot_product_attention(rows, keys, values, mask[:, None, None], scale=scale)[:, :, 0]


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    shares = query.shape[0] != keys.shape[0]
    output = scaled_dot_product_attention(
        query[None], keys[None], values[None], mask[None, None], scale=scale, enable_gqa=shares
    )
    return output[0].transpose(0, 1)
