"""Attention masks of a decoding step, for each kind of layer in a model.

A transformers model makes its own masks, because only it knows its kinds of layers: full attention, sliding windows,
chunks. It calls the function registered for its attention (`AttentionMaskInterface`) with a rule on indices of queries
and keys. Here that function is replaced for two reasons. Masks are always explicit: transformers makes none for a batch
without padding, and attention without a mask rounds differently. And a decoder whose rows have different positions
(slots.py), or whose position is a number on the device (graphs.py), passes the positions of its queries.
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
"""A mask function of transformers: takes indices of rows, heads, queries and keys; here all are tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlaces:
    """The position of each row's single query, and the keys that padding allows it to attend to."""

    queries: Tensor
    """[R or 1] int64, position of the query among the keys."""
    num_keys: int
    bias: Tensor | None = None
    """[R, 1, 1, K] float: the mask of full attention, from which masks of other layers are derived."""


@contextmanager
def whole_masks() -> Iterator[None]:
    """Context in which models with `sdpa` or `eager` attention get an explicit mask for every batch."""
    with _replaced("sdpa", _whole_mask), _replaced("eager", _whole_bias):
        yield


@contextmanager
def step_masks(attention: str, places: StepPlaces) -> Iterator[None]:
    """Context in which a model with the named attention gets masks for one query per row."""
    with _replaced(attention, partial(_step_mask, places)):
        yield


@contextmanager
def token_masks(attention: str, positions: Tensor, num_keys: int) -> Iterator[None]:
    """Context in which a model with the named attention gets masks [1, 1, N, K] for tokens at these positions, [N]."""
    with _replaced(attention, partial(_token_mask, positions, num_keys)):
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
    """[B, 1, Q, K] bool, like transformers' `sdpa_mask` without its shortcuts; a query that may attend to nothing, as
    in padding, attends to itself, because attention to nothing is NaN.

    Args:
        cache_position: [Q], replaces `q_length` and `q_offset` before transformers 5.
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
    return allowed | (~allowed.any(-1, keepdim=True) & (queries[:, None] == keys))


def _step_mask(places: StepPlaces, *, batch_size: int, mask_function: Rule = causal_mask_function, **_: Any) -> Tensor:
    """[R, 1, 1, K], bool, or float if `places` has a bias."""
    if places.bias is not None and mask_function is causal_mask_function:
        return places.bias
    keys = torch.arange(places.num_keys, device=places.queries.device)
    allowed = _by_rule(mask_function, batch_size, places.queries[:, None, None, None], keys)
    return allowed if places.bias is None else places.bias.masked_fill(~allowed, -torch.inf)


def _token_mask(positions: Tensor, num_keys: int, *, mask_function: Rule = causal_mask_function, **_: Any) -> Tensor:
    keys = torch.arange(num_keys, device=positions.device)
    return _by_rule(mask_function, 1, positions[None, None, :, None], keys)


def _by_rule(mask_function: Rule, batch_size: int, queries: Tensor, keys: Tensor) -> Tensor:
    """[B, 1, Q, K]: evaluates a transformers rule for queries [B or 1, 1, Q, 1] and keys [K]."""
    rows = torch.arange(batch_size, device=keys.device)[:, None, None, None]
    allowed = mask_function(rows, torch.zeros_like(rows[:1]), queries, keys)
    return allowed.expand(batch_size, 1, queries.shape[2], len(keys))


def _whole_bias(*, dtype: torch.dtype, **arguments: Any) -> Tensor:
    """The mask in additive form for plain attention: 0, or the least number of the dtype."""
    allowed = _whole_mask(**arguments)
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)
