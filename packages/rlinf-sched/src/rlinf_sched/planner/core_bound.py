"""A lower bound of a step from the CPU cores of the nodes: the work of their processes divided by all cores.

The search does not model cores; no plan that it finds can be shorter than this.
"""

import numpy as np

from rlinf_sched.problem import Problem
from rlinf_sched.profile import seconds_table


def least_step_s(problem: Problem) -> float:
    """Lower bound of a step in seconds, for any plan; 0 if the cluster does not specify cores."""
    cpu_cores = problem.cluster.cpu_cores
    if not cpu_cores:
        return 0.0
    work_s = {stage.name: _least_core_s(problem, stage.name) for stage in problem.flow.stages}
    on_host_s = sum(work_s[stage.name] for stage in problem.flow.stages if not stage.needs_device)
    return max(on_host_s, sum(work_s.values()) / problem.cluster.num_nodes) / cpu_cores


def _least_core_s(problem: Problem, stage: str) -> float:
    """Core-seconds of a stage for a step's items, at the number of concurrent items that minimizes it."""
    profile = problem.profile(stage)
    on = problem.cluster.compute_devices[:1] if problem.flow.stage(stage).needs_device else ()
    item_s = np.inf
    for instance in profile.instances:
        most = min(instance.max_items or problem.num_items, problem.num_items)
        each = seconds_table(instance, most) / np.arange(1, most + 1)
        item_s = min(item_s, max(1, instance.num_devices) * float(each.min()))
    return problem.cores(stage, on) * profile.rounds * problem.num_items * item_s
