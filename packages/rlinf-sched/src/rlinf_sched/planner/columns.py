"""Candidates for a part of a flow, as rows of numbers to minimise.

A row holds the devices that the candidate takes of each pool, the times at which its items come out, how long the
second half and the last of its items take, how long a step takes among others, for each pool the bytes that stay on its
devices between turns and at their fullest, and for each weight edge whose source is not in the part the bytes that a
device of its target receives. Less is better in every column.
"""

from dataclasses import dataclass
from functools import cached_property

from rlinf_sched.stage_time import FRACTIONS

NUM_OUT = len(FRACTIONS)


@dataclass(frozen=True)
class RowColumns:
    """Which columns of a row hold which numbers."""

    num_pools: int
    num_edges: int

    @cached_property
    def devices(self) -> slice:
        return slice(0, self.num_pools)

    @cached_property
    def out(self) -> slice:
        """Seconds at which the first hand-over, the middle and the last item of a step come out."""
        return slice(self.num_pools, self.num_pools + NUM_OUT)

    @cached_property
    def first(self) -> int:
        return self.num_pools

    @cached_property
    def last(self) -> int:
        return self.num_pools + NUM_OUT - 1

    @cached_property
    def half(self) -> int:
        """Seconds from the arrival of the second half of the inputs at an idle part to its end."""
        return self.last + 1

    @cached_property
    def tail(self) -> int:
        """Seconds from the arrival of the last input at an idle part to its end."""
        return self.half + 1

    @cached_property
    def period(self) -> int:
        """Seconds from the end of one step to that of the next where steps follow each other closely: what the busiest
        device computes. The last of the times where they may not (`max_staleness` 0)."""
        return self.tail + 1

    @cached_property
    def further(self) -> int:
        """Seconds that each further step adds if the part begins several together."""
        return self.period + 1

    @cached_property
    def held(self) -> int:
        """Seconds by which a step comes out later if as many are begun together as may be under way: what comes first
        on shared devices takes them all before it lets go."""
        return self.period + 2

    @cached_property
    def spaced(self) -> int:
        """Seconds between steps from which on they hold nobody up: each is through the parts that share devices before
        the next one comes."""
        return self.period + 3

    @cached_property
    def sync(self) -> int:
        """Seconds of the weight syncs within the part, after the step."""
        return self.spaced + 1

    @cached_property
    def switches(self) -> int:
        """1 where a stage of the part offloads, else 0."""
        return self.sync + 1

    @cached_property
    def resident(self) -> slice:
        return slice(self.switches + 1, self.switches + 1 + self.num_pools)

    @cached_property
    def peak(self) -> slice:
        return slice(self.resident.stop, self.resident.stop + self.num_pools)

    @cached_property
    def edges(self) -> slice:
        return slice(self.peak.stop, self.peak.stop + self.num_edges)

    @cached_property
    def width(self) -> int:
        return self.edges.stop
