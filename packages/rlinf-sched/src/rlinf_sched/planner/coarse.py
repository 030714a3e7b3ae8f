"""A coarse version of a large problem: fewer items on fewer devices, with the same number per device.

A plan of the coarse problem, scaled to several times as many devices and items, is a plan of the large one with about
the same step time, and is simulated in a fraction of the time. So local search begins with good plans of the coarse
problem: there one device stands for several, and moving many devices is moving a few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rlinf_sched.cluster import Cluster, Device
from rlinf_sched.flow_graph import Stage
from rlinf_sched.planner.placements import Placements, StagePlacement, bits_of, devices_of
from rlinf_sched.planner.pools import Pool
from rlinf_sched.problem import Problem
from rlinf_sched.profile import ItemCosts, StageProfile


def coarsened(problem: Problem, pools: Sequence[Pool], factor: int) -> Problem | None:
    """The problem with items, nodes and host processes divided by `factor`; None if something is not divisible."""
    cluster = _fewer_nodes(problem.cluster, pools, factor)
    stages = [_fewer_parts(stage, factor) for stage in problem.flow.stages]
    profiles = {
        name: _fewer_instances(profile, problem.num_items, factor) for name, profile in problem.profiles.stages.items()
    }
    divided = [problem.num_items, *problem.pinned_devices.values()]
    if cluster is None or None in stages or None in profiles.values() or any(count % factor for count in divided):
        return None
    edges = tuple(replace(edge, kept_bytes=edge.kept_bytes // factor) for edge in problem.flow.weight_edges)
    return replace(
        problem,
        flow=replace(problem.flow, stages=tuple(stage for stage in stages if stage), weight_edges=edges),
        profiles=replace(problem.profiles, stages={name: one for name, one in profiles.items() if one}),
        cluster=cluster,
        num_items=problem.num_items // factor,
        pinned_devices={group: count // factor for group, count in problem.pinned_devices.items()},
    )


def refined(placements: Placements, coarse: Problem, pools: Sequence[Pool], factor: int) -> Placements:
    """The plan of the large problem: each device of the coarse one stands for the next `factor` devices of its pool.

    Args:
        coarse: the coarse problem that the plan belongs to.
        pools: pools of the large problem.
    """
    large = [pool.devices[i : i + factor] for pool in pools for i in range(0, pool.num_devices, factor)]
    in_cycle = {name for cycle in coarse.flow.cycles() for name in cycle}

    def many(stage: Stage, placement: StagePlacement) -> StagePlacement:
        devices = bits_of(device for index in devices_of(placement.devices) for device in large[index])
        goes_round_whole = stage.name in in_cycle and placement.granularity == coarse.num_items
        granularity = placement.granularity * (factor if goes_round_whole else 1)
        return StagePlacement(devices, placement.num_ranks * factor, granularity, placement.offload, placement.turn)

    return tuple(many(stage, placement) for stage, placement in zip(coarse.flow.stages, placements, strict=True))


def _fewer_nodes(cluster: Cluster, pools: Sequence[Pool], factor: int) -> Cluster | None:
    """The first nodes of each pool, with their devices in the order of the pools."""
    devices: list[Device] = []
    num_nodes = 0
    for pool in pools:
        on_nodes = Counter(cluster.devices[index].node for index in pool.devices)
        on_a_node = next(iter(on_nodes.values()))
        if set(on_nodes.values()) != {on_a_node} or len(on_nodes) % factor:
            return None
        for i in range(pool.num_devices // factor):
            like = cluster.devices[pool.devices[i]]
            devices.append(replace(like, index=len(devices), node=num_nodes + i // on_a_node))
        num_nodes += len(on_nodes) // factor
    if len({device.kind for device in devices}) > 1 or devices[0].kind == "cpu":
        return None  # processes without a device use cores of the driver's node, slots those of their own
    cores = cluster.cpu_cores and max(1, cluster.cpu_cores // factor)
    return replace(cluster, devices=tuple(devices), cpu_cores=cores)


def _fewer_parts(stage: Stage, factor: int) -> Stage | None:
    return None if stage.num_parts % factor else replace(stage, num_parts=stage.num_parts // factor)


def _fewer_instances(profile: StageProfile, num_items: int, factor: int) -> StageProfile | None:
    """Costs for fewer items: the upper ends of as many equal quantile ranges, so that the longest is included."""
    measured_at = any(instance.num_ranks for instance in profile.instances)
    takes_cores = profile.cores and any(instance.num_devices for instance in profile.instances)  # of each node
    if profile.max_instances % factor or measured_at or takes_cores:
        return None
    costs = profile.costs
    if costs.spread != "equal":
        upper_ends = costs.quantiles(num_items)[factor - 1 :: factor]
        costs = ItemCosts(spread="samples", samples=tuple(upper_ends.tolist()))
    return replace(
        profile,
        instances=tuple(
            replace(instance, sharded_state_bytes=instance.sharded_state_bytes // factor)
            for instance in profile.instances
        ),
        costs=costs,
        max_instances=profile.max_instances // factor,
    )
