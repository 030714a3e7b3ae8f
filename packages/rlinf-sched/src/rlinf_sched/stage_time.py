"""How long one stage takes on its own: the times at which its first, middle and last items come out.

All of a step's items lie ready at time 0. Costs of unequal items are the typical ones (`ItemCosts.typical`), so nothing
here is random. What instances do with them is what the executor does: each takes the next hand-over when it is free.
"""

import functools
import heapq
from dataclasses import dataclass

import numpy as np

from rlinf_sched.profile import Batching, InstanceProfile, ItemCosts

FRACTIONS = (0.0, 0.5, 1.0)
"""Of a step's items, whose time of coming out describes a stage or a part of a flow; 0: the first hand-over."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """Of one stage at one parallel choice, number of instances and granularity."""

    out_s: tuple[float, ...]
    """When so many of the items are out (`FRACTIONS`); the last includes `step_s`."""
    tail_s: float
    """From the arrival of the last hand-over at an idle stage to the end."""
    busy_s: float
    """On the busiest instance."""


def hand_over_size(num_items: int, num_instances: int, granularity: int, max_items: int) -> int:
    """Items that an instance takes at a time: the granularity, its even share of the step and its limit, if lower."""
    size = min(granularity or num_items, -(-num_items // num_instances))
    return min(size, max_items) if max_items else size


def items_at_once(
    instance: InstanceProfile, batching: Batching, *, num_items: int, num_instances: int, granularity: int
) -> int:
    """Most items of a step that an instance holds at a time: a hand-over, or what its engine has room for."""
    if batching == "continuous":
        granularity = 0
    return hand_over_size(num_items, num_instances, granularity, instance.max_items)


@functools.lru_cache(maxsize=65536)
def stage_time(
    instance: InstanceProfile,
    batching: Batching,
    costs: ItemCosts,
    *,
    num_items: int,
    num_instances: int,
    granularity: int,
) -> StageTime:
    """Of `num_items` items in hand-overs of `granularity` on `num_instances` instances."""
    size = hand_over_size(num_items, num_instances, granularity, instance.max_items)
    if batching == "continuous":
        ends = np.sort(_continuous_ends(instance, costs, num_items, num_instances))
        out = [float(ends[min(num_items, max(size, round(fraction * num_items))) - 1]) for fraction in FRACTIONS]
        return StageTime((*out[:-1], out[-1] + instance.step_s), instance.seconds(1) + instance.step_s, out[-1])
    one = instance.seconds(size)
    if costs.spread == "equal" or (batching == "sum" and size == num_items):
        ends, counts = _equal_ends(instance, num_items, num_instances, size)
    else:
        ends, counts = _list_ends(_hand_over_seconds(instance, batching, costs, num_items, size), num_instances)
        counts = np.minimum(counts * size, num_items)
    out = [float(ends[np.searchsorted(counts, fraction * num_items)]) for fraction in FRACTIONS]
    return StageTime((*out[:-1], out[-1] + instance.step_s), one + instance.step_s, out[-1] + instance.step_s)


def _equal_ends(
    instance: InstanceProfile, num_items: int, num_instances: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Times at which rounds of equal hand-overs end, and how many items are out then."""
    num_full, rest = divmod(num_items, size)
    num_rounds = -(-num_full // num_instances)
    rounds = np.arange(1, num_rounds + 1)
    ends = rounds * instance.seconds(size)
    counts = np.minimum(rounds * num_instances, num_full) * size
    if rest:  # the short hand-over goes to the instance that is free first
        free_after = num_full // num_instances
        end = free_after * instance.seconds(size) + instance.seconds(rest)
        last = max(end, float(ends[-1])) if num_rounds else end
        ends, counts = np.append(ends, last), np.append(counts, num_items)
    return ends, counts


def _hand_over_seconds(
    instance: InstanceProfile, batching: Batching, costs: ItemCosts, num_items: int, size: int
) -> np.ndarray:
    """float64 [hand-overs]: of each of a step's hand-overs, in the order in which they come."""
    typical = costs.typical(num_items)
    num_full, rest = divmod(num_items, size)
    parts = typical[: num_full * size].reshape(num_full, size)
    scale = parts.mean(axis=1) if batching == "sum" else parts.max(axis=1)
    seconds = instance.seconds(size) * scale
    if rest:
        last = typical[num_full * size :]
        seconds = np.append(seconds, instance.seconds(rest) * (last.mean() if batching == "sum" else last.max()))
    return seconds


def _list_ends(seconds: np.ndarray, num_instances: int) -> tuple[np.ndarray, np.ndarray]:
    """Ends of hand-overs taken in order by whoever is free, ascending, and 1, 2, ... beside them."""
    if num_instances >= len(seconds):
        ends = np.sort(seconds)
    elif num_instances == 1:
        ends = np.cumsum(seconds)
    else:
        free = [0.0] * num_instances
        ends = np.empty(len(seconds))
        for i, duration in enumerate(seconds):
            ends[i] = heapq.heapreplace(free, free[0] + duration) + duration
        ends = np.sort(ends)
    return ends, np.arange(1, len(ends) + 1)


def _continuous_ends(instance: InstanceProfile, costs: ItemCosts, num_items: int, num_instances: int) -> np.ndarray:
    """float64 [num_items]: when each item leaves its engine; engines admit items in turn while they have room."""
    typical = costs.typical(num_items)
    share = -(-num_items // num_instances)
    room = min(instance.max_items or share, share)
    seconds = np.array([instance.seconds(count) for count in range(1, room + 1)])
    if share <= room:
        padded = np.full(share * num_instances, np.nan)
        padded[:num_items] = typical
        work = np.sort(padded.reshape(share, num_instances).T, axis=1)  # engine e holds items e, e + engines, ...
        steps = np.diff(work, axis=1, prepend=0.0)
        inside = np.sum(~np.isnan(work), axis=1, keepdims=True) - np.arange(share)[None]
        ends = np.cumsum(np.nan_to_num(steps) * seconds[np.maximum(inside, 1) - 1], axis=1)
        return ends[~np.isnan(work)]
    return _crowded_ends(typical, seconds, num_instances)


def _crowded_ends(work: np.ndarray, seconds: np.ndarray, num_instances: int) -> np.ndarray:
    """As `_continuous_ends` where items wait for room: event by event.

    Each engine counts the progress that every item inside it has made since time 0; an item admitted at progress v
    leaves at v + its work.
    """
    room = len(seconds)
    progress, now = [0.0] * num_instances, [0.0] * num_instances
    inside: list[list[float]] = [[] for _ in range(num_instances)]
    waiting = iter(work.tolist())
    ends = []
    for _ in range(room):
        for engine in inside:
            if (item := next(waiting, None)) is not None:
                heapq.heappush(engine, item)
    leaving = [(engine[0] * seconds[len(engine) - 1], e) for e, engine in enumerate(inside) if engine]
    heapq.heapify(leaving)
    while leaving:
        end, e = heapq.heappop(leaving)
        engine = inside[e]
        progress[e], now[e] = engine[0], end
        heapq.heappop(engine)
        ends.append(end)
        if (item := next(waiting, None)) is not None:
            heapq.heappush(engine, progress[e] + item)
        if engine:
            heapq.heappush(leaving, (end + (engine[0] - progress[e]) * seconds[len(engine) - 1], e))
    return np.array(ends)
