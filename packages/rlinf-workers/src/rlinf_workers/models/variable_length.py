"""Variable-length attention on GPUs: one kernel call per layer for all sequences of a packed row, however long each is.

torch has it as `torch.nn.attention.varlen` (FlashAttention-2, arXiv:2307.08691). Queries are the last tokens of their
keys, which is how the kernel aligns causality where there are fewer queries than keys. So a completion has its prompt
among its keys and no query there.

Legend: N tokens of the row, n queries and m keys of all sequences, H heads, KV of keys and values, D numbers each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_workers.models.placement import to_device

Kernel = Callable[..., Tensor]
MAX_HEAD_SIZE, HEAD_SIZE_STEP = 256, 8
"""Sizes of heads that the kernel computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """The sequences of a row whose attention is computed here.

    Example: a prompt of two tokens at 0 in the row, with completions of two at 2 and of one at 4:
        queries = [0, 1, 2, 3, 4], keys = [0, 1, 0, 1, 2, 3, 0, 1, 4], query_ends = [0, 2, 4, 5],
        key_ends = [0, 2, 6, 9]
    """

    queries: Tensor | None
    """[n] int64, places in the row; None: all N in their order."""
    keys: Tensor
    """[m] int64"""
    query_ends: Tensor
    """[sequences + 1] int32, from 0; the end of each sequence's queries."""
    key_ends: Tensor
    """[sequences + 1] int32"""
    most_queries: int
    """Of a sequence."""
    most_keys: int
    answers: Tensor | None
    """[N] int64, where the result of each token is among those of the queries, n for a token without one; None: as
    `queries`."""

    @staticmethod
    def of(sequences: Iterable[tuple[Tensor, Tensor]], num_tokens: int) -> Sequences:
        """Args:
        sequences: the queries and the keys of each, places in the row.
        num_tokens: N
        """
        pairs = sorted((pair for pair in sequences if len(pair[0])), key=lambda pair: int(pair[0][0]))
        empty = torch.empty(0, dtype=torch.int64)
        queries, keys = (torch.cat([empty, *column]) for column in (zip(*pairs, strict=True) if pairs else ((), ())))
        num_queries, num_keys = [len(one) for one, _ in pairs], [len(one) for _, one in pairs]
        is_whole = torch.equal(queries, torch.arange(num_tokens))
        answers = torch.full((num_tokens,), len(queries))
        answers[queries] = torch.arange(len(queries))
        return Sequences(
            queries=None if is_whole else queries,
            keys=keys,
            query_ends=torch.tensor([0, *num_queries]).cumsum(0).int(),
            key_ends=torch.tensor([0, *num_keys]).cumsum(0).int(),
            most_queries=max(num_queries, default=0),
            most_keys=max(num_keys, default=0),
            answers=None if is_whole else answers,
        )

    def to(self, device: torch.device) -> Sequences:
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else to_device(tensor, device)

        return Sequences(
            queries=moved(self.queries),
            keys=to_device(self.keys, device),
            query_ends=to_device(self.query_ends, device),
            key_ends=to_device(self.key_ends, device),
            most_queries=self.most_queries,
            most_keys=self.most_keys,
            answers=moved(self.answers),
        )

    def attend(
        self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """[N, H, D] of queries [N, H, D] and of keys and values [N, KV, D]; 0 for tokens that are no queries."""
        if not self.most_queries:
            return torch.zeros_like(query)
        own = query if self.queries is None else query.index_select(0, self.queries)
        answers = kernel(
            own,
            key.index_select(0, self.keys),
            value.index_select(0, self.keys),
            self.query_ends,
            self.key_ends,
            self.most_queries,
            self.most_keys,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
        )
        if self.answers is None:
            return answers
        return torch.cat([answers, answers.new_zeros(1, *answers.shape[1:])]).index_select(0, self.answers)


def kernel_for(query: Tensor) -> Kernel | None:
    """The kernel for such queries [..., D]; None: this torch, the GPU or the dtype has none."""
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return None
    if size > MAX_HEAD_SIZE or size % HEAD_SIZE_STEP or torch.cuda.get_device_capability(query.device) < (8, 0):
        return None
    return _KERNEL


def _torch_kernel() -> Kernel | None:
    """That of torch, if it has a scale and windows, which its first versions lack."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= set(names):
        return None
    shares_keys = "enable_gqa" in names

    def attend(query: Tensor, key: Tensor, value: Tensor, *ends: Any, **settings: Any) -> Any:
        if shares_keys:
            return varlen_attn(query, key, value, *ends, enable_gqa=True, **settings)
        times = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
        return varlen_attn(query, key, value, *ends, **settings)

    return attend


_KERNEL = _torch_kernel()
