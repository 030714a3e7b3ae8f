"""The largest of numbers in parts, on many ranks: which they are depends on the numbers alone, never on how they
are cut into micro-batches, shards and ranks.

A radix selection: four rounds look at 8 bits of the numbers each, of float32 as they are ordered. In a round every part
counts its numbers by these bits, and the counts of all parts say in which bin the smallest chosen one lies. No number
leaves its part.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlinf_algos.errors import AlgosError

SumOverParts = Callable[[Tensor], Tensor]
"""Takes one row a part of this rank, [len(parts), k], returns the sum over all parts of all ranks, [k], on each."""

_DIGITS = (24, 16, 8, 0)
_NUM_BINS = 256


@torch.no_grad()
def choose_largest(parts: Sequence[Tensor], num_chosen: int, sum_over_parts: SumOverParts) -> list[Tensor]:
    """Which numbers are among the `num_chosen` largest of all parts of all ranks; those that tie with the last one are
    in too.

    Args:
        parts: this rank's, [n] each, finite; a part may be empty. Floating ones are compared as float32, integers lie
            between 0 and 2^32 - 1.
        num_chosen: the same on every rank; more than there are: all.
        sum_over_parts: called four times.

    Returns:
        bool, the shapes of the parts.
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
    """Integers between 0 and 2^32 - 1 that look drawn, a function of the ids alone: choosing the largest of them draws
    without replacement, the same tokens under any plan.

    Args:
        ids: integers, of shapes that broadcast against each other; together they tell tokens apart.
    """
    hashes = torch.zeros((), dtype=torch.int64)
    for number in ids:
        hashes = _mixed(hashes.to(number.device) ^ _mixed(number.long() & 0xFFFFFFFF))
    return hashes


def _mixed(numbers: Tensor) -> Tensor:
    """A permutation of the integers below 2^32 (C. Wellons, "Prospecting for Hash Functions", 2018: lowbias32)."""
    numbers = numbers + 0x9E3779B9 & 0xFFFFFFFF  # else 0 would stay 0
    numbers = (numbers ^ numbers >> 16) * 0x7FEB352D & 0xFFFFFFFF
    numbers = (numbers ^ numbers >> 15) * 0x846CA68B & 0xFFFFFFFF
    return numbers ^ numbers >> 16


def _ordered(part: Tensor) -> Tensor:
    """[n] int64 between 0 and 2^32 - 1, in the order of the numbers."""
    if not part.is_floating_point():
        if part.numel() and not 0 <= int(part.min()) <= int(part.max()) < 1 << 32:
            raise AlgosError(f"integers to choose from lie between 0 and 2^32 - 1, not at {int(part.min())}")
        return part.long()
    bits = (part.float() + 0.0).view(torch.int32).long()  # + 0.0: there is a -0.0, which equals 0.0
    return torch.where(bits < 0, ~bits & 0xFFFFFFFF, bits + (1 << 31))
