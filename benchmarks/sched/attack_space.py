"""The plans that attack.py seeks among: held, counted and timed in another way than the planner's own.

A plan is what the runtime can execute: hand-overs that the flow lists, or of any size where it lists none; a worker
group on one product, on any of its devices; any number of host processes; every legal order of turns. Problems that pin
devices or forbid offload are not meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlinf_sched import InstanceProfile, Plan, Problem, SchedError, StagePlan, simulate

HOPELESS = 1.35
"""A plan is not timed if its busiest device computes for so many times the step to beat, were items alike."""

Blocks = dict[frozenset[str], int]


@dataclass(slots=True)
class State:
    """A plan as it is changed: devices are told apart only by the worker groups on them."""

    blocks: list[Blocks]
    """Of each pool (devices of one product and memory), in the order of its devices: worker groups -> how many devices
    have just these."""
    pool: dict[str, int]
    width: dict[str, int]
    """Worker group -> devices that an instance spans."""
    offload: dict[str, bool]
    items: dict[str, int]
    """Stage -> items per hand-over; as many as there are is the whole batch."""
    hosts: dict[str, int]
    """Worker group on the host -> processes."""
    order: list[int]
    """The flow's turns, by number, as they come."""

    def copy(self) -> State:
        blocks = [dict(of_pool) for of_pool in self.blocks]
        fields = (dict(self.pool), dict(self.width), dict(self.offload), dict(self.items), dict(self.hosts))
        return State(blocks, *fields, list(self.order))

    def num_devices(self, group: str) -> int:
        return sum(count for groups, count in self.blocks[self.pool[group]].items() if group in groups)

    def clear(self, group: str) -> None:
        """Takes the group off all devices."""
        for blocks in self.blocks:
            for groups in list(blocks):
                if group in groups:
                    shift(blocks, groups, groups - {group}, blocks[groups])


def shift(blocks: Blocks, source: frozenset[str], target: frozenset[str], count: int) -> None:
    """So many devices with the groups of `source` get those of `target` instead."""
    blocks[source] -= count
    blocks[target] = blocks.get(target, 0) + count
    for groups in (source, target):
        if not blocks.get(groups, 1):
            del blocks[groups]


@dataclass(slots=True)
class Space:
    """The plans of a problem."""

    problem: Problem
    pools: list[list[int]] = field(default_factory=list)
    """Indices of the devices of each product and memory."""
    turn_of: dict[str, int] = field(default_factory=dict)
    successors: list[set[int]] = field(default_factory=list)
    """Turn -> those that may only come after it."""
    together: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Stage of a cycle -> all of its cycle."""
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Worker groups on devices -> their stages."""
    widths: dict[str, list[list[int]]] = field(default_factory=dict)
    """Worker group on devices -> for each pool the devices that an instance may span there."""
    partners: dict[str, list[str]] = field(default_factory=dict)
    """Worker group on devices -> the others in a cycle with it."""
    most_hosts: dict[str, int] = field(default_factory=dict)
    """Worker group on the host -> most processes."""
    simulated_s: dict[tuple[StagePlan, ...], float] = field(default_factory=dict)
    """Steps of plans that were looked at, in seconds."""

    def __post_init__(self) -> None:
        flow, devices = self.problem.flow, self.problem.cluster.devices
        by_kind: dict[tuple[str, int], list[int]] = {}
        for index in self.problem.cluster.compute_devices:
            by_kind.setdefault((devices[index].product, devices[index].memory_bytes), []).append(index)
        self.pools = list(by_kind.values())
        turns = flow.turns()
        self.turn_of = {name: i for i, turn in enumerate(turns) for name in turn}
        self.successors = [
            {self.turn_of[after] for name in turn for after in flow.successors()[name]} - {i}
            for i, turn in enumerate(turns)
        ]
        self.together = {name: cycle for cycle in flow.cycles() for name in cycle}
        for group, names in flow.workers.items():
            if flow.stage(names[0]).needs_device:
                self.groups[group] = names
                self.widths[group] = [self._widths(names, pool) for pool in self.pools]
            else:
                most = min(self.problem.profile(name).max_instances or self.problem.num_items for name in names)
                self.most_hosts[group] = min(most, self.problem.num_items)
        for group, names in self.groups.items():
            met = {flow.stage(other).worker for name in names for other in self.together.get(name, ())}
            self.partners[group] = [other for other in self.groups if other in met and other != group]

    def _widths(self, names: Sequence[str], pool: Sequence[int]) -> list[int]:
        product = self.problem.cluster.devices[pool[0]].product
        devices_per_rank = self.problem.flow.devices_per_rank(self.problem.flow.stage(names[0]).worker)
        spans = [
            {one.num_devices for one in self.problem.profile(name).instances if one.device_name in ("", product)}
            for name in names
        ]
        return sorted(span for span in set.intersection(*spans) if span == (devices_per_rank or span))

    def pools_for(self, group: str) -> list[int]:
        return [pool for pool, widths in enumerate(self.widths[group]) if widths]

    def is_free(self, stage: str) -> bool:
        """Whether hand-overs may have any size."""
        record = self.problem.flow.stage(stage)
        return not record.whole_batch and not record.granularities

    def plan_of(self, state: State) -> Plan:
        devices: dict[str, list[int]] = {group: [] for group in self.groups}
        for pool, blocks in zip(self.pools, state.blocks, strict=True):
            first = 0
            for groups, count in blocks.items():
                for group in groups:
                    devices[group] += pool[first : first + count]
                first += count
        position = {turn: i for i, turn in enumerate(state.order)}
        stages = []
        for stage in self.problem.flow.stages:
            group, on_devices, size = stage.worker, stage.worker in self.groups, state.items[stage.name]
            whole = size >= self.problem.num_items and stage.name not in self.together
            stage_plan = StagePlan(
                stage=stage.name,
                devices=tuple(sorted(devices[group])) if on_devices else (),
                num_ranks=len(devices[group]) // state.width[group] if on_devices else state.hosts[group],
                granularity=0 if whole else size,
                offload=on_devices and state.offload[group],
                turn=position[self.turn_of[stage.name]],
            )
            stages.append(stage_plan)
        return Plan(flow=self.problem.flow.name, mode="hybrid", stages=tuple(stages), reason="attack")

    def state_of(self, plan: Plan) -> State | None:
        """A plan as a state; None where a worker group has devices of several pools."""
        where: dict[str, set[int]] = {}
        state = State([{} for _ in self.pools], {}, {}, {}, {}, {}, [])
        turns: dict[int, int] = {}
        for stage in plan.stages:
            group = self.problem.flow.stage(stage.stage).worker
            state.items[stage.stage] = stage.granularity or self.problem.num_items
            turns[self.turn_of[stage.stage]] = stage.turn
            if not stage.devices:
                state.hosts[group] = stage.num_ranks
                continue
            where[group] = set(stage.devices)
            pools = [i for i, pool in enumerate(self.pools) if where[group] & set(pool)]
            if len(pools) > 1:
                return None
            state.pool[group], state.offload[group] = pools[0], stage.offload
            state.width[group] = max(1, len(stage.devices) // stage.num_ranks)
        for blocks, pool in zip(state.blocks, self.pools, strict=True):
            for device in pool:
                groups = frozenset(group for group, devices in where.items() if device in devices)
                blocks[groups] = blocks.get(groups, 0) + 1
        state.order = sorted(turns, key=lambda turn: (turns[turn], turn))
        return state

    # -- what is counted ----------------------------------------------------------------------------------------------

    def at_once(self, stage: StagePlan, instance: InstanceProfile) -> int:
        """Items that an instance has at once."""
        share = -(-self.problem.num_items // stage.num_ranks)
        continuous = self.problem.profile(stage.stage).batching == "continuous"
        size = share if continuous or not stage.granularity else min(stage.granularity, share)
        return min(size, instance.max_items or size)

    def busy_s(self, stage: StagePlan, instance: InstanceProfile) -> float:
        """Seconds that an instance of the stage computes, were items alike."""
        size = self.at_once(stage, instance)
        num_hand_overs = max(1.0, self.problem.num_items / (size * stage.num_ranks))
        return instance.seconds(size) * self.problem.profile(stage.stage).rounds * num_hand_overs

    def areas(self, state: State) -> dict[str, float]:
        """Worker group -> its device-seconds in a step, as if it had its whole pool."""
        areas = dict.fromkeys(self.groups, 0.0)
        for group, names in self.groups.items():
            pool, width = self.pools[state.pool[group]], state.width[group]
            ranks = len(pool) // width
            for name in names:
                stage = StagePlan(
                    stage=name,
                    devices=tuple(pool[: ranks * width]),
                    num_ranks=ranks,
                    granularity=state.items[name],
                    offload=False,
                    turn=0,
                )
                areas[group] += self.busy_s(stage, self.problem.instance(stage)) * ranks * width
        return areas

    def fits(self, state: State, stages: Mapping[str, tuple[StagePlan, InstanceProfile]]) -> bool:
        """Whether no device lacks memory for what stays on it and for its fullest turn."""
        for pool, blocks in zip(self.pools, state.blocks, strict=True):
            memory_bytes = self.problem.cluster.devices[pool[0]].memory_bytes
            for groups in blocks:
                stays, turns = 0, dict.fromkeys(self.turn_of.values(), 0)
                for group in groups:
                    for name in self.groups[group]:
                        stage, instance = stages[name]
                        held = self.problem.state_bytes(name, instance, len(stage.devices))
                        turns[self.turn_of[name]] += instance.extra_bytes(self.at_once(stage, instance))
                        if state.offload[group]:
                            turns[self.turn_of[name]] += held
                    if not state.offload[group]:
                        stays += held
                if stays + max(turns.values()) > memory_bytes:
                    return False
        return True

    def step_s(self, state: State, to_beat_s: float = math.inf) -> float:
        """Seconds of a step; infinite where the plan cannot be, or cannot come near `to_beat_s`."""
        plan = self.plan_of(state)
        if plan.stages in self.simulated_s:
            return self.simulated_s[plan.stages]
        self.simulated_s[plan.stages] = math.inf
        try:
            stages = {stage.stage: (stage, self.problem.instance(stage)) for stage in plan.stages}
            if self._busiest_s(stages) > HOPELESS * to_beat_s:
                del self.simulated_s[plan.stages]  # it may come near another
                return math.inf
            if self._has_right_counts(plan) and self.fits(state, stages):
                self.simulated_s[plan.stages] = simulate(self.problem, plan).step_s
        except SchedError:  # nothing was profiled for it, it is no valid plan, or it would stand still
            pass
        return self.simulated_s[plan.stages]

    def _busiest_s(self, stages: Mapping[str, tuple[StagePlan, InstanceProfile]]) -> float:
        busy = dict.fromkeys(range(self.problem.cluster.num_devices), 0.0)
        for stage, instance in stages.values():
            seconds = self.busy_s(stage, instance)
            for device in stage.devices:
                busy[device] += seconds
        return max(busy.values())

    def _has_right_counts(self, plan: Plan) -> bool:
        most = ((stage.num_ranks, self.problem.profile(stage.stage).max_instances) for stage in plan.stages)
        return all(count <= (limit or count) for count, limit in most)
