"""Rule-based plans, one for each execution mode; the three modes are those of arXiv:2509.15965.

The *generation side* is the worker groups with a device that do not train (rollout, reference, env); the *training
side* is those that do, and critics. `FlowGraph.generation_groups` and `training_groups` tell them apart.

collocated
    Every group on all devices, one after the other, state offloaded between turns, whole batches; inside a cycle, whose
    stages run concurrently, the smallest granularity instead.
disaggregated
    The two sides on disjoint devices, pipelined at the smallest granularity, nothing offloaded. Each side gets half
    (the generation side the odd one), shifted if that gives every group its own device. On a side with fewer devices
    than groups, the groups take turns on all of the side's devices.
hybrid
    The generation groups spread over disjoint devices and pipelined (a single group gets half of the devices, more
    groups than devices go round robin), then the training side on all devices, in whole batches; everything that shares
    a device is offloaded.

Stages that need no device run on the host, in one rank, in every mode.
"""

import math
from collections.abc import Mapping, Sequence

from rlinf_sched.cluster import Cluster
from rlinf_sched.errors import PlanError, did_you_mean
from rlinf_sched.flow_graph import FlowGraph, Stage
from rlinf_sched.plan import ALL_MODES, Mode, Plan, StagePlan

_RULES: dict[str, str] = {
    "collocated": "all worker groups take turns on all devices",
    "disaggregated": "generation and training on devices of their own, pipelined",
    "hybrid": "generation spread over the devices and pipelined, then training on all of them",
}


def plan_for_mode(
    graph: FlowGraph,
    cluster: Cluster,
    mode: Mode,
    *,
    granularity: Mapping[str, int] | None = None,
    devices: Mapping[str, Sequence[int]] | None = None,
    num_ranks: Mapping[str, int] | None = None,
    num_ranks_per_replica: Mapping[str, int] | None = None,
) -> Plan:
    """The plan by the mode's rule, with the user's choices overriding it.

    Args:
        graph: the flow; is validated.
        cluster: where it runs; the rule places on `cluster.compute_devices`.
        mode: "collocated", "disaggregated" or "hybrid".
        granularity: stage -> items per hand-over, 0 = the whole batch.
        devices: worker group -> device indices. Other groups keep those of the rule.
        num_ranks: worker group -> processes; by default one per device, or per number of devices that a rank computes
            on.
        num_ranks_per_replica: worker group -> ranks that hold one copy of a model together.

    Returns:
        a plan that passes `Plan.validate(graph, cluster)`, its stages ordered by turn.

    Raises:
        FlowError: the graph is invalid.
        PlanError: fewer than two devices for disaggregated or hybrid, an unknown name, or a choice that does not fit.
    """
    graph.validate()
    granularity, devices, num_ranks = dict(granularity or {}), dict(devices or {}), dict(num_ranks or {})
    replica_sizes = dict(num_ranks_per_replica or {})
    if mode not in ALL_MODES:
        raise PlanError(f"mode={mode!r}{did_you_mean(mode, ALL_MODES)}")
    _check_names("granularity", granularity, [stage.name for stage in graph.stages], "stage")
    _check_names("devices", devices, list(graph.workers), "worker group")
    _check_names("num_ranks", num_ranks, list(graph.workers), "worker group")
    _check_names("num_ranks_per_replica", replica_sizes, list(graph.workers), "worker group")

    device_choice = {group: tuple(chosen) for group, chosen in devices.items()}
    placement = {**dict.fromkeys(graph.workers, ()), **_place(graph, cluster, mode), **device_choice}
    cycles = {name for cycle in graph.cycles() for name in cycle}
    stages = []
    for turn, names in enumerate(graph.turns()):
        for stage in map(graph.stage, names):
            on, replica_size = placement[stage.worker], replica_sizes.get(stage.worker, 1)
            stages.append(
                StagePlan(
                    stage=stage.name,
                    devices=on,
                    num_ranks=num_ranks.get(stage.worker, _default_ranks(len(on), stage, replica_size)),
                    granularity=granularity.get(stage.name, _granularity(graph, stage, mode, stage.name in cycles)),
                    offload=_offloads(stage.worker, mode, placement),
                    turn=turn,
                    num_ranks_per_replica=replica_size,
                )
            )
    choices = {
        "devices": devices,
        "num_ranks": num_ranks,
        "num_ranks_per_replica": replica_sizes,
        "granularity": granularity,
    }
    plan = Plan(flow=graph.name, mode=mode, stages=tuple(stages), reason=_reason(mode, choices))
    plan.validate(graph, cluster)
    return plan


def _check_names(option: str, choices: Mapping[str, object], names: list[str], noun: str) -> None:
    for name in choices:
        if name not in names:
            raise PlanError(f"{option}.{name}: the flow has no {noun} {name!r}{did_you_mean(name, names)}")


def _place(graph: FlowGraph, cluster: Cluster, mode: Mode) -> dict[str, tuple[int, ...]]:
    """Worker group -> devices, for the groups with devices."""
    generation, training, everything = graph.generation_groups, graph.training_groups, cluster.compute_devices
    if mode == "collocated":
        return dict.fromkeys([*generation, *training], everything)
    if len(everything) < 2:
        raise PlanError(
            f"mode={mode!r} needs at least 2 devices, this cluster has {len(everything)} to place stages on; "
            "use mode 'collocated'"
        )
    if mode == "disaggregated":
        num_generation = _num_generation_devices(len(everything), len(generation), len(training))
        return {
            **_own_or_all(generation, everything[:num_generation]),
            **_own_or_all(training, everything[num_generation:]),
        }
    if len(generation) == 1 and training:
        spread = {generation[0]: everything[: _half(len(everything))]}
    elif len(generation) <= len(everything):
        spread = _split(generation, everything)
    else:
        spread = {group: (everything[i % len(everything)],) for i, group in enumerate(generation)}
    return {**spread, **dict.fromkeys(training, everything)}


def _half(count: int) -> int:
    return count - count // 2


def _num_generation_devices(num_devices: int, num_generation: int, num_training: int) -> int:
    """Half, adjusted by the minimum that gives every group of both sides a device, if there are enough."""
    if not num_training:
        return num_devices
    if not num_generation:
        return 0
    half = _half(num_devices)
    if num_devices < num_generation + num_training:
        return half
    return min(max(half, num_generation), num_devices - num_training)


def _own_or_all(groups: Sequence[str], devices: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return _split(groups, devices) if len(groups) <= len(devices) else dict.fromkeys(groups, devices)


def _split(groups: Sequence[str], devices: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Gives each group a consecutive, even part; the remainder goes to the first groups, one device each."""
    parts, start = {}, 0
    for i, group in enumerate(groups):
        end = start + len(devices) // len(groups) + (i < len(devices) % len(groups))
        parts[group] = devices[start:end]
        start = end
    return parts


def _default_ranks(num_devices: int, stage: Stage, replica_size: int) -> int:
    """One rank per device, or per number of devices that a rank computes on, reduced until replicas are whole and the
    stage's parts are divided evenly."""
    num_places = num_devices // max(1, stage.devices_per_rank)
    return max(1, math.gcd(stage.num_parts, num_places // replica_size)) * replica_size


def _granularity(graph: FlowGraph, stage: Stage, mode: Mode, in_cycle: bool) -> int:
    if stage.whole_batch:
        return 0
    if in_cycle:
        return stage.item_multiple
    if mode == "collocated" or (mode == "hybrid" and stage.worker in graph.training_groups):
        return 0
    return stage.item_multiple


def _offloads(group: str, mode: Mode, placement: Mapping[str, tuple[int, ...]]) -> bool:
    mine = set(placement[group])
    if mode == "collocated":
        return bool(mine)
    return mode == "hybrid" and any(mine & set(theirs) for other, theirs in placement.items() if other != group)


def _reason(mode: Mode, choices: Mapping[str, Mapping[str, object]]) -> str:
    chosen = [
        f"{option}.{name}={list(value) if isinstance(value, Sequence) else value}"
        for option, values in choices.items()
        for name, value in sorted(values.items())
    ]
    return f"rule for {mode}: {_RULES[mode]}" + (f"; chosen by the user: {', '.join(chosen)}" if chosen else "")
