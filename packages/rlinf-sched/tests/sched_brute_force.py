"""The best plan by trying everything: no bounds and no tolerance, joins as docs/scheduling.md has them.

With `prune`, candidates of a part are dropped that another is as good as in every number, and those that cannot be in a
plan as short as one known; of the rest all joins are tried.
"""

from collections.abc import Iterator
from itertools import combinations
from math import exp, inf

import numpy as np
from sched_brute_force_turns import Option, options_of

from rlinf_sched.problem import Problem

DEVICES, FIRST, MIDDLE, LAST, HALF, TAIL, PERIOD, FURTHER, HELD, SPACED, SYNC, OFFLOADS, RESIDENT, PEAK, RECEIVED = (
    range(15)
)
"""Rows of an array of candidates, which has a column for each; from `RECEIVED` on, a row for each weight edge."""
NUM_PAIRS = 50_000
"""Pairs of candidates that are joined at a time."""
IN_SHORT = [DEVICES, LAST, PERIOD, OFFLOADS, RESIDENT, PEAK]
"""Enough to find a good plan by, if not the best."""
Turns = frozenset[int]


def least_step_s(problem: Problem, *, prune: bool = False) -> float | None:
    """Seconds of the shortest step among all plans that fit; None when none does."""
    if not prune:
        return BruteForce(problem).least_step_s()
    known_s = BruteForce(problem, compared=IN_SHORT).least_step_s()
    everything = list(range(RECEIVED + len(problem.flow.weight_edges)))
    return BruteForce(problem, compared=everything, bound_s=inf if known_s is None else known_s).least_step_s()


def undominated(candidates: np.ndarray, compared: list[int]) -> np.ndarray:
    """The candidates to which no other is as good in all of these rows; one of several equal ones."""
    rest = candidates[compared]
    scale = np.maximum(rest.max(axis=1, initial=0.0), 1e-9)[:, None]
    order = np.argsort((rest / scale).sum(axis=0))  # nothing comes before what is better
    rest, front = rest[:, order], []
    while len(order):
        front.append(order[0])
        stays = (rest < rest[:, :1]).any(axis=0)
        rest, order = rest[:, stays], order[stays]
    return candidates[:, front]


class BruteForce:
    """Every way to take one flow apart.

    Args:
        compared: rows in which to compare; None: all candidates are kept.
        bound_s: only plans that take no longer.
    """

    def __init__(self, problem: Problem, *, compared: list[int] | None = None, bound_s: float = inf) -> None:
        flow = self.flow = problem.flow
        self.problem, self.links, self.compared = problem, problem.cluster.links, compared
        self.bound_s = bound_s * (1 + 1e-9)
        self.total, self.memory = problem.cluster.num_devices, problem.cluster.devices[0].memory_bytes
        self.turns = flow.turns()
        turn_of = {name: i for i, names in enumerate(self.turns) for name in names}
        followers = [(turn_of[a], turn_of[b]) for a, others in flow.successors().items() for b in others]
        self.feeding = {(a, b) for a, b in followers if a != b}
        self.fed = {b for _, b in self.feeding}
        self.edges = [
            (turn_of[flow.workers[edge.source][0]], turn_of[flow.workers[edge.target][0]]) for edge in flow.weight_edges
        ]
        self.channels = [
            ({turn_of[name] for name in flow.writers(channel)}, {turn_of[name] for name in flow.readers(channel)}, size)
            for channel, size in flow.item_bytes.items()
        ]
        options = [options_of(problem, names) for names in self.turns]
        self.more = flow.max_staleness
        self.least_area = [min((one.devices * one.period for one in some), default=inf) for some in options]
        least_s = sum(self.least_area) / self.total
        self.load = [min((one.instances * one.period for one in some), default=inf) / least_s for some in options]
        """Instances of each turn that would compute at a time if the step took `least_s`."""
        memory_matters = sum(max((one.peak for one in some), default=0) for some in options) > self.memory
        self.known = {}
        for i, some in enumerate(options):
            candidates = _array(some, len(self.edges))
            if compared and not memory_matters:
                candidates[[RESIDENT, PEAK]] = 0.0
            self.known[frozenset([i])] = self.reduced([self.fitting(candidates, frozenset([i]))])

    def least_step_s(self) -> float | None:
        everything, least = frozenset(range(len(self.turns))), inf
        if len(everything) == 1:
            whole = self.known[everything]
            least = self.step_s(whole).min(initial=inf)
        for before, after in self.cuts(everything):
            for a, b in self.pairs(before, after):
                for whole in self.joins(a, b, before, after):
                    step_s = self.step_s(whole)
                    fits = (whole[DEVICES] <= self.total) & (whole[PEAK] <= self.memory)
                    least = min(least, step_s[fits].min(initial=inf))
        return float(least) if least < inf else None

    def step_s(self, whole: np.ndarray) -> np.ndarray:
        """From the end of a step to that of the next: no device is faster than its work, and no more steps are under
        way than may be."""
        if not self.more:
            return whole[LAST] + whole[SYNC]
        together_s = (whole[LAST] + whole[HELD] + whole[SYNC]) / (self.more + 1)
        spaced_s = np.maximum((whole[LAST] + whole[SYNC]) / (self.more + 1), whole[SPACED])
        round_s = np.minimum(together_s, spaced_s)
        busy_s = whole[PERIOD] + np.where(whole[OFFLOADS] > 0, whole[SYNC] / (self.more + 1), 0.0)
        return np.max([busy_s, whole[SYNC], round_s], axis=0)

    # -- parts -------------------------------------------------------------------------------------------------------

    def parts(self, turns: Turns) -> np.ndarray:
        """The candidates for these turns that fit."""
        if turns not in self.known:
            candidates: list[np.ndarray] = []
            for before, after in self.cuts(turns):
                for a, b in self.pairs(before, after):
                    candidates += [self.fitting(joined, turns) for joined in self.joins(a, b, before, after)]
                    if sum(some.shape[1] for some in candidates) > 4 * NUM_PAIRS:
                        candidates = [self.reduced(candidates)]
            self.known[turns] = self.reduced(candidates)
        return self.known[turns]

    def cuts(self, turns: Turns) -> Iterator[tuple[Turns, Turns]]:
        for size in range(1, len(turns)):
            for chosen in combinations(sorted(turns), size):
                before, after = frozenset(chosen), turns - frozenset(chosen)
                if not any((b, a) in self.feeding for a in before for b in after):
                    yield before, after

    def pairs(self, before: Turns, after: Turns) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Every candidate with every one, side by side in arrays of equal shape."""
        left, right = self.parts(before), self.parts(after)
        at_once = max(1, NUM_PAIRS // max(1, right.shape[1]))
        for start in range(0, left.shape[1], at_once):
            some = left[:, start : start + at_once]
            yield np.repeat(some, right.shape[1], axis=1), np.tile(right, some.shape[1])

    def fitting(self, candidates: np.ndarray, turns: Turns) -> np.ndarray:
        """The candidates that may be part of a plan within the bound. Parts are rectangles of devices and seconds."""
        area = candidates[DEVICES] * candidates[PERIOD] + sum(
            self.least_area[i] for i in range(len(self.turns)) if i not in turns
        )
        fits = (candidates[DEVICES] <= self.total) & (candidates[PEAK] <= self.memory)
        quick = (self.step_s(candidates) <= self.bound_s) & (area <= self.bound_s * self.total)
        return candidates[:, fits & quick]

    def reduced(self, candidates: list[np.ndarray]) -> np.ndarray:
        together = np.concatenate([np.zeros((RECEIVED + len(self.edges), 0)), *candidates], axis=1)
        if self.compared:
            return undominated(together, self.compared)
        return np.unique(together, axis=1) if together.size else together

    # -- joins -------------------------------------------------------------------------------------------------------

    def joins(self, a: np.ndarray, b: np.ndarray, before: Turns, after: Turns) -> Iterator[np.ndarray]:
        """The joins of two parts; not all of them fit."""
        yield self.in_turn(a, b, before, after)
        yield self.side_by_side(a, b, before, after)
        if self.feeds(before, after) and before <= self.fed:
            stays = (a[OFFLOADS] == 0) & (b[OFFLOADS] == 0)
            yield self.interleaved(a[:, stays], b[:, stays], before, after)

    def feeds(self, before: Turns, after: Turns) -> bool:
        return any((a, b) in self.feeding for a in before for b in after)

    def in_turn(self, a: np.ndarray, b: np.ndarray, before: Turns, after: Turns) -> np.ndarray:
        whole = np.maximum(a, b)  # of devices and of what offloads
        for row in (FIRST, MIDDLE, LAST):
            whole[row] = a[LAST] + b[row]
        for row in (HALF, TAIL):
            whole[row] = a[row] + b[LAST]
        whole[FURTHER] = a[FURTHER] + b[FURTHER]
        whole[HELD] = self.more * a[FURTHER] + b[HELD]  # the first step waits for the part before to be done with all
        whole[PERIOD] = (whole[LAST] + self.more * whole[FURTHER]) / (self.more + 1)
        whole[SPACED] = whole[LAST]  # further apart, steps do not meet on the devices
        whole[RESIDENT] = a[RESIDENT] + b[RESIDENT]
        whole[PEAK] = np.maximum(a[PEAK] + b[RESIDENT], a[RESIDENT] + b[PEAK])
        self.sync(whole, a, b, before, after, near=True)
        return whole

    def interleaved(self, a: np.ndarray, b: np.ndarray, before: Turns, after: Turns) -> np.ndarray:
        """The part after gets the devices when all of the part before are idle at once."""
        whole = self.in_turn(a, b, before, after)
        whole[FIRST : LAST + 1] = a[FIRST : LAST + 1] + b[FIRST : LAST + 1]
        whole[SPACED] = whole[LAST]
        starved = min(1.0, (exp(sum(self.load[i] for i in before)) - 1) / self.problem.num_items)
        for row in (HALF, TAIL):
            whole[row] = a[row] + np.maximum(b[row], b[row] * (1 - starved) + b[LAST] * starved)
        return whole

    def side_by_side(self, a: np.ndarray, b: np.ndarray, before: Turns, after: Turns) -> np.ndarray:
        whole = np.maximum(a, b)  # of memory, of what offloads, and of times where neither feeds the other
        whole[DEVICES] = a[DEVICES] + b[DEVICES]
        if self.feeds(before, after):
            crossing = [size for writers, readers, size in self.channels if writers & before and readers & after]
            moved_s = self.links.latency_s + max(crossing, default=0) / self.rate(near=False)
            whole[FIRST] = a[FIRST] + b[FIRST]
            whole[MIDDLE] = np.maximum(a[MIDDLE] + b[FIRST], a[FIRST] + b[MIDDLE])
            whole[LAST] = np.maximum(np.maximum(a[LAST] + b[TAIL], a[MIDDLE] + b[HALF]), a[FIRST] + b[LAST])
            whole[HALF] = np.maximum(a[HALF] + b[TAIL], a[FIRST] + b[HALF])
            whole[TAIL] = a[TAIL] + b[TAIL]
            whole[FIRST : TAIL + 1] += moved_s
            whole[HELD] = a[HELD] + b[HELD]
        whole[FURTHER] = np.maximum(whole[FURTHER], whole[PERIOD])
        if not self.more:
            whole[PERIOD] = whole[LAST]
        self.sync(whole, a, b, before, after, near=False)
        return whole

    def sync(self, whole: np.ndarray, a: np.ndarray, b: np.ndarray, before: Turns, after: Turns, *, near: bool) -> None:
        """Sets the seconds of the syncs so far, and the bytes that are still to be sent over each weight edge."""
        whole[SYNC] = a[SYNC] + b[SYNC]
        for row, ends in enumerate(self.edges, RECEIVED):
            whole[row] = np.maximum(a[row], b[row])
            if before.intersection(ends) and after.intersection(ends):
                whole[SYNC] += self.links.latency_s + whole[row] / self.rate(near=near)
                whole[row] = 0.0

    def rate(self, *, near: bool) -> float:
        is_near = near or self.problem.cluster.num_nodes == 1
        return self.links.node_bytes_per_s if is_near else self.links.network_bytes_per_s


def _array(options: list[Option], num_edges: int) -> np.ndarray:
    rows = [
        (
            one.devices,
            *one.out,
            one.half,
            one.tail,
            one.period,
            one.further,
            0.0,
            0.0,
            one.sync_s,
            one.offloads,
            one.resident,
            one.peak,
            *one.received,
        )
        for one in options
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, RECEIVED + num_edges).T
