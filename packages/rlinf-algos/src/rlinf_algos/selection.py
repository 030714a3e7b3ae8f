"""Selects the k largest numbers across parts and ranks. The choice depends on the numbers alone, never on how they are
split into micro-batches, shards and ranks.

A radix selection over float32 in order: each of four rounds looks at 8 bits. In a round every part counts its numbers
by these bits, and the summed counts show which bin contains the smallest chosen number. No number leaves its part.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlinf_algos.errors import AlgosError

SumOverParts = Callable[[Tensor], Tensor]
"""Takes [len(parts), k], one row for each part of this rank, and returns the sum over all parts of all ranks, [k], on
every rank."""

_DIGITS = (24, 16, 8, 0)
_NUM_BINS = 256


@torch.no_grad()
def choose_largest(parts: Sequence[Tensor], num_chosen: int, sum_over_parts: SumOverParts) -> list[Tensor]:
    """Which numbers are among the `num_chosen` largest of all parts of all ranks; ties with the last one are chosen,
    too.

    Args:
        parts: this rank's parts, [n] each, finite; a part may be empty. Floating-point numbers are compared as
            float32; integers must be between 0 and 2^32 - 1.
        num_chosen: the same on every rank; if there are fewer numbers, all are chosen.
        sum_over_parts: called four times.

    Returns:
        bool, in the shapes of the parts.
    """
    keys = [_ordered(part) for part in parts]
    if num_chosen < 1:
        return [torch.zeros_like(key, dtype=torch.bool) for key in keys]
    smallest, num_missing = 0, num_chosen
    for digit in _DIGITS:
        inside = [key[key >> (digit + 8) == smallest >> (digit + 8)] >> digit & (_NUM_BINS - 1) for key in keys]
        counts = torch.stack([torch.bincount(digits.cpu(), minlength=_NUM_BINS) for digits in inside])
        from_above = sum_over_parts(counts.double()).flip(0).cumsum(0)
        reached = (from_above >= num_missing).nonzero()
        if not len(reached):  # only in the first round: there are fewer numbers
            return [torch.ones_like(key, dtype=torch.bool) for key in keys]
        place = int(reached[0])
        num_missing -= int(from_above[place - 1]) if place else 0
        smallest |= (_NUM_BINS - 1 - place) << digit
    return [key >= smallest for key in keys]


def sequence_hash(ids: Sequence[Tensor]) -> Tensor:
    """Pseudo-random integers between 0 and 2^32 - 1 that depend on the ids alone: choosing the largest is a draw
    without replacement that is the same under any plan.

    Args:
        ids: integers of shapes that broadcast against each other; together they identify a token.
    """
    hashes = torch.zeros((), dtype=torch.int64)
    for number in ids:
        hashes = _mixed(hashes.to(number.device) ^ _mixed(number.long() & 0xFFFFFFFF))
    return hashes


def _mixed(numbers: Tensor) -> Tensor:
    """A permutation of the integers below 2^32 (C. Wellons, "Prospecting for Hash Functions", 2018: lowbias32)."""
    numbers = numbers + 0x9E3779B9 & 0xFFFFFFFF  # without it 0 would map to 0
    numbers = (numbers ^ numbers >> 16) * 0x7FEB352D & 0xFFFFFFFF
    numbers = (numbers ^ numbers >> 15) * 0x846CA68B & 0xFFFFFFFF
    return numbers ^ numbers >> 16


def _ordered(part: Tensor) -> Tensor:
    """[n] int64 between 0 and 2^32 - 1, in the order of the numbers."""
    if not part.is_floating_point():
        if part.numel() and not 0 <= int(part.min()) <= int(part.max()) < 1 << 32:
            raise AlgosError(f"integers to choose from must be between 0 and 2^32 - 1, got {int(part.min())}")
        return part.long()
    bits = (part.float() + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
    return torch.where(bits < 0, ~bits & 0xFFFFFFFF, bits + (1 << 31))
