"""Sequence parallelism: the ranks of a replica compute one packed row together, so a row may be as long as all of them
have memory for.

Each rank has a part of the row's tokens in layers and head. Attention needs them all, so before it the ranks exchange
tokens for heads: each gets all tokens of some heads, and afterwards its own tokens of all heads (Ulysses,
arXiv:2309.14509). Where there are more ranks than heads, several have the same heads and share the queries.

Every rank computes the loss of the whole row from the outputs of all ranks, and its backward pass gives the gradient of
its own tokens; the sum over ranks is the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from rlinf_workers.collectives import RankGroup
from rlinf_workers.models.packed_attention import PackedAttention, as_wide

_RANKS: ContextVar[RankGroup | None] = ContextVar("ranks that share packed rows", default=None)


@contextmanager
def shared_rows(ranks: RankGroup | None) -> Iterator[None]:
    """Makes models compute packed rows together with these ranks, which all call them with the same batches. None: each
    rank computes its own."""
    token = _RANKS.set(ranks)
    try:
        yield
    finally:
        _RANKS.reset(token)


def ranks_of_rows() -> RankGroup | None:
    """The ranks of `shared_rows`."""
    return _RANKS.get()


class RowShare:
    """This rank's share of a packed row of N tokens: those from `first` on, n on each rank, the last of which may be
    padding.

    Args:
        multiple: n is a multiple of it.
    """

    def __init__(self, ranks: RankGroup, num_tokens: int, multiple: int = 1) -> None:
        self._ranks = ranks
        self._num_tokens = num_tokens
        self.num_own = -(-num_tokens // (ranks.num_ranks * multiple)) * multiple
        """n"""
        self.first = ranks.rank * self.num_own

    @property
    def num_real(self) -> int:
        """Tokens of this rank that are no padding."""
        return max(0, min(self.num_own, self._num_tokens - self.first))

    def own(self, row: Tensor) -> Tensor:
        """[N, ...] -> [n, ...]; padding is 0."""
        part = row[self.first : self.first + self.num_own]
        return torch.cat([part, part.new_zeros(self.num_own - len(part), *part.shape[1:])])

    def whole(self, own: Tensor) -> Tensor:
        """[n, ...] of every rank -> [N, ...]."""
        before = own.new_zeros(self.first, *own.shape[1:])
        after = own.new_zeros((self._ranks.num_ranks - 1) * self.num_own - self.first, *own.shape[1:])
        return self.joined(torch.cat([before, own, after]))[: self._num_tokens]

    def joined(self, disjoint: Tensor) -> Tensor:
        """The sum over ranks of tensors, each 0 where another rank's is not; the gradient of the sum is that of each
        rank's own."""
        return _Joined.apply(disjoint, self._ranks)  # pyright: ignore[reportReturnType]

    def attention(self, attention: PackedAttention) -> ExchangedAttention:
        """The attention of this rank's tokens, made from that of the row."""
        return ExchangedAttention(attention, self._ranks, self._num_tokens)


class ExchangedAttention:
    """Attention over the tokens of all ranks, called with this rank's.

    Args:
        attention: that of the whole row.
        num_tokens: of the row, without padding.
    """

    def __init__(self, attention: PackedAttention, ranks: RankGroup, num_tokens: int) -> None:
        self._attention, self._ranks, self._num_tokens = attention, ranks, num_tokens
        self._cuts: dict[int, PackedAttention] = {1: attention}
        """Ranks that share the queries -> what of the attention this one computes."""
        self.num_calls = 0
        """As `PackedAttention.num_calls`."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        """As `PackedAttention`, with the n tokens of this rank in place of N."""
        self.num_calls += 1
        width, value = value.shape[-1], as_wide(value, query)
        num_heads, num_ranks = query.shape[1], self._ranks.num_ranks
        num_cuts = math.gcd(num_heads, num_ranks)
        """Ranks with different heads; as many ranks as there are for each of them share the queries."""
        num_sharing = num_ranks // num_cuts
        key, value = (self._repeated(tensor, num_cuts) for tensor in (key, value))
        widths = [tensor.shape[1] // num_cuts for tensor in (query, key, value)]
        parts = torch.cat([_by_heads(tensor[0], num_cuts) for tensor in (query, key, value)], 2)  # [U, n, F, D]
        parts = parts.repeat_interleave(num_sharing, 0)
        heads = _AllToAll.apply(parts, self._ranks).flatten(0, 1)[: self._num_tokens]  # [N, F, D]
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in heads.split(widths, 1))
        if num_sharing not in self._cuts:
            self._cuts[num_sharing] = self._attention.cut(self._ranks.rank % num_sharing, num_sharing)
        answers = self._cuts[num_sharing](q, k, v, **settings)[0]  # [N, H / U, D]
        padding = num_ranks * query.shape[2] - self._num_tokens
        answers = torch.cat([answers, answers.new_zeros(padding, *answers.shape[1:])])
        back = _AllToAll.apply(answers.view(num_ranks, -1, *answers.shape[1:]), self._ranks)  # [R, n, H / U, D]
        back = back.unflatten(0, (num_cuts, num_sharing)).sum(1)
        return back.transpose(0, 1).flatten(1, 2)[None, ..., :width]

    @staticmethod
    def _repeated(tensor: Tensor, num_cuts: int) -> Tensor:
        """Keys or values with so many heads that they can be divided among `num_cuts`."""
        times = num_cuts // math.gcd(num_cuts, tensor.shape[1])
        return tensor if times == 1 else tensor.repeat_interleave(times, 1)


def _by_heads(tensor: Tensor, num_cuts: int) -> Tensor:
    """[H, n, D] -> [U, n, H / U, D]"""
    return tensor.unflatten(0, (num_cuts, -1)).transpose(1, 2)


class _AllToAll(torch.autograd.Function):
    """`RankGroup.all_to_all`; its gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_to_all(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.ranks.all_to_all(gradients[0]), None


class _Joined(torch.autograd.Function):
    """As `RowShare.joined`."""

    @staticmethod
    def forward(ctx: Any, disjoint: Tensor, ranks: RankGroup) -> Tensor:
        return ranks.sum_(disjoint.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None
