"""Sums over sequences and values for their tokens, whether a row holds one sequence (padded) or several (packed).

Legend: B rows, T positions of a row, S sequences. `sequence_ids` [B, T] says which sequence a position belongs to;
None: row b is sequence b. Ids are unique over the whole tensor (two rows with the same id share a sequence), in any
order, with any gaps; where the mask is False (padding) they are not read.

Example: three sequences in two rows of four, the last position padding:
    sequence_ids = [[0, 0, 0, 1], [2, 2, 1, -1]], mask = [[1, 1, 1, 1], [1, 1, 1, 0]]: sequence 1 goes on in row 1
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_algos.errors import AlgosError, ShapeError


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceIndex:
    """Where the tokens of each sequence are."""

    mask: Tensor
    """[B, T] bool: the tokens that count."""
    slots: Tensor | None
    """[B, T] int64, 0 ... S - 1, any value outside the mask; None: one sequence a row, S = B."""
    lengths: Tensor
    """[S] int64: tokens inside the mask; 0 for a row without any."""

    @property
    def num_sequences(self) -> Tensor:
        """Scalar int64: sequences with at least one token."""
        return (self.lengths > 0).sum()

    def sum(self, values: Tensor) -> Tensor:
        """[S]: sums of `values` [B, T], which is 0 outside the mask; differentiable."""
        if self.slots is None:
            return values.sum(dim=1)
        zeros = torch.zeros(len(self.lengths), dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.slots.reshape(-1), values.reshape(-1))

    def mean(self, values: Tensor) -> Tensor:
        """[S]: means over the tokens of each sequence; 0 for one without any; differentiable."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """[B, T]: for each token the value [S] of its sequence; arbitrary outside the mask."""
        if self.slots is None:
            return values.unsqueeze(1).expand(self.mask.shape)
        return values[self.slots]


def index_sequences(mask: Tensor, sequence_ids: Tensor | None = None) -> SequenceIndex:
    """Finds the sequences.

    Args:
        mask: [B, T] bool. sequence_ids: [B, T] integers, at least 0 inside the mask; None: one sequence a row.

    Raises:
        ShapeError: mask is not [B, T], or sequence_ids has another shape. AlgosError: ids that are no integers, or
            negative inside the mask.
    """
    if mask.ndim != 2:
        raise ShapeError(f"terms of sequences have shape {list(mask.shape)}; expected [B, T]")
    if sequence_ids is None:
        return SequenceIndex(mask=mask, slots=None, lengths=mask.sum(dim=1))
    if sequence_ids.shape != mask.shape:
        raise ShapeError(f"sequence_ids has shape {list(sequence_ids.shape)}; expected {list(mask.shape)}, as the mask")
    if sequence_ids.is_floating_point() or sequence_ids.dtype == torch.bool:
        raise AlgosError(f"sequence_ids has dtype {sequence_ids.dtype}; expected integers")
    slots = sequence_ids.long().masked_fill(~mask, 0)
    if slots.numel() and int(slots.min()) < 0:
        index = (slots < 0).nonzero()[0].tolist()
        raise AlgosError(f"sequence_ids{index}={int(slots[tuple(index)])} is negative; only padding may be")
    num_slots = int(slots.max()) + 1 if slots.numel() else 0
    if num_slots > slots.numel():  # ids of a data set, say: number them anew
        unique, slots = slots.unique(return_inverse=True)
        num_slots = len(unique)
    lengths = torch.zeros(num_slots, dtype=torch.int64, device=mask.device)
    lengths.index_add_(0, slots.reshape(-1), mask.reshape(-1).long())
    return SequenceIndex(mask=mask, slots=slots, lengths=lengths)


def sequence_ids_of(cumulative_lengths: Tensor, num_positions: int) -> Tensor:
    """The `sequence_ids` of one packed row from where its sequences begin and end (flash-attention's `cu_seqlens`).

    Args:
        cumulative_lengths: [S + 1] integers, from 0, not decreasing: sequence s has the positions from its element s
            up to, not including, element s + 1.
        num_positions: length of the row, at least the last element; positions beyond that are padding, with the id -1.

    Returns:
        [1, num_positions] int64.

    Example: [0, 3, 5], 6 -> [[0, 0, 0, 1, 1, -1]]
    """
    if cumulative_lengths.ndim != 1 or not len(cumulative_lengths):
        raise ShapeError(f"cumulative_lengths has shape {list(cumulative_lengths.shape)}; expected [S + 1]")
    lengths = cumulative_lengths.long().diff()
    first, last = int(cumulative_lengths[0]), int(cumulative_lengths[-1])
    if first != 0 or bool((lengths < 0).any()) or last > num_positions:
        raise AlgosError(
            f"cumulative_lengths={cumulative_lengths.tolist()} must start at 0, never decrease and end at most at "
            f"num_positions={num_positions}"
        )
    ids = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    return torch.nn.functional.pad(ids, (0, num_positions - last), value=-1).unsqueeze(0)
