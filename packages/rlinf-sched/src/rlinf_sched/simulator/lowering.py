"""Lowers names and records to the flat arrays that the event core reads (csrc/sched/simulator/model.h)."""

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from rlinf_sched.errors import PlanError
from rlinf_sched.flow_graph import FlowGraph, Stage
from rlinf_sched.plan import Plan, StagePlan
from rlinf_sched.problem import Problem
from rlinf_sched.profile import InstanceProfile, ItemCosts, seconds_table
from rlinf_sched.stage_time import hand_over_size, handed_over

STAYS = -1.0
"""Replaces the onload time if the state never leaves the device."""
_BATCHINGS = ("sum", "longest", "continuous")


@dataclass(frozen=True, slots=True)
class Lowered:
    """The arrays for the core, and those for computing memory."""

    stages: tuple[str, ...]
    arrays: dict[str, np.ndarray]
    num_steps: int
    resident_bytes: np.ndarray
    """int64 [stages]: bytes on each device while the stage's state is there; counted once for a worker group that
    stays."""
    leaving: np.ndarray
    """bool [stages]: whether it offloads between its turns."""
    work_bytes: np.ndarray
    item_work_bytes: np.ndarray


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A stage with its plan and the profile of the plan's instances."""

    stage: Stage
    plan: StagePlan
    profile: InstanceProfile
    hand_over: int
    room: int
    """Maximum items in an engine: its even share of the step, or the profile's limit."""
    onload_s: float
    offload_s: float


def num_steps_of(max_staleness: int) -> int:
    """Minimum number of executed steps: if steps overlap, enough for a steady state."""
    return 12 * (max_staleness + 1) if max_staleness else 1


def lower(problem: Problem, plan: Plan, *, seed: int | None, num_steps: int) -> Lowered:
    """The arrays of a validated problem and plan.

    Raises:
        PlanError: no profile for the number of devices of an instance, or more instances than the profile allows.
    """
    flow = problem.flow
    num_steps = max(num_steps, num_steps_of(flow.max_staleness))
    placed = [lower_stage(problem, stage, plan.stage(stage.name)) for stage in flow.stages]
    profiles = [problem.profile(stage.name) for stage in flow.stages]
    tables = [
        seconds_table(p.profile, p.room if profile.batching == "continuous" else p.hand_over)
        for p, profile in zip(placed, profiles, strict=True)
    ]
    arrays: dict[str, np.ndarray] = {
        "batching": _ints(_BATCHINGS.index(profile.batching) for profile in profiles),
        "num_instances": _ints(p.plan.num_ranks for p in placed),
        "hand_over": _ints(p.hand_over for p in placed),
        "room": _ints(p.room for p in placed),
        "by_key": np.array([stage.dispatch == "key" for stage in flow.stages], dtype=np.uint8),
        "whole": np.array([p.plan.granularity == 0 for p in placed], dtype=np.uint8),
        "step_s": np.array([p.profile.step_s for p in placed]),
        "onload_s": np.array([p.onload_s for p in placed]),
        "offload_s": np.array([p.offload_s for p in placed]),
        "table_start": np.cumsum([0, *map(len, tables[:-1])]),
        "table": np.concatenate(tables),
        "costs": np.concatenate(
            [_costs(profile.costs, problem.num_items, seed, step) for step in range(num_steps) for profile in profiles]
        ),
        **_turns(problem, placed),
        **_edges(problem, placed),
        **_instance_devices(placed),
        **_cores(problem, placed),
        **_syncs(problem, plan),
    }
    first_of_group = {names[0] for names in flow.workers.values()}
    counts = [p.stage.name in first_of_group or p.plan.offload for p in placed]
    return Lowered(
        stages=tuple(stage.name for stage in flow.stages),
        arrays=arrays,
        num_steps=num_steps,
        resident_bytes=np.array(
            [
                problem.state_bytes(p.stage.name, p.profile, len(p.plan.devices)) * c
                for p, c in zip(placed, counts, strict=True)
            ],
            dtype=np.int64,
        ),
        leaving=np.array([p.plan.offload for p in placed]),
        work_bytes=np.array([p.profile.work_bytes for p in placed], dtype=np.int64),
        item_work_bytes=np.array([p.profile.item_work_bytes for p in placed], dtype=np.int64),
    )


def _ints(values: object) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)  # type: ignore[call-overload]


def lower_stage(problem: Problem, stage: Stage, stage_plan: StagePlan) -> PlacedStage:
    """A stage's placement in the form of the core; raises like `lower`."""
    profile = problem.profile(stage.name)
    num_devices, num_ranks = len(stage_plan.devices), stage_plan.num_ranks
    instance = problem.instance(stage_plan)
    if profile.max_instances and num_ranks > profile.max_instances:
        raise PlanError(
            f"plan.{stage.name}.num_ranks={num_ranks} is more than profiles.stages.{stage.name}.max_instances="
            f"{profile.max_instances}; use at most that many"
        )
    hand_over = handed_over(
        instance,
        profile.batching,
        num_items=problem.num_items,
        num_instances=num_ranks,
        granularity=stage_plan.granularity,
    )
    onload_s, offload_s = problem.switch_s(stage.name, instance, num_devices)
    leaves = stage_plan.offload and num_devices > 0
    return PlacedStage(
        stage=stage,
        plan=stage_plan,
        profile=instance,
        hand_over=hand_over,
        room=hand_over_size(problem.num_items, num_ranks, 0, instance.max_items),
        onload_s=onload_s if leaves else STAYS,
        offload_s=offload_s if leaves else STAYS,
    )


@functools.lru_cache(maxsize=256)
def _costs(costs: ItemCosts, num_items: int, seed: int | None, step: int) -> np.ndarray:
    if seed is not None:
        return costs.draw(num_items, seed, step)
    return costs.typical(num_items) if step == 0 else _costs(costs, num_items, None, 0)


# -- the flow ----------------------------------------------------------------------------------------------------------


def _turns(problem: Problem, placed: list[PlacedStage]) -> dict[str, np.ndarray]:
    """Turns in the order of the plan, then of the flow; those that share devices or offload need a lease."""
    index = {stage.name: s for s, stage in enumerate(problem.flow.stages)}
    turns = sorted(problem.flow.turns(), key=lambda names: placed[index[names[0]]].plan.turn)
    turn, rounds = np.zeros(len(placed), dtype=np.int32), np.ones(len(placed), dtype=np.int32)
    devices: list[list[int]] = []
    for t, names in enumerate(turns):
        members = [index[name] for name in names]
        turn[members] = t
        rounds[members] = max(problem.profile(name).rounds for name in names)
        devices.append(sorted({device for s in members for device in placed[s].plan.devices}))
    num_turns = np.zeros(problem.cluster.num_devices, dtype=np.int64)
    for mine in devices:
        num_turns[mine] += 1
    leaves = np.zeros(len(turns), dtype=bool)
    np.logical_or.at(leaves, turn, [p.plan.offload and bool(p.plan.devices) for p in placed])
    is_leased = np.array([leaves[t] or bool(np.any(num_turns[mine] > 1)) for t, mine in enumerate(devices)])
    return {
        "turn": turn,
        "rounds": rounds,
        "turn_is_leased": is_leased.astype(np.uint8),
        "turn_device_start": np.cumsum([0, *map(len, devices)]),
        "turn_device": _ints(itertools.chain.from_iterable(devices)),
    }


def _edges(problem: Problem, placed: list[PlacedStage]) -> dict[str, np.ndarray]:
    """One edge per pair of stages joined by channels, with its hand-over time."""
    flow, links = problem.flow, problem.cluster.links
    index = {stage.name: s for s, stage in enumerate(flow.stages)}
    turn_of = {name: names for names in flow.turns() for name in names}
    place_in_cycle = {name: _order_of_cycle(flow, names) for names in flow.cycles() for name in names}
    rows = []
    for source, targets in flow.successors().items():
        for target in targets:
            s, t = index[source], index[target]
            shared = set(placed[s].stage.writes) & set(placed[t].stage.reads)
            num_bytes = sum(flow.item_bytes.get(channel, 0) for channel in shared)
            is_back = turn_of[source] == turn_of[target] and (
                place_in_cycle[source][source] >= place_in_cycle[source][target]
            )
            here, there = placed[s].plan.devices, placed[t].plan.devices
            apart = not set(here) & set(there) and bool(here or there)
            rate = _rate(problem, {*here, *there})
            rows.append((s, t, is_back, links.latency_s * apart, num_bytes / rate * apart))
    sources, targets, back, latency, item = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return {
        "edge_source": _ints(sources),
        "edge_target": _ints(targets),
        "edge_is_back": np.array(back, dtype=np.uint8),
        "edge_latency_s": np.array(latency, dtype=np.float64),
        "edge_item_s": np.array(item, dtype=np.float64),
    }


def _order_of_cycle(flow: FlowGraph, names: tuple[str, ...]) -> dict[str, int]:
    """Order of the stages in a round: starts with the first one that receives items from outside, then in order of
    declaration, cyclically. A cycle without outside input starts with its first stage."""

    def enters(name: str) -> bool:
        reads = flow.stage(name).reads
        fed = any(channel in flow.feeds for channel in reads)
        return fed or any(writer not in names for channel in reads for writer in flow.writers(channel))

    first = next((i for i, name in enumerate(names) if enters(name)), 0)
    return {name: (i - first) % len(names) for i, name in enumerate(names)}


def _rate(problem: Problem, devices: set[int]) -> float:
    """Bytes per second between these devices: the network's if they are on several nodes."""
    links, nodes = problem.cluster.links, {problem.cluster.devices[device].node for device in devices}
    return links.network_bytes_per_s if len(nodes) > 1 else links.node_bytes_per_s


def _instance_devices(placed: list[PlacedStage]) -> dict[str, np.ndarray]:
    """The devices of each instance: the next ones of its stage, or the one that it shares with other ranks."""
    counts, devices = [], []
    for p in placed:
        mine, num_ranks = np.array(p.plan.devices, dtype=np.int32), p.plan.num_ranks
        if len(mine) >= num_ranks or not len(mine):
            counts.append(np.full(num_ranks, len(mine) // num_ranks))
            devices.append(mine)
        else:
            counts.append(np.ones(num_ranks, dtype=np.int64))
            devices.append(np.repeat(mine, num_ranks // len(mine)))
    return {
        "device_start": np.concatenate([[0], np.cumsum(np.concatenate(counts))]),
        "device": np.concatenate(devices),
    }


def _cores(problem: Problem, placed: list[PlacedStage]) -> dict[str, np.ndarray]:
    """The demand of each stage for cores of its instances' nodes; processes without a device are on the first node, the
    driver's."""
    nodes = []
    for p in placed:
        firsts = p.plan.devices[:: max(1, len(p.plan.devices) // p.plan.num_ranks)]
        each = [problem.cluster.devices[device].node for device in firsts] or [0]
        nodes.append(np.repeat(each, p.plan.num_ranks // len(each)))
    return {
        "node_cores": np.array(float(problem.cluster.cpu_cores)),
        "cores": np.array([problem.cores(p.stage.name, p.plan.devices) for p in placed]),
        "instance_node": np.concatenate(nodes),
    }


def _syncs(problem: Problem, plan: Plan) -> dict[str, np.ndarray]:
    """One per weight edge: each device of the target receives its shard of an instance's weights."""
    flow, links = problem.flow, problem.cluster.links
    index = {stage.name: s for s, stage in enumerate(flow.stages)}
    seconds, sources = [], []
    for edge in flow.weight_edges:
        here, there = (plan.stage(flow.workers[group][0]).devices for group in (edge.source, edge.target))
        rate = links.node_bytes_per_s if set(here) & set(there) else _rate(problem, {*here, *there})
        span = max(1, len(there) // plan.stage(flow.workers[edge.target][0]).num_ranks)
        seconds.append(problem.sync_latency_s(edge) + problem.synced_bytes(edge) / (rate * span))
        sources.append([index[name] for name in flow.workers[edge.source] if flow.stage(name).trains])
    return {
        "sync_s": np.array(seconds, dtype=np.float64),
        "sync_source_start": np.cumsum([0, *map(len, sources)]),
        "sync_source": _ints(s for stages in sources for s in stages),
    }
