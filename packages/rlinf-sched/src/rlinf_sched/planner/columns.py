"""Candidates for a part of a flow, as rows of numbers to minimize.

A row holds the number of devices of each pool, the times at which items are finished, the time of the second half and
of the last item, the time that a further step adds, for each pool the bytes that stay on its devices between turns and
their peak, and for each weight edge whose source is outside of the part the bytes that a device of its target receives.
Less is better in every column.
"""

from dataclasses import dataclass
from functools import cached_property

from rlinf_sched.stage_time import FRACTIONS

NUM_OUT = len(FRACTIONS)


@dataclass(frozen=True)
class RowColumns:
    """The position of each quantity in a row."""

    num_pools: int
    num_edges: int

    @cached_property
    def devices(self) -> slice:
        return slice(0, self.num_pools)

    @cached_property
    def out(self) -> slice:
        """Seconds at which the first hand-over, the middle and the last item of a step are finished."""
        return slice(self.num_pools, self.num_pools + NUM_OUT)

    @cached_property
    def first(self) -> int:
        return self.num_pools

    @cached_property
    def last(self) -> int:
        return self.num_pools + NUM_OUT - 1

    @cached_property
    def half(self) -> int:
        """Seconds from the arrival of the second half of the inputs at an idle part until it is finished."""
        return self.last + 1

    @cached_property
    def tail(self) -> int:
        """Seconds from the arrival of the last input at an idle part until it is finished."""
        return self.half + 1

    @cached_property
    def period(self) -> int:
        """Seconds between the ends of consecutive steps without gaps: the computing time of the busiest device. Equals
        the last of the times if steps may not overlap (`max_staleness` 0)."""
        return self.tail + 1

    @cached_property
    def further(self) -> int:
        """Seconds that each further step adds if the part begins several together."""
        return self.period + 1

    @cached_property
    def held(self) -> int:
        """Seconds by which a step is delayed if the maximum number of steps begins together: an earlier stage on shared
        devices then processes all of them before it releases the devices."""
        return self.period + 2

    @cached_property
    def spaced(self) -> int:
        """Seconds between steps from which on they do not delay each other: each has left the parts that share devices
        before the next one arrives."""
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
