"""Which tokens truncated sampling left at each sampled token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlinf_comm import record


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTokens:
    """The tokens that top_p, top_k and min_p left, for the tokens of R rows.

    Example: R = 2, T = 2; the first token of row 0 was drawn from 5 and 7, its second from 2; that of row 1 from 3, 4:
        ids = [5, 7, 2, 3, 4], counts = [[2, 1], [2, 0]]
    """

    ids: Tensor
    """[S] int32, ascending for each token; those of row 0 first, each row's tokens in their order."""
    counts: Tensor
    """[R, T] int32, how many each token was drawn from; 0 where none was sampled. S in all."""

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[Tensor]]) -> KeptTokens:
        """
        Args:
            rows: for each row, the kept ids of each of its tokens, in their order.
        """
        counts = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.int32)
        for row, kept_tokens in zip(counts, rows, strict=True):
            row[: len(kept_tokens)] = torch.tensor([len(one) for one in kept_tokens], dtype=torch.int32)
        flat = [one for kept_tokens in rows for one in kept_tokens]
        return cls(ids=torch.cat(flat).int() if flat else torch.zeros(0, dtype=torch.int32), counts=counts)

    @classmethod
    def joined(cls, parts: Iterable[KeptTokens], order: Tensor) -> KeptTokens:
        """The rows of all parts one after the other, in this order."""
        parts = list(parts)
        width = max(part.counts.shape[1] for part in parts)
        counts = torch.cat([pad(part.counts, (0, width - part.counts.shape[1])) for part in parts])
        whole = cls(ids=torch.cat([part.ids for part in parts]), counts=counts)
        by_row = whole.by_row()
        return cls(ids=torch.cat([by_row[row] for row in order.tolist()]), counts=counts[order])

    def by_row(self) -> tuple[Tensor, ...]:
        """The ids of each row."""
        return self.ids.split(self.counts.sum(1).tolist())

    def by_token(self, row: int) -> tuple[Tensor, ...]:
        """The ids of each token of a row."""
        return self.by_row()[row].split(self.counts[row].tolist())

    def rows(self, which: slice) -> KeptTokens:
        """Those of some neighbouring rows."""
        ends = self.counts.sum(1).cumsum(0).tolist()
        first, end, _ = which.indices(len(self.counts))
        starts = [0, *ends]
        return KeptTokens(ids=self.ids[starts[first] : starts[max(first, end)]], counts=self.counts[which])


def split_by_row(is_kept: Tensor) -> tuple[Tensor, ...]:
    """[B, V] bool -> the kept ids of each row, on the CPU."""
    return is_kept.nonzero()[:, 1].int().cpu().split(is_kept.sum(1).tolist())
