"""`rlinf doctor --cluster`: prints a cluster's nodes, the network between them, and problems."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from rlinf.cli.finding_lines import print_findings
from rlinf.cli.table import aligned
from rlinf.cluster_findings import clock, judge, rate
from rlinf.doctor import OWN_PACKAGES
from rlinf.errors import UserError
from rlinf.plugin_checks import spec_of
from rlinf_sched import Links, Problem, SchedError, read_problem
from rlinf_sched.explain import gib
from rlinf_workers.launchers import ClusterReport, NodeReport, WayReport

PACKAGES = (*OWN_PACKAGES, "torch", "numpy", "transformers", "msgspec")
"""Packages that need the same version on all nodes."""
MAX_WAYS = 12
"""Number of node pairs shown, slowest first; --json prints all."""


def run(address: str, *, launcher: str | None, as_json: bool, links: Path | None) -> int:
    """Returns the exit code, 1 if there is a problem.

    Args:
        launcher: the launcher of the cluster; None: the first that can inspect one.
        links: the problem file into which the measured network is written.
    """
    problem = _problem_to_change(links) if links is not None else None
    report = _looked_at(address, launcher)
    findings = list(judge(report))
    if as_json:
        document = asdict(report) | {"findings": [asdict(finding) for finding in findings]}
        print(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        print(f"\n{aligned(node_rows(report))}\n")
        if report.ways:
            print(f"{way_table(report)}\n")
        print_findings(findings)
    if (measured := report.links()) is not None:
        setting = (
            f"links: {{network_bytes_per_s: {measured.network_bytes_per_s:.3g}, latency_s: {measured.latency_s:.3g}}}"
        )
        print(f"\nthe network for the planner, the slowest way: {setting}", file=sys.stderr if as_json else sys.stdout)
        if problem is not None and links is not None:
            links.write_text(with_network(problem, measured).to_json(), encoding="utf-8")
            print(f"written to {links}", file=sys.stderr if as_json else sys.stdout)
    elif links is not None:
        raise UserError(f"--links={links}: there is no way between two nodes that could be measured")
    return 1 if any(finding.verdict == "problem" for finding in findings) else 0


def node_rows(report: ClusterReport) -> list[tuple[str, ...]]:
    """Returns a header and a row for each node."""
    header = ("node", "host", "address", "Python", "torch", "rlinf", "CPUs", "GPUs", "/dev/shm free", "clock, ms")
    return [header, *map(_node_row, report.nodes)]


def _node_row(node: NodeReport) -> tuple[str, ...]:
    by_ray = (str(node.number), node.hostname, node.address)
    if node.problem:
        return (*by_ray, "?", "?", "?", str(node.num_cpus), str(node.num_gpus), "?", "?")
    gpus = str(node.num_gpus) if len(node.gpus) == node.num_gpus else f"{node.num_gpus}, torch {len(node.gpus)}"
    versions = (node.packages.get("torch", "none"), node.packages.get("rlinf", "none"))
    return (*by_ray, node.python, *versions, str(node.num_cpus), gpus, gib(node.shared_free_bytes), clock(node))


def way_table(report: ClusterReport) -> str:
    """Returns a table with the blocked and the slowest node pairs."""
    ways = sorted(report.ways, key=lambda way: way.bytes_per_s)
    left = len(ways) - MAX_WAYS
    more = f"\nand {left} faster ones (--json shows all)" if left > 0 else ""
    return aligned([("way", "round trip", "one connection"), *map(_way_row, ways[:MAX_WAYS])]) + more


def _way_row(way: WayReport) -> tuple[str, ...]:
    name = f"{way.source} -> {way.target}"
    return (
        (name, "-", way.problem) if way.problem else (name, f"{1e6 * way.round_trip_s:.0f} us", rate(way.bytes_per_s))
    )


def with_network(problem: Problem, measured: Links) -> Problem:
    """Returns the problem with the measured network; links within a node are unchanged."""
    links = replace(
        problem.cluster.links, network_bytes_per_s=measured.network_bytes_per_s, latency_s=measured.latency_s
    )
    return replace(problem, cluster=replace(problem.cluster, links=links))


def _problem_to_change(path: Path) -> Problem:
    """Reads the problem file of --links, before anything is measured."""
    if path.suffix != ".json":
        raise UserError(
            f"--links={path}: measured links go into a profile, a JSON file", hint="rlinf profile writes one"
        )
    try:
        return read_problem(path)
    except SchedError as error:
        raise UserError(f"--links={error}", hint="rlinf profile RECIPE writes such a file") from error


def _looked_at(address: str, launcher: str | None) -> ClusterReport:
    from rlinf_workers import ClusterRefused
    from rlinf_workers.plugins import LAUNCHERS

    able = [spec.name for spec in LAUNCHERS.specs() if spec.can_look]
    spec = spec_of(LAUNCHERS, launcher or able[0], at="--launcher")
    if not spec.can_look:
        raise UserError(f"--launcher={launcher}: it has no cluster to look at", hint=f"use {' or '.join(able)}")
    try:
        return spec.look(address, PACKAGES, lambda doing: print(doing, file=sys.stderr, flush=True))
    except (ClusterRefused, ModuleNotFoundError) as error:  # no cluster, or a package of the launcher is missing
        raise UserError(str(error)) from error
