"""Attention masks of a decoding step, one for each kind of layer that a model has.

A model of transformers makes its own masks, because it alone knows its kinds of layers: full attention, sliding windows
of any width, chunks. It calls the function that belongs to its attention (`AttentionMaskInterface`) with a rule on
indices of queries and keys. Here that function is replaced in two ways. Masks are always whole: transformers makes none
for a batch that happens to hold no padding, and attention without a mask rounds differently. And a decoder whose rows
stand at positions of their own (slots.py), or whose place is a number on the device (graphs.py), says where its queries
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

Rule = Callable[..., Any]
"""A mask function of transformers: of indices of rows, heads, queries and keys, each a tensor here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlaces:
    """Where the one query of each row stands, and which keys it may look at by its padding."""

    queries: Tensor
    """[R or 1] int64, column of the query among the keys."""
    num_keys: int
    bias: Tensor | None = None
    """[R, 1, 1, K] of floats: the mask of full attention, and what those of other layers are made of."""


@contextmanager
def whole_masks() -> Iterator[None]:
    """While it is open, models whose attention is `sdpa` or `eager` get a mask for every batch."""
    with _replaced("sdpa", _whole_mask), _replaced("eager", _whole_bias):
        yield


@contextmanager
def step_masks(attention: str, places: StepPlaces) -> Iterator[None]:
    """While it is open, a model whose attention has that name gets masks for one query a row."""
    with _replaced(attention, partial(_step_mask, places)):
        yield


@contextmanager
def _replaced(attention: str, make_mask: Callable[..., Tensor]) -> Iterator[None]:
    before = AttentionMaskInterface().get(attention)
    AttentionMaskInterface.register(attention, make_mask)
    try:
        yield
    finally:
        if before is not None:
            AttentionMaskInterface.register(attention, before)


def _whole_mask(
    *,
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Rule = causal_mask_function,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    device: Any = None,
    **_: Any,
) -> Tensor:
    """[B, 1, Q, K] bool, as transformers' `sdpa_mask` without its shortcuts; a padded query looks at itself, since
    attention to nothing is NaN.

    Args:
        cache_position: [Q], in place of `q_length` and `q_offset` before transformers 5.
    """
    if cache_position is not None:
        queries = cache_position
    else:
        assert q_length is not None, "one of the two says where queries are"
        queries = torch.arange(q_length, device=device) + q_offset
    keys = torch.arange(kv_length, device=queries.device) + kv_offset
    allowed = _by_rule(mask_function, batch_size, queries[None, None, :, None], keys)
    if attention_mask is not None:
        missing = kv_length + kv_offset - attention_mask.shape[1]
        seen = torch.nn.functional.pad(attention_mask.bool(), (0, max(0, missing)))[:, kv_offset:][:, :kv_length]
        allowed = allowed & seen[:, None, None]
    return allowed | (queries[:, None] == keys)


def _step_mask(places: StepPlaces, *, batch_size: int, mask_function: Rule = causal_mask_function, **_: Any) -> Tensor:
    """[R, 1, 1, K], of bools, or of floats where `places` has a bias."""
    if places.bias is not None and mask_function is causal_mask_function:
        return places.bias
    keys = torch.arange(places.num_keys, device=places.queries.device)
    allowed = _by_rule(mask_function, batch_size, places.queries[:, None, None, None], keys)
    return allowed if places.bias is None else places.bias.masked_fill(~allowed, -torch.inf)


def _by_rule(mask_function: Rule, batch_size: int, queries: Tensor, keys: Tensor) -> Tensor:
    """[B, 1, Q, K]: what a rule of transformers says of queries [B or 1, 1, Q, 1] and keys [K]."""
    rows = torch.arange(batch_size, device=keys.device)[:, None, None, None]
    allowed = mask_function(rows, torch.zeros_like(rows[:1]), queries, keys)
    return allowed.expand(batch_size, 1, queries.shape[2], len(keys))


def _whole_bias(*, dtype: torch.dtype, **arguments: Any) -> Tensor:
    """The same as plain attention adds it to its scores: 0, or the least number of the type."""
    allowed = _whole_mask(**arguments)
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)
