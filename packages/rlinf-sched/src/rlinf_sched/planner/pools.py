"""Pools of equal devices, and how many of them are worth trying."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlinf_sched.cluster import Cluster

ALL_COUNTS_UP_TO = 64
"""Every number of instances is tried in a pool that holds no more than this; beyond it, those that the profile lists,
those at which the rounds of hand-overs drop, powers of two, and the largest."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that cannot be told apart."""

    name: str
    is_default: bool
    """Whether stages go there that name no device."""
    devices: tuple[int, ...]
    memory_bytes: int

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def takes(self, device_name: str) -> bool:
        """Whether a profile for that device ("" for any) speaks of this pool."""
        return self.is_default if not device_name else self.name == device_name


def pools_of(cluster: Cluster) -> list[Pool]:
    """The cluster's devices by kind, product and memory; slots of one CPU count as one product."""
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
        available: the most that the pool holds.
        sizes: granularities; with a finer one more instances can work at once.
        most: the profile's own limit, 0 for none.
        num_parts: only its divisors, 0 for any number.
        exactly: only this many, 0 for any; yields nothing where it is no whole number.
        listed: tried in any case, where they fit: those that the profile names.
    """
    limit = min(available, most or available)  # more than there are hand-overs still share what is sharded
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
    """One, two, four, ... processes on the host, up to the profile's limit (0: one for each item), or the divisors of
    `num_parts` up to there."""
    count, limit = 1, min(most or num_items, num_items)
    if num_parts:
        yield from (count for count in range(1, limit + 1) if num_parts % count == 0)
        return
    while count < limit:
        yield count
        count *= 2
    yield limit
