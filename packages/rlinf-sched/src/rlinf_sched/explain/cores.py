"""The load of the nodes' cores in a predicted step, by stage."""

import numpy as np

from rlinf_sched.explain.spans import Spans
from rlinf_sched.plan import Plan
from rlinf_sched.problem import Problem


def core_shares(problem: Problem, plan: Plan, spans: Spans) -> dict[int, dict[str, float]]:
    """Node -> stage -> its fraction of the node's core time, from 0 to 1; empty if cores are not specified.

    Stages that together need more cores than there are get them in proportion to their demand.
    """
    cpu_cores = problem.cluster.cpu_cores
    if not cpu_cores:
        return {}
    computing = np.flatnonzero(spans.is_kind("compute", "step"))
    times_s = np.unique(np.concatenate([spans.start_s[computing], spans.end_s[computing]]))
    demand: dict[int, dict[str, np.ndarray]] = {}
    for placed in plan.stages:
        mine = computing[spans.stage[computing] == spans.stages.index(placed.stage)]
        cores = problem.cores(placed.stage, placed.devices) * max(1, len(placed.devices) // placed.num_ranks)
        nodes = np.array([_node(problem, placed.devices_of(rank)) for rank in range(placed.num_ranks)])
        for node in sorted(set(nodes.tolist())):
            here = mine[nodes[spans.rank[mine]] == node]
            begun = np.searchsorted(np.sort(spans.start_s[here]), times_s[:-1], side="right")
            ended = np.searchsorted(np.sort(spans.end_s[here]), times_s[:-1], side="right")
            demand.setdefault(node, {})[placed.stage] = cores * (begun - ended)
    return {node: _shares(of_stages, times_s, cpu_cores, spans.length_s) for node, of_stages in demand.items()}


def _node(problem: Problem, devices: tuple[int, ...]) -> int:
    return problem.cluster.devices[devices[0]].node if devices else 0


def _shares(demand: dict[str, np.ndarray], times_s: np.ndarray, cpu_cores: int, length_s: float) -> dict[str, float]:
    pace = np.minimum(1.0, cpu_cores / np.maximum(sum(demand.values()), 1e-9))
    part = np.diff(times_s) * pace / (cpu_cores * length_s)
    return {stage: float(cores @ part) for stage, cores in demand.items()}
