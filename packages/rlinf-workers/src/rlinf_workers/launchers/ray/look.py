"""Inspects every node of a Ray cluster, with a probe on each (probe.py). `look` runs in the process that takes part in
the cluster for the driver."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf_workers.launchers.base import Node
from rlinf_workers.launchers.cluster_report import ClusterReport, NodeReport, WayReport
from rlinf_workers.launchers.ray import probe
from rlinf_workers.launchers.ray.launcher import find_nodes, member_of
from rlinf_workers.launchers.ray.member import last_line

START_TIMEOUT_S = 60.0
"""Time limit for Ray to start a process on a node."""
LOOK_TIMEOUT_S = START_TIMEOUT_S + probe.LOOK_TIMEOUT_S
MEASURE_TIMEOUT_S = 60.0
NUM_CLOCK_LOOKS = 20


def look_at_cluster(address: str, packages: Sequence[str], say: Callable[[str], None]) -> ClusterReport:
    """Takes some seconds per node, plus half a second per node for the network.

    Args:
        address: of the cluster, as in RayLauncher.
        packages: distributions whose versions are compared.
        say: called with progress messages.

    Raises: ClusterRefused.
    """
    nodes = find_nodes(address, 0, 0.0)
    say(f"looking at {len(nodes)} nodes, and at {len(nodes) * (len(nodes) - 1)} network paths between them")
    member = member_of(address)
    return replace(member.process.call("look", nodes, packages, module=__name__), is_open=member.is_open)


def look(nodes: Sequence[Node], packages: Sequence[str]) -> ClusterReport:
    """Inspects these nodes and the network between them."""
    probes = _place(nodes, os.urandom(16))
    looks = {number: one.look.remote(packages) for number, one in probes.items()}
    reports = [_look(number, node, probes[number], looks[number]) for number, node in enumerate(nodes)]
    seen = [report for report in reports if not report.problem]
    ways = _ways(seen, probes)
    for one in probes.values():
        ray.kill(one)
    return ClusterReport(nodes=tuple(reports), ways=tuple(ways))


def _place(nodes: Sequence[Node], token: bytes) -> dict[int, Any]:
    """A probe on each node, by its number."""
    cloudpickle.register_pickle_by_value(probe)
    try:
        actor_class = ray.remote(num_cpus=0)(probe.NodeProbe)
        return {
            number: actor_class.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
                node.address, token
            )
            for number, node in enumerate(nodes)
        }
    finally:
        cloudpickle.unregister_pickle_by_value(probe)


def _look(number: int, node: Node, there: Any, look: Any) -> NodeReport:
    by_ray: dict[str, Any] = {
        "number": number,
        "hostname": node.hostname,
        "address": node.address,
        "num_cpus": node.num_cpus,
        "num_gpus": node.num_gpus,
    }
    try:
        by_probe: Any = ray.get(look, timeout=LOOK_TIMEOUT_S)
        offset_s, error_s = _clock(there)
    except RayError as error:
        return NodeReport(**by_ray, problem=last_line(error))
    by_probe["gpus"] = tuple((name, int(memory_bytes)) for name, memory_bytes in by_probe.get("gpus", ()))
    return NodeReport(**by_ray, **by_probe, clock_offset_s=offset_s, clock_error_s=error_s)


def _clock(there: Any) -> tuple[float, float]:
    """A node's clock offset from this one's, and half the round trip, from the quickest of several requests."""
    looks = []
    for _ in range(NUM_CLOCK_LOOKS):
        asked_s = time.time()
        theirs_s: Any = ray.get(there.now_s.remote(), timeout=START_TIMEOUT_S)
        answered_s = time.time()
        looks.append(((answered_s - asked_s) / 2, theirs_s - (asked_s + answered_s) / 2))
    error_s, offset_s = min(looks)
    return offset_s, error_s


def _ways(seen: Sequence[NodeReport], probes: Mapping[int, Any]) -> list[WayReport]:
    """Measures all paths in rounds: in each, every node sends to one and receives from one, as in a run."""
    endpoints = {node.number: (node.address, ray.get(probes[node.number].port.remote())) for node in seen}
    ways = []
    for step in range(1, len(seen)):
        pairs = [(one.number, seen[(i + step) % len(seen)].number) for i, one in enumerate(seen)]
        measured = [probes[source].measure.remote(endpoints[target]) for source, target in pairs]
        for (source, target), result in zip(pairs, measured, strict=True):
            try:
                measurement: Any = ray.get(result, timeout=MEASURE_TIMEOUT_S)
            except RayError as error:
                measurement = {"problem": last_line(error)}
            ways.append(WayReport(source=source, target=target, **measurement))
    return sorted(ways, key=lambda way: (way.source, way.target))
