"""Plans as local search changes them: for each stage a placement, whose devices are a set of bits.

Sets of devices are integers, so that the intersection of any number of devices is one operation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rlinf_sched.plan import Mode, Plan, StagePlan
from rlinf_sched.problem import Problem


class StagePlacement(NamedTuple):
    """The placement of a stage."""

    devices: int
    """Bit i: device i. 0: it runs on the host."""
    num_ranks: int
    granularity: int
    offload: bool
    turn: int = 0
    """Position of its turn among turns whose order the flow does not determine; equal ones keep the flow's order."""


Placements = tuple[StagePlacement, ...]
"""The placements of a plan, in the order of the flow's stages."""


class Share(NamedTuple):
    """Devices of one pool with the same stages."""

    devices: int
    stages: int
    """Bit s: stage s."""
    pool: int


def bits_of(devices: Iterable[int]) -> int:
    """The set of these devices."""
    indices = np.fromiter(devices, dtype=np.int64)
    if not len(indices):
        return 0
    is_in = np.zeros(int(indices.max()) + 1, dtype=np.uint8)
    is_in[indices] = 1
    return int.from_bytes(np.packbits(is_in, bitorder="little").tobytes(), "little")


@functools.lru_cache(maxsize=4096)
def devices_of(bits: int) -> tuple[int, ...]:
    """The devices of a set, ascending."""
    data = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), dtype=np.uint8)
    return tuple(np.flatnonzero(np.unpackbits(data, bitorder="little")).tolist())


@functools.lru_cache(maxsize=1 << 14)
def first_of(bits: int, count: int) -> int:
    """The first `count` devices of a set; all of them, if there are fewer."""
    low, high = 0, bits.bit_length()
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if (bits & ((1 << middle) - 1)).bit_count() >= count else (middle + 1, high)
    return bits & ((1 << low) - 1)


def last_of(bits: int, count: int) -> int:
    """The last `count` devices of a set."""
    return bits & ~first_of(bits, max(0, bits.bit_count() - count))


def shares_of(placements: Placements, pools: Sequence[int]) -> list[Share]:
    """Groups all devices by the stages on them; `pools` are the device sets of the pools."""
    shares = [(devices, 0, pool) for pool, devices in enumerate(pools)]
    for s, placement in enumerate(placements):
        mine, halves = placement.devices, []
        for devices, stages, pool in shares if mine else ():
            here = devices & mine
            if here:
                halves.append((here, stages | 1 << s, pool))
            if here != devices:
                halves.append((devices ^ here, stages, pool))
        shares = halves or shares
    return [Share._make(share) for share in shares]


def placements_of(problem: Problem, plan: Plan) -> Placements:
    """The placements of a plan's stages."""
    placed = [plan.stage(stage.name) for stage in problem.flow.stages]
    return tuple(
        StagePlacement(bits_of(one.devices), one.num_ranks, one.granularity, one.offload, one.turn) for one in placed
    )


def plan_of(problem: Problem, placements: Placements, mode: Mode, reason: str) -> Plan:
    """The plan with these placements. In a cycle whose items are divided over instances, a stage hands over at most the
    items of one instance, otherwise it would wait forever."""
    placement_of = {stage.name: placement for stage, placement in zip(problem.flow.stages, placements, strict=True)}
    for stage in (problem.flow.stage(name) for cycle in problem.flow.cycles() for name in cycle):
        if stage.num_parts:
            placement = placement_of[stage.name]
            most = problem.num_items // placement.num_ranks
            placement_of[stage.name] = placement._replace(granularity=min(placement.granularity, most))
    turns = sorted(problem.flow.turns(), key=lambda names: placement_of[names[0]].turn)
    turn_of = {name: turn for turn, names in enumerate(turns) for name in names}
    stages = [stage_plan(name, placement, turn_of[name]) for name, placement in placement_of.items()]
    return Plan(
        flow=problem.flow.name, mode=mode, stages=tuple(sorted(stages, key=lambda one: one.turn)), reason=reason
    )


def stage_plan(name: str, placement: StagePlacement, turn: int = 0) -> StagePlan:
    return StagePlan(
        stage=name,
        devices=devices_of(placement.devices),
        num_ranks=placement.num_ranks,
        granularity=placement.granularity,
        offload=placement.offload,
        turn=turn,
    )
