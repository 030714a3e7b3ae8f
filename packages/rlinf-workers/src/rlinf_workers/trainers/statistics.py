"""Sums of the statistics of an update, without waiting for the device at every micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Statistics = Sequence[float] | Tensor
"""K sums; a tensor [K] float64 on any device, where they are not known on the host yet."""


def totals_of(values: Iterable[float | Tensor], like: Tensor) -> Tensor:
    """[K] float64 on the device of `like`, without gradient: numbers and scalar tensors one after the other."""
    return torch.stack(
        [
            value.detach().double().reshape(())
            if isinstance(value, Tensor)
            else torch.full((), value, dtype=torch.float64, device=like.device)
            for value in values
        ]
    )


class StatisticSums:
    """The statistics of each shard, added up in the order of its micro-batches. A device is read once for all of them.

    Args:
        shards: of this replica.
        num_statistics: K
    """

    def __init__(self, shards: Iterable[int] = (), num_statistics: int = 0) -> None:
        self._num_statistics = num_statistics
        self._by_shard: dict[int, list[Tensor]] = {shard: [] for shard in shards}

    def add(self, shard: int, statistics: Statistics) -> None:
        """Adds those of a micro-batch."""
        self._by_shard[shard].append(torch.as_tensor(statistics, dtype=torch.float64).detach())

    def of_shards(self) -> list[Tensor]:
        """[K] float64 of each shard, in host memory."""
        return [self._sum(parts) for parts in self._by_shard.values()]

    def _sum(self, parts: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(self._num_statistics, dtype=torch.float64)
        away = [part for part in parts if part.device != total.device]
        read = iter(torch.stack(away).cpu() if away else ())
        for part in parts:
            total += part if part.device == total.device else next(read)
        return total
