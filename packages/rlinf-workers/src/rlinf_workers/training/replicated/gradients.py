"""Gradients of a batch that is cut into a fixed number of shards, whatever the number of ranks.

A recipe fixes the shards; a plan fixes the ranks. Shard s belongs to rank s % num_ranks. Each shard adds up its
micro-batches in a buffer of its own, and the buffers are summed in the order of the shards: locally where a rank has
several, then over ranks. With one rank the sum is (s0 + s1), with two it is the all-reduce of s0 and s1: the same
float additions, so the same bits. Of four shards two ranks make (s0 + s2) + (s1 + s3), which agrees with one rank's sum
up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from rlinf_workers.collectives import RankGroup


class ShardedGradients:
    """Owns the gradient buffers of a model's parameters.

    Args:
        parameters: those to train; all of one dtype.
        num_shards: a multiple of the number of ranks.
        num_statistics: numbers that are summed beside the gradient (token counts, loss terms), in float64.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], num_shards: int, ranks: RankGroup, num_statistics: int
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if num_shards % ranks.num_ranks:
            raise ValueError(
                f"actor.num_shards={num_shards} is not a multiple of its {ranks.num_ranks} ranks; "
                f"use {ranks.num_ranks} or a multiple of it"
            )
        self._ranks = ranks
        self.shards = [shard for shard in range(num_shards) if shard % ranks.num_ranks == ranks.rank]
        size = sum(parameter.numel() for parameter in self._parameters)
        first = self._parameters[0]
        self._buffers = {shard: torch.zeros(size, dtype=first.dtype, device=first.device) for shard in self.shards}
        self._statistics = {shard: torch.zeros(num_statistics, dtype=torch.float64) for shard in self.shards}
        self._views = {shard: self._split(buffer) for shard, buffer in self._buffers.items()}

    def zero(self) -> None:
        """Starts a new batch."""
        for shard in self.shards:
            self._buffers[shard].zero_()
            self._statistics[shard].zero_()

    def backward(self, shard: int, loss: Tensor, statistics: Iterable[float]) -> None:
        """Adds the gradient of a micro-batch's loss, and its statistics, to a shard."""
        for parameter, view in zip(self._parameters, self._views[shard], strict=True):
            parameter.grad = view
        loss.backward()
        self.add_statistics(shard, statistics)

    def add_statistics(self, shard: int, statistics: Iterable[float]) -> None:
        """For a micro-batch that has no gradient."""
        self._statistics[shard] += torch.tensor(list(statistics), dtype=torch.float64)

    def reduce(self) -> Tensor:
        """Sums over all shards of all ranks; afterwards every parameter's `.grad` is the sum. Returns the summed
        statistics."""
        first, *others = self.shards
        for shard in others:
            self._buffers[first] += self._buffers[shard]
            self._statistics[first] += self._statistics[shard]
        self._ranks.sum_(self._buffers[first])
        self._ranks.sum_(self._statistics[first])
        for parameter, view in zip(self._parameters, self._views[first], strict=True):
            parameter.grad = view
        return self._statistics[first].clone()

    def sum_over_shards(self, by_shard: Mapping[int, Tensor]) -> Tensor:
        """Sum of one tensor for each shard of this rank, over all shards of all ranks, in the order of the shards."""
        first, *others = (by_shard[shard] for shard in self.shards)
        total = first.clone()
        for tensor in others:
            total += tensor
        return self._ranks.sum_(total)

    def scale_(self, factor: float) -> None:
        """Multiplies the reduced gradient."""
        self._buffers[self.shards[0]] *= factor

    def release(self) -> None:
        """Takes the gradients off the parameters. Moving a model moves its gradients too, which would part them from
        the buffers."""
        for parameter in self._parameters:
            parameter.grad = None

    def move(self, device: torch.device) -> None:
        """With what they have summed so far: a turn may end in the middle of a step. After `release`."""
        self._buffers = {shard: buffer.to(device) for shard, buffer in self._buffers.items()}
        self._views = {shard: self._split(buffer) for shard, buffer in self._buffers.items()}

    def _split(self, buffer: Tensor) -> list[Tensor]:
        sizes = [parameter.numel() for parameter in self._parameters]
        pieces = buffer.split(sizes)
        return [piece.view_as(parameter) for piece, parameter in zip(pieces, self._parameters, strict=True)]
