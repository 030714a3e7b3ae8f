"""The duration of a cycle whose stages pass chunks of items around.

Asymptotic bounds of a closed network with deterministic times. They equal the simulated time for one block, and for two
stages with equally many ranks; with unequal numbers, chunks meet busy ranks, and the simulated time is up to a fifth
longer. For three stages in several blocks they are estimates, not bounds. A device with the first and the last stage
can work on other chunks while one is elsewhere, which saves up to a tenth; chunks that wait for each other on a device
that several stages share take up to four fifths longer. If instances have unequal shares, the busiest one decides, and
items that do not fill a hand-over wait for those of the next round, which is an estimate too.
Source: P. J. Denning, J. P. Buzen, "The operational analysis of queueing network models", ACM Computing Surveys 10(3),
1978.
"""

from collections.abc import Sequence

import numpy as np

from rlinf_sched.planner.places import Blocks, ChosenPlaces
from rlinf_sched.problem import Problem
from rlinf_sched.profile import InstanceProfile, ItemCosts
from rlinf_sched.stage_time import FRACTIONS, hand_over_size


def cycle_times(problem: Problem, chosen: Sequence[ChosenPlaces], blocks: Blocks, granularity: int) -> np.ndarray:
    """float64 [rows, len(FRACTIONS) + 4], seconds: when these fractions of the items leave the last round, how long the
    second half and the last of them take in an idle cycle, how long a step takes if the next one's items are ready, and
    what each further step adds."""
    links = problem.cluster.links
    moved = sum(
        links.latency_s + granularity * problem.flow.item_bytes.get(channel, 0) / links.node_bytes_per_s
        for stage in chosen
        for channel in problem.flow.stage(stage.places.stage).reads
    )
    of_places = [
        of_busiest(problem, places.stage, places.instance, places.num_instances, granularity)
        for places in (stage.places for stage in chosen)
    ]
    seconds = [times[stage.index] for times, stage in zip(of_places, chosen, strict=True)]  # [rows, 3] each
    rounds = max(problem.profile(stage.places.stage).rounds for stage in chosen)
    step_s = max(stage.places.instance.step_s for stage in chosen)
    latency = sum(one[:, 0] for one in seconds) + (moved if len(blocks) > 1 else 0.0)
    of_blocks = np.stack([sum(seconds[i] for i in block) for block in blocks])  # [blocks, rows, 3]
    round_s = latency * np.max([one[:, 2] for one in seconds], axis=0)
    if problem.num_items > granularity:
        round_s = np.maximum(round_s, of_blocks[:, :, 1].max(axis=0))
    one_pass = latency + (of_blocks[:, :, 1] - of_blocks[:, :, 0]).max(axis=0)
    first, last = (rounds - 1) * round_s + latency, (rounds - 1) * round_s + one_pass
    period = (rounds - 1) * round_s + of_blocks[:, :, 1].max(axis=0)  # the first round of a step fills the last one up
    out = np.linspace(first, last, len(FRACTIONS), axis=1)
    out[:, -1] += step_s
    return np.column_stack([out, np.column_stack([(first + last) / 2, rounds * latency, period, period]) + step_s])


def of_busiest(
    problem: Problem, stage: str, instance: InstanceProfile, counts: np.ndarray, granularity: int
) -> np.ndarray:
    """The timing of one stage of a cycle in a round, for each number of instances.

    Example: 40 items of 1 s each, by key, in chunks of 16. One instance: (16.0, 40.0, 1.25); two: (16.0, 20.0, 1.25);
    three, of which the busiest has 14 items: (14.0, 14.0, 1.0).

    Returns:
        float64 [counts, 3]: seconds of one hand-over; of all hand-overs of the instance with most, if rounds follow
        each other without gaps; and the factor by which a round is longer because items that do not fill a hand-over
        wait for those of the next round.
    """
    profile, num_items = problem.profile(stage), problem.num_items
    by_key = problem.flow.stage(stage).dispatch == "key"
    result = np.ones((len(counts), 3))
    for i, count in enumerate(counts.tolist()):
        share = -(-num_items // count)
        if profile.batching == "continuous":
            room = min(share, instance.max_items or share)
            once, times = instance.seconds(room), -(-share // (instance.max_items or share))
        else:
            size = hand_over_size(num_items, count, granularity, instance.max_items)
            longest = _mean_longest(profile.costs, num_items, size) if profile.batching == "longest" else 1.0
            in_queue = share if by_key else num_items
            at_once = in_queue // size  # hand-overs of a queue that are full
            once = instance.seconds(size) * longest
            times = in_queue / size / (1 if by_key else min(count, at_once))
            result[i, 2] = in_queue / size / at_once
        result[i, :2] = once, once * times
    return result


def _mean_longest(costs: ItemCosts, num_items: int, size: int) -> float:
    """Mean over hand-overs of the largest cost in each."""
    typical = costs.typical(num_items)
    whole = typical[: num_items // size * size].reshape(-1, size)
    return float(whole.max(axis=1).mean())
