"""Derives findings about a cluster, with hints, from its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlinf.finding import Finding
from rlinf_sched.explain import gib
from rlinf_workers.launchers import ClusterReport, NodeReport

MIN_SHARED_BYTES = 1 << 30
"""Minimum size of /dev/shm: containers have 64 MiB by default, and NCCL alone takes tens of MiB per GPU."""
MAX_CLOCK_OFFSET_S = 0.02
"""Maximum clock offset, because the shortest spans in a trace last a few milliseconds."""
SLOW_SHARE = 0.5
"""Share of the median rate below which a connection is reported as slow."""


def judge(report: ClusterReport) -> Iterator[Finding]:
    """Yields the findings, subject by subject."""
    seen = [node for node in report.nodes if not node.problem]
    for node in report.nodes:
        if node.problem:
            yield Finding("nodes", "problem", f"nobody could look at {node.place}: {node.problem}", "see its Ray logs")
    if not any(node.problem for node in report.nodes):
        yield Finding("nodes", "ok", f"{len(report.nodes)} looked at")
    if report.is_open:
        text = "the cluster asks nobody for a token: whoever reaches its ports can run programs on its nodes"
        yield Finding("token", "note", text, "docs/clusters.md says how to start one with a token")
    yield from _versions(seen)
    yield from _devices(seen)
    yield from _shared_memory(seen)
    yield from _clocks(seen)
    yield from _ways(report)


def _versions(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yields versions that differ between nodes."""
    kinds = {"Python": {node.number: node.python for node in nodes}}
    for package in sorted({name for node in nodes for name in node.packages}):
        kinds[package] = {node.number: node.packages.get(package, "none") for node in nodes}
    differ = {name: versions for name, versions in kinds.items() if len(set(versions.values())) > 1}
    for name, versions in differ.items():
        drivers = versions.get(0, next(iter(versions.values())))
        remedy = "uninstall it" if drivers == "none" else f"install {drivers}, the driver's,"
        odd = [str(number) for number, version in versions.items() if version != drivers]
        by_version = "; ".join(
            f"{version} on node {', '.join(str(number) for number, one in versions.items() if one == version)}"
            for version in dict.fromkeys(versions.values())
        )
        yield Finding("versions", "problem", f"{name}: {by_version}", f"{remedy} on node {', '.join(odd)}")
    if not differ and nodes:
        yield Finding("versions", "ok", "the same everywhere")


def _devices(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    num_found = 0
    for node in nodes:
        if node.torch_problem:
            yield Finding("devices", "problem", f"{node.place}: {node.torch_problem}", "runs need torch there")
        elif len(node.gpus) < node.num_gpus:
            text = f"{node.place}: Ray counts {node.num_gpus} GPUs, and torch finds {len(node.gpus)}"
            built = f"torch is built for {f'CUDA {node.cuda}' if node.cuda else 'CPUs alone'}"
            yield Finding("devices", "problem", text, f"{built}: try nvidia-smi there, or `ray start --num-gpus`")
        elif len(node.gpus) > node.num_gpus:
            text = f"{node.place}: torch finds {len(node.gpus)} GPUs, and Ray counts {node.num_gpus}"
            yield Finding("devices", "note", text, "runs take no more than Ray counts; `ray start --num-gpus`")
        else:
            num_found += 1
    if num_found and num_found == len(nodes):
        num_gpus, num_cpus = sum(len(node.gpus) for node in nodes), sum(node.num_cpus for node in nodes)
        yield Finding("devices", "ok", f"{num_gpus} GPUs, {num_cpus} CPUs")


def _shared_memory(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    few = [node for node in nodes if node.shared_free_bytes < MIN_SHARED_BYTES]
    for node in few:
        text = f"{node.place}: {gib(node.shared_free_bytes)} of {gib(node.shared_bytes)} free in /dev/shm"
        yield Finding(
            "shared memory", "note", text, "NCCL and weights that are shared need it: --shm-size of a container"
        )
    if nodes and not few:
        least = min(node.shared_free_bytes for node in nodes)
        yield Finding("shared memory", "ok", f"at least {gib(least)} free in /dev/shm of each node")


def _clocks(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    off = [node for node in nodes if abs(node.clock_offset_s) - node.clock_error_s > MAX_CLOCK_OFFSET_S]
    for node in off:
        text = f"{node.place}: {clock(node)} ms against the driver's clock"
        yield Finding("clocks", "note", text, "traces show its spans shifted by that; run chrony or ntpd on every node")
    if nodes and not off:
        worst = max(abs(node.clock_offset_s) + node.clock_error_s for node in nodes)
        yield Finding("clocks", "ok", f"within {1000 * worst:.1f} ms of the driver's")


def _ways(report: ClusterReport) -> Iterator[Finding]:
    places = {node.number: node.place for node in report.nodes}
    hint = "nodes call one another at ports that the system chooses: open the firewall between them for TCP"
    for way in report.ways:
        if way.problem:
            text = f"{places[way.source]} cannot reach {places[way.target]}: {way.problem}"
            yield Finding("network", "problem", text, hint)
    if not report.open_ways:
        return
    median = report.median_bytes_per_s
    slow = [way for way in report.open_ways if way.bytes_per_s < SLOW_SHARE * median]
    for way in slow:
        text = f"{places[way.source]} to {places[way.target]}: {rate(way.bytes_per_s)}; the median is {rate(median)}"
        yield Finding("network", "note", text, "look for a slower port or a longer route; ethtool shows a port's rate")
    if not slow and len(report.open_ways) == len(report.ways):
        yield Finding("network", "ok", f"{len(report.ways)} ways, median {rate(median)} a TCP connection")


def rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def clock(node: NodeReport) -> str:
    """Formats a node's clock offset in milliseconds, with its uncertainty."""
    return f"{1000 * node.clock_offset_s:+.1f} ± {1000 * node.clock_error_s:.1f}"
