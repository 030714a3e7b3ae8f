"""How many items stages hand over at a time and how many processes they have on the host: what local search tries."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_sched.planner.pools import host_instances
from rlinf_sched.problem import Problem

_MOST_PARTS = 16
"""Hand-overs into which what an instance has of a step is divided evenly."""


class Sizes:
    """Of stages by their index in the flow; sizes of hand-overs are those that all of several stages may have, and
    `num_items` is the whole batch."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._stages = problem.flow.stages
        self._listed = [frozenset(problem.choices(stage.name)) for stage in self._stages]

    def listed(self, stages: Sequence[int]) -> list[int]:
        """What the flow lists, or else the powers of two, ascending."""
        return sorted(frozenset.intersection(*(self._listed[s] for s in stages)))

    def near(self, stages: Sequence[int], now: int) -> list[int]:
        """Of those listed two smaller ones, two larger ones and the largest."""
        sizes = self.listed(stages)
        return [*[size for size in sizes if size < now][-2:], *[size for size in sizes if size > now][:2], *sizes[-1:]]

    def between(self, stages: Sequence[int], num_ranks: int, now: int) -> list[int]:
        """Others, where the flow leaves them open: even parts of what each of so many instances has of a step, and some
        more or fewer than now."""
        of = [self._stages[s] for s in stages]
        if any(stage.whole_batch or stage.granularities for stage in of):
            return []
        multiple = max(stage.item_multiple for stage in of)
        share = -(-self._problem.num_items // num_ranks)
        parts = (-(-share // k) for k in range(1, _MOST_PARTS + 1))
        sizes = {-(-size // multiple) * multiple for size in (*parts, *_around(now, multiple))}
        return sorted(
            size
            for size in sizes
            if 0 < size < self._problem.num_items and all(size % stage.item_multiple == 0 for stage in of)
        )

    def on_host(self, stage: int) -> list[int]:
        """Numbers of processes: powers of two and the most, or divisors of the stage's parts."""
        record = self._stages[stage]
        return list(host_instances(self._problem.most_on_host(record.name), self._problem.num_items, record.num_parts))

    def between_on_host(self, stage: int, now: int) -> list[int]:
        """Others, where any number will do."""
        if self._stages[stage].num_parts:
            return []
        most = self.on_host(stage)[-1]
        return [count for count in _around(now, 1) if 0 < count <= most]


def _around(now: int, step: int) -> list[int]:
    return [now - 2 * step, now - step, now + step, now + 2 * step, now * 3 // 4, now * 3 // 2]
