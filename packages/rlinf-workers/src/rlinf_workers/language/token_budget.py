"""Which sequences make a micro-batch, and which groups a shard, by the tokens that are computed for them.

Functions of lengths alone, so that neither ranks nor modes change who computes what (docs/decisions/020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor

from rlinf_workers.balance import balanced
from rlinf_workers.models.packed import num_computed_tokens
from rlinf_workers.records.language import SampleGroup

T = TypeVar("T")


def lengths_of(group: SampleGroup) -> Tensor:
    """[G] int64, tokens of each completion."""
    return group.loss_mask.sum(-1).long()


def num_tokens_of(group: SampleGroup) -> int:
    """What a packed row computes for the group."""
    return num_computed_tokens(len(group.prompt.token_ids), lengths_of(group))


def split(group: SampleGroup, limit: int) -> list[slice]:
    """Completions of the group, in their order, in as many parts as keep within `limit` tokens, each with the prompt; a
    sequence that is longer is a part alone."""
    prompt_length, parts, first, filled = len(group.prompt.token_ids), [], 0, 0
    for row, length in enumerate(lengths_of(group).sub(1).clamp(min=0).tolist()):
        if row > first and prompt_length + filled + length > limit:
            parts.append(slice(first, row))
            first, filled = row, 0
        filled += length
    return [*parts, slice(first, len(group.loss_mask))]


def filled_up(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """The items in their order, in lists that end where the next item would exceed `limit`; nothing of nothing."""
    waiting: list[T] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if waiting and filled + size > limit:
            yield waiting
            waiting, filled = [], 0
        waiting.append(item)
        filled += size
    if waiting:
        yield waiting


def bins_within(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Items in as few balanced bins as keep within `limit`, the fullest first; an item that is larger is alone."""
    alone = [[item] for item, size in enumerate(sizes) if size > limit]
    others = [item for item, size in enumerate(sizes) if size <= limit]
    num_bins = max(1, -(-sum(sizes[item] for item in others) // limit))
    while True:
        numbers = balanced([sizes[item] for item in others], num_bins)
        found = [[item for item, n in zip(others, numbers, strict=True) if n == number] for number in range(num_bins)]
        if all(sum(sizes[item] for item in items) <= limit for items in found):
            filled = [items for items in found if items]
            return alone + sorted(filled, key=lambda items: -sum(sizes[item] for item in items))
        num_bins += 1
