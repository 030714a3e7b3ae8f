"""Pools of equal devices, and the numbers of instances to try in each."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlinf_sched.cluster import Cluster

ALL_COUNTS_UP_TO = 64
"""Every number of instances is tried in a pool of at most this size; in larger ones, those that the profile lists,
those at which the number of rounds of hand-overs drops, powers of two, and the largest."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Indistinguishable devices."""

    name: str
    is_default: bool
    """Whether stages that name no device may go there."""
    devices: tuple[int, ...]
    memory_bytes: int

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def takes(self, device_name: str) -> bool:
        """Whether a profile for that device ("" for any) applies to this pool."""
        return self.is_default if not device_name else self.name == device_name


def pools_of(cluster: Cluster) -> list[Pool]:
    """Groups the cluster's devices by kind, product and memory; slots of one CPU count as one product."""
    default = set(cluster.compute_devices)
    groups: dict[tuple[str, str, int], list[int]] = {}
    for device in cluster.devices:
        groups.setdefault((device.kind, device.product, device.memory_bytes), []).append(device.index)
    return [Pool(name, indices[0] in default, tuple(indices), memory) for (_, name, memory), indices in groups.items()]


def device_counts(
    available: int,
    *,
    num_items: int,
    sizes: tuple[int, ...],
    most: int,
    num_parts: int = 0,
    exactly: float = 0,
    listed: Iterable[int] = (),
) -> Iterator[int]:
    """Numbers of instances to try, ascending.

    Args:
        available: maximum number that the pool can hold.
        sizes: granularities; with a finer one more instances can work concurrently.
        most: the profile's own limit, 0 for none.
        num_parts: only its divisors; 0: any number.
        exactly: only this many, 0: any; yields nothing if it is not an integer.
        listed: the profile's numbers, always tried if they fit.
    """
    limit = min(available, most or available)  # more instances than hand-overs still divide sharded state
    if exactly:
        if exactly == int(exactly) and exactly <= limit and not (num_parts and num_parts % exactly):
            yield int(exactly)
        return
    if num_parts:
        yield from (count for count in range(1, min(limit, num_parts) + 1) if num_parts % count == 0)
        return
    if limit <= ALL_COUNTS_UP_TO:
        yield from range(1, limit + 1)
        return
    counts = {limit, *listed} | {1 << power for power in range(limit.bit_length())}
    for size in sizes:
        num_hand_overs = -(-num_items // size)
        rounds = 1
        while rounds <= num_hand_overs and len(counts) < 4096:
            counts.add(-(-num_hand_overs // rounds))
            rounds = max(rounds + 1, math.ceil(rounds * 1.05))
    yield from sorted(count for count in counts if 1 <= count <= limit)


def host_instances(most: int, num_items: int, num_parts: int = 0) -> Iterator[int]:
    """One, two, four, ... host processes, up to the profile's limit (0: one per item), or the divisors of `num_parts`
    up to there."""
    count, limit = 1, min(most or num_items, num_items)
    if num_parts:
        yield from (count for count in range(1, limit + 1) if num_parts % count == 0)
        return
    while count < limit:
        yield count
        count *= 2
    yield limit
