"""What a rank of megatron-core computes of a micro-batch: token ids, and the tokens for which outputs are needed.

Padded micro-batches: megatron-core's layers have no cache with gradients, so each completion is preceded by its own
copy of the prompt and followed by padding, which causal attention never sees. The slices of a stage divide the rows.

Packed micro-batches: one row without padding, which has each prompt once (models/packed.py). The slices of a stage
share it, each a part of its tokens (models/sequence_parallel.py).

Legend: R rows, S positions and T query tokens of a row; outputs of the whole micro-batch have B rows and C columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlinf_workers.collectives import RankGroup
from rlinf_workers.models.packed import PackedBatch, part_of_rank
from rlinf_workers.models.packed_attention import PackedAttention
from rlinf_workers.models.sequence_parallel import ExchangedAttention
from rlinf_workers.models.sequences import SequenceBatch
from rlinf_workers.roles.records.language import ExampleBatch

Batch = SequenceBatch | ExampleBatch | PackedBatch


class Query(Protocol):
    """One rank's part of a micro-batch."""

    @property
    def before(self) -> Tensor:
        """[R, T] int64, the position before each query token."""
        ...

    @property
    def targets(self) -> Tensor:
        """[R, T] int64, the query tokens."""
        ...

    @property
    def temperature(self) -> float: ...

    @property
    def entropies(self) -> bool:
        """Whether entropies may have a gradient."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """B, C"""
        ...

    def arguments(self) -> dict[str, Any]:
        """Arguments of a GPTModel call."""
        ...

    def insert(self, whole: Tensor, answers: Tensor) -> None:
        """Writes outputs [answers, R, T] into their places in [answers, B, C]."""
        ...

    def own(self, whole: Tensor) -> Tensor:
        """The inverse of `insert`; 0 for filler rows."""
        ...


def query_of(
    batch: Batch,
    temperature: float,
    slices: RankGroup,
    multiple: int,
    *,
    replays_routers: bool = False,
    entropies: bool = True,
) -> Query:
    """This rank's part of a micro-batch.

    Args:
        temperature: of completions; that of examples is 1.
        slices: the ranks that divide the micro-batch, with the same shards of the model's matrices.
        multiple: the number of positions is a multiple of it.
        replays_routers: a packed batch's experts are used.
        entropies: they may have a gradient.
    """
    if isinstance(batch, PackedBatch):
        batch = batch if replays_routers else replace(batch, experts=None)
        return PackedQuery.of(batch, temperature, slices, multiple, entropies=entropies)
    query = TokenQuery.of(batch, temperature).row_slice(slices.rank, slices.num_ranks).padded(multiple)
    return replace(query, entropies=entropies)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenQuery:
    """Padded sequences."""

    token_ids: Tensor
    """[R, S] int64, right-padded."""
    before: Tensor
    targets: Tensor
    temperature: float
    num_rows: int
    """B, of which this may be a slice."""
    rows: Tensor
    """[r] int64, the rows of the micro-batch that it has; the remaining ones of the R are filler."""
    entropies: bool = True

    @classmethod
    def of(cls, batch: SequenceBatch | ExampleBatch, temperature: float) -> TokenQuery:
        """Queries all completion tokens; for examples all tokens except the first, at temperature 1."""
        if isinstance(batch, ExampleBatch):
            ids, temperature = batch.token_ids, 1.0
            before = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
            return cls._whole(ids, before, ids[:, 1:], temperature)
        repeats, targets = batch.repeats, batch.completion_ids
        padding = (batch.prompt_mask == 0).sum(-1, keepdim=True).repeat_interleave(repeats, 0)
        both = torch.cat([batch.prompt_ids.repeat_interleave(repeats, 0), targets], 1)
        places = torch.arange(both.shape[1], device=both.device) + padding
        moved = both.gather(1, places.clamp(max=both.shape[1] - 1)).masked_fill(places >= both.shape[1], 0)
        first = batch.prompt_ids.shape[1] - 1 - padding
        before = first + torch.arange(targets.shape[1], device=both.device)
        return cls._whole(moved, before, targets, temperature)

    @classmethod
    def _whole(cls, token_ids: Tensor, before: Tensor, targets: Tensor, temperature: float) -> TokenQuery:
        return cls(
            token_ids=token_ids,
            before=before,
            targets=targets,
            temperature=temperature,
            num_rows=len(token_ids),
            rows=torch.arange(len(token_ids), device=token_ids.device),
        )

    @classmethod
    def filler(cls, multiple: int, device: torch.device) -> TokenQuery:
        """One row with one token, of a micro-batch that only fills a schedule."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        return cls._whole(ids, ids, ids, 1.0).padded(multiple)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.targets.shape[1]

    def row_slice(self, number: int, num_slices: int) -> TokenQuery:
        """Every `num_slices`-th row, starting with row `number`; slices have equal sizes, with the last row repeated as
        filler."""
        if num_slices == 1:
            return self
        rows = torch.arange(number, -(-self.num_rows // num_slices) * num_slices, num_slices, device=self.rows.device)
        of_slice = rows.clamp(max=self.num_rows - 1)
        num_own = len(range(number, self.num_rows, num_slices))
        return replace(
            self,
            token_ids=self.token_ids[of_slice],
            before=self.before[of_slice],
            targets=self.targets[of_slice],
            rows=rows[:num_own],
        )

    def padded(self, multiple: int) -> TokenQuery:
        """Pads the sequences to a multiple of `multiple` positions."""
        missing = -self.token_ids.shape[1] % multiple
        return replace(self, token_ids=pad(self.token_ids, (0, missing))) if missing else self

    def arguments(self) -> dict[str, Any]:
        places = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        return {"input_ids": self.token_ids, "position_ids": places.expand_as(self.token_ids), "attention_mask": None}

    def insert(self, whole: Tensor, answers: Tensor) -> None:
        whole[:, self.rows] = answers[:, : len(self.rows)]

    def own(self, whole: Tensor) -> Tensor:
        own = whole.new_zeros(len(whole), *self.targets.shape)
        own[:, : len(self.rows)] = whole[:, self.rows]
        return own


@dataclass(frozen=True, kw_only=True, slots=True)
class Frequencies:
    """How positions rotate pairs of numbers of queries and keys."""

    of_pairs: Tensor
    """[r / 2]"""
    scaling: float = 1.0
    """Factor of cosines and sines (YaRN)."""

    def at(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions [S], [S, 1, r / 2]."""
        angles = torch.outer(position_ids.float(), self.of_pairs.to(position_ids.device, torch.float32))[:, None]
        return angles.cos() * self.scaling, angles.sin() * self.scaling


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """What attention gets in place of megatron-core's PackedSeqParams. That describes sequences by their ends, for
    kernels of Transformer Engine; here a prompt is there once for all its completions."""

    attention: PackedAttention | ExchangedAttention
    rotations: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [S, 1, r / 2] of the tokens' positions, which all layers share; set by the model. The first r
    of the D numbers of a head are rotated."""
    experts: Tensor | None = None
    """[S, layers, k], the engine's choices, which the routers use (routers.py); None: their own."""
    qkv_format: str = "sbhd"
    """Layers treat the row as one long sequence."""
    max_seqlen_q: int = 1
    max_seqlen_kv: int = 1
    """Positions for which GPTModel computes rotations, which are not used."""
    cp_group: None = None

    def at(self, position_ids: Tensor, frequencies: Frequencies) -> PackedRow:
        """The row with the rotations of these positions, [S]."""
        return replace(self, rotations=frequencies.at(position_ids))

    def rotated(self, states: Tensor) -> Tensor:
        """Rotary embedding of queries or keys, [S, 1, heads, D]."""
        assert self.rotations is not None, "`at` was called"
        cos, sin = (part[:, None].to(states.dtype) for part in self.rotations)
        size = cos.shape[-1]
        left, right, others = states.split([size, size, states.shape[-1] - 2 * size], -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin, others], -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedQuery:
    """This rank's tokens of a packed row."""

    part: PackedBatch
    """Of n tokens; the M tokens with an output of this rank are the `before` and `targets`, [1, M]."""
    places: Tensor
    """[M] int64, of these tokens among the B times C of the micro-batch."""
    temperature: float
    entropies: bool

    @classmethod
    def of(
        cls, batch: PackedBatch, temperature: float, slices: RankGroup, multiple: int, *, entropies: bool
    ) -> PackedQuery:
        is_whole = slices.num_ranks == 1 and len(batch.token_ids) % multiple == 0
        part = batch if is_whole else part_of_rank(batch, slices, multiple)
        places = torch.nonzero_static(part.loss_mask.flatten(), size=len(part.ids))[:, 0]  # its size is known here
        return cls(part=part, places=places, temperature=temperature, entropies=entropies)

    @property
    def before(self) -> Tensor:
        return self.part.answers_at[None]

    @property
    def targets(self) -> Tensor:
        return self.part.ids[None]

    @property
    def shape(self) -> tuple[int, int]:
        num_rows, num_columns = self.part.loss_mask.shape
        return num_rows, num_columns

    def arguments(self) -> dict[str, Any]:
        return {
            "input_ids": self.part.token_ids[None],
            "position_ids": self.part.position_ids[None],
            "attention_mask": None,
            "packed_seq_params": PackedRow(attention=self.part.attention, experts=self._experts()),
        }

    @property
    def num_real(self) -> int:
        """Tokens without the padding at the end."""
        return len(self.part.token_ids) if self.part.share is None else self.part.share.num_real

    def _experts(self) -> Tensor | None:
        """Those of the part. Padding has k different ones, as every token of a router."""
        if (experts := self.part.experts) is None:
            return None
        some = torch.arange(experts.shape[-1], device=experts.device).to(experts.dtype)
        return torch.cat([experts[: self.num_real], some.expand_as(experts[self.num_real :])])

    def insert(self, whole: Tensor, answers: Tensor) -> None:
        whole.flatten(1)[:, self.places] = answers[:, 0]

    def own(self, whole: Tensor) -> Tensor:
        return whole.flatten(1)[:, None, self.places]
