"""Granularities and numbers of host processes that local search tries."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_sched.planner.pools import host_instances
from rlinf_sched.problem import Problem

_MOST_PARTS = 16
"""Maximum number of equal hand-overs into which an instance's share of a step is divided."""


class Sizes:
    """For stages by their index in the flow; a granularity for several stages must be allowed for all of them.

    A hand-over has at most an instance's share of a step. `num_items` means that the instance waits for the whole
    previous batch, except in a cycle, where the batch never ends.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._num_items = problem.num_items
        self._stages = problem.flow.stages
        self._listed = [frozenset(problem.choices(stage.name)) for stage in self._stages]
        self._in_cycle = {name for cycle in problem.flow.cycles() for name in cycle}

    def listed(self, stages: Sequence[int], num_ranks: int) -> list[int]:
        """The flow's list, or else the powers of two, ascending; one of them is an instance's share."""
        sizes = sorted(frozenset.intersection(*(self._listed[s] for s in stages)))
        return [
            size
            for i, size in enumerate(sizes)
            if i == 0 or sizes[i - 1] * num_ranks < self._num_items or self._is_whole(size, stages)
        ]

    def near(self, stages: Sequence[int], num_ranks: int, now: int) -> list[int]:
        """From that list: two smaller ones, two larger ones and the largest."""
        sizes = self.listed(stages, num_ranks)
        if now * num_ranks >= self._num_items and not self._is_whole(now, stages):
            now = next((size for size in sizes if size * num_ranks >= self._num_items), now)
        return [*[size for size in sizes if size < now][-2:], *[size for size in sizes if size > now][:2], *sizes[-1:]]

    def between(self, stages: Sequence[int], num_ranks: int, now: int) -> list[int]:
        """Further ones if the flow allows any: equal fractions of an instance's share of a step, and slightly smaller
        and larger ones; ascending."""
        of = [self._stages[s] for s in stages]
        if any(stage.whole_batch or stage.granularities for stage in of):
            return []
        multiple = max(stage.item_multiple for stage in of)
        share = -(-self._num_items // num_ranks)
        parts = (-(-share // k) for k in range(1, _MOST_PARTS + 1))
        sizes = {_round_up(size, multiple) for size in (*parts, *_around(min(now, share), multiple))}
        most = min(_round_up(share, multiple), self._num_items - 1)
        return sorted(size for size in sizes if 0 < size <= most and not any(size % one.item_multiple for one in of))

    def near_and_far(self, stages: Sequence[int], num_ranks: int, now: int) -> list[int]:
        """All listed ones and those between."""
        return [*self.listed(stages, num_ranks), *self.between(stages, num_ranks, now)]

    def share(self, stage: int, num_ranks: int, num_parts: int = 1) -> int:
        """Each instance's share of a step, or a fraction of it, or the next larger allowed size."""
        record, count = self._stages[stage], num_ranks * num_parts
        even = _round_up(-(-self._num_items // count), record.item_multiple)
        if record.granularities or even > self._num_items:
            sizes = self._listed[stage]
            return min((size for size in sizes if size * count >= self._num_items), default=max(sizes))
        return even

    def granularity(self, stage: int, size: int) -> int:
        """As stored in plans: 0 for the whole batch."""
        return 0 if self._is_whole(size, [stage]) else size

    def on_host(self, stage: int) -> list[int]:
        """Numbers of processes: powers of two and the maximum, or divisors of the stage's parts."""
        record = self._stages[stage]
        return list(host_instances(self._problem.most_on_host(record.name), self._num_items, record.num_parts))

    def between_on_host(self, stage: int, now: int) -> list[int]:
        """Further numbers, if any number is allowed."""
        if self._stages[stage].num_parts:
            return []
        most = self.on_host(stage)[-1]
        return [count for count in _around(now, 1) if 0 < count <= most]

    def _is_whole(self, size: int, stages: Sequence[int]) -> bool:
        return size >= self._num_items and self._stages[stages[0]].name not in self._in_cycle


def _around(now: int, step: int) -> list[int]:
    return [now - 2 * step, now - step, now + step, now + 2 * step, now * 3 // 4, now * 3 // 2]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
