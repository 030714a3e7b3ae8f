"""Placements of a stage, as arrays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlinf_sched.planner.tree import Leaf
from rlinf_sched.profile import InstanceProfile


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Places:
    """One parallelism on one pool; an entry per number of instances and granularity."""

    stage: str
    choice: int
    """Index of `instance` in the stage's profile."""
    instance: InstanceProfile
    pool: int
    """Index of the pool; -1: the host."""
    offload: bool
    num_instances: np.ndarray
    """int64 [m], at least 1."""
    granularity: np.ndarray
    """int64 [m], items per hand-over."""
    resident_bytes: np.ndarray
    """float64 [m], on each device between turns; 0 if another stage of the worker group counts them."""
    peak_bytes: np.ndarray
    """float64 [m], peak on each device."""
    onload_s: np.ndarray
    """float64 [m], seconds of an onload; 0 without offload."""
    offload_s: np.ndarray

    @property
    def num_devices(self) -> np.ndarray:
        return self.num_instances * self.instance.num_devices

    def leaf(self, i: int) -> Leaf:
        count = int(self.num_instances[i])
        return Leaf(
            stage=self.stage,
            choice=self.choice,
            pool=self.pool,
            num_instances=count,
            num_devices=count * self.instance.num_devices,
            granularity=int(self.granularity[i]),
            offload=self.offload,
        )


@dataclass(frozen=True, slots=True)
class ChosenPlaces:
    """The place of each row of options, as an index into a stage's places."""

    places: Places
    index: np.ndarray
    """int64 [rows], into `places`."""

    @property
    def num_devices(self) -> np.ndarray:
        return self.places.num_devices[self.index]

    def keep(self, rows: np.ndarray) -> "ChosenPlaces":
        return ChosenPlaces(self.places, self.index[rows])


Blocks = tuple[tuple[int, ...], ...]
"""Indices of stages; stages of one block share their devices, different blocks share none."""


def combinations(options: Sequence[Places]) -> list[ChosenPlaces]:
    """Every combination of places."""
    grid = np.indices([len(places.num_instances) for places in options]).reshape(len(options), -1)
    return [ChosenPlaces(places, index) for places, index in zip(options, grid, strict=True)]


def partitions(count: int) -> Iterator[Blocks]:
    """Every partition of this many stages into blocks that share devices."""

    def extend(i: int, blocks: Blocks) -> Iterator[Blocks]:
        if i == count:
            yield blocks
            return
        for k, block in enumerate(blocks):
            yield from extend(i + 1, (*blocks[:k], (*block, i), *blocks[k + 1 :]))
        yield from extend(i + 1, (*blocks, (i,)))

    yield from extend(0, ())


def may_share(chosen: Sequence[ChosenPlaces], blocks: Blocks) -> np.ndarray:
    """bool [rows]: whether the stages of each block have equal numbers of devices of one pool, or the block is one
    stage."""
    result = np.ones(len(chosen[0].index), dtype=bool)
    for first, *others in blocks:
        for other in others:
            one_pool = chosen[first].places.pool == chosen[other].places.pool
            same = chosen[first].num_devices == chosen[other].num_devices
            result &= one_pool & same & (chosen[first].num_devices > 0)
    return result
