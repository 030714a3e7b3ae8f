"""Times of one stage on its own: when its first, middle and last items are finished.

All of a step's items are ready at time 0, in their order of arrival. Costs of unequal items are the typical ones
(`ItemCosts.typical`), so nothing here is random. Instances behave as in the executor: each takes the next hand-over
when it is free.
"""

import functools
from collections.abc import Sequence
from typing import get_args

import numpy as np

from rlinf_sched.profile import Batching, InstanceProfile, seconds_table

FRACTIONS = (0.0, 0.5, 1.0)
"""Fractions of a step's items at which a stage, or a part of a flow, is described: the time when that many are
finished. 0 is the first hand-over."""
_BATCHINGS: tuple[Batching, ...] = get_args(Batching)
"""The kinds of batching; the native code identifies each by its index here."""


def hand_over_size(num_items: int, num_instances: int, granularity: int, max_items: int) -> int:
    """Items that an instance takes at a time: the granularity, its even share of the step and its limit, if lower."""
    size = min(granularity or num_items, -(-num_items // num_instances))
    return min(size, max_items) if max_items else size


def items_at_once(
    instance: InstanceProfile, batching: Batching, *, num_items: int, num_instances: int, granularity: int
) -> int:
    """Maximum items of a step that an instance holds at a time: a hand-over, or the capacity of its engine."""
    if batching == "continuous":
        granularity = 0
    return hand_over_size(num_items, num_instances, granularity, instance.max_items)


def handed_over(
    instance: InstanceProfile, batching: Batching, *, num_items: int, num_instances: int, granularity: int
) -> int:
    """Items per hand-over of an instance; an engine's limit bounds its running items, not its hand-overs."""
    limit = 0 if batching == "continuous" else instance.max_items
    return hand_over_size(num_items, num_instances, granularity, limit)


def stage_times(
    instance: InstanceProfile,
    batching: Batching,
    costs: np.ndarray,
    num_instances: Sequence[int] | np.ndarray,
    granularity: Sequence[int] | np.ndarray,
    *,
    num_steps: int = 1,
) -> np.ndarray:
    """Times at which a step's items leave a stage, for each number of instances and its granularity.

    Args:
        costs: float64 [num_items], the cost of each item in order of arrival; their mean is 1.
        num_instances, granularity: int [m]; fast if equal granularities (continuous: numbers of instances) are
            adjacent.
        num_steps: number of steps that may begin together.

    Returns:
        float64 [m, len(FRACTIONS) + 4], seconds. First one column per entry of `FRACTIONS`: the time at which that
        fraction of the items has left, the last one including the instance's `step_s`. Then the time of an idle stage
        from the arrival of the second half of the items to the end, and from the arrival of the last hand-over to the
        end. Then the period: the time of a step if the next one's items are ready too, so that no instance is ever
        idle. Last, the time that each further step adds if `num_steps` begin together.
    """
    counts = np.asarray(num_instances, dtype=np.int32)
    sizes = np.minimum(granularity, -(-len(costs) // counts)).astype(np.int32)
    if instance.max_items:
        sizes = np.minimum(sizes, instance.max_items)
    times = _times(instance, batching, costs.tobytes(), counts.tobytes(), sizes.tobytes(), num_steps)
    out, tail, steps = times[:, :-3], times[:, -3:-2], times[:, -2:]
    share = costs[len(costs) // 2 :].sum() / costs.sum()  # of the work, at an even pace after the first hand-over
    half = out[:, :1] + share * (out[:, -1:] - out[:, :1])
    return np.hstack([out[:, :-1], np.hstack([out[:, -1:], half, tail, steps]) + instance.step_s])


@functools.lru_cache(maxsize=256)
def _times(
    instance: InstanceProfile, batching: Batching, costs: bytes, num_instances: bytes, sizes: bytes, num_steps: int
) -> np.ndarray:
    """The times without `step_s`.

    Arrays are passed as bytes, which the cache compares quickly: similar problems are planned one after the other.
    """
    from rlinf_sched import _C  # the package imports without it

    counts, of_items = np.frombuffer(num_instances, dtype=np.int32), np.frombuffer(costs)
    most = -(-len(of_items) // int(counts.min(initial=len(of_items))))
    times = _C.stage_times(
        batching=_BATCHINGS.index(batching),
        seconds=seconds_table(instance, min(instance.max_items or most, most)),
        costs=of_items,
        max_items=instance.max_items,
        num_steps=num_steps,
        fractions=FRACTIONS,
        num_instances=counts,
        sizes=np.frombuffer(sizes, dtype=np.int32),
    )
    times.flags.writeable = False
    return times
