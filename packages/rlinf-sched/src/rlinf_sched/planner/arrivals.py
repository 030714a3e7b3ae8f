"""The order in which items arrive at a stage, as far as it matters: the costs of the last ones."""

import heapq
from collections.abc import Mapping

import numpy as np

from rlinf_sched.problem import Problem
from rlinf_sched.profile import StageProfile


def arriving_costs(problem: Problem) -> Mapping[str, np.ndarray]:
    """Stage -> float64 [num_items]: the costs of its items in the order of arrival.

    Stages keep the order of items, except with continuous batching, where cheap items overtake expensive ones: a
    rollout's long completions arrive last at all later stages, which are also slow for them. The order is computed for
    a rollout on all devices. Stages of a cycle, through which items pass several times, are assumed to keep it.
    """
    flow = problem.flow
    successors = flow.successors()
    in_cycle = {name for cycle in flow.cycles() for name in cycle}
    orders: dict[str, np.ndarray] = {}  # of stages after one with continuous batching: the items as they come
    result: dict[str, np.ndarray] = {}
    for name in (name for names in flow.turns() for name in names):
        order, profile = orders.get(name, np.arange(problem.num_items)), problem.profile(name)
        result[name] = profile.costs.typical(problem.num_items)[order]
        if profile.batching == "continuous" and profile.costs.spread != "equal" and name not in in_cycle:
            orders[name] = order[np.argsort(_leaving(problem, profile, result[name]), kind="stable")]
        if name in orders:
            orders |= dict.fromkeys(successors[name], orders[name])
    return result


def _leaving(problem: Problem, profile: StageProfile, costs: np.ndarray) -> np.ndarray:
    """Times at which items leave if each enters an engine as soon as there is capacity; an item of mean cost takes
    1."""
    instance = profile.instances[0]
    available = len(problem.cluster.compute_devices) // max(1, instance.num_devices)
    num_engines = max(1, min(available, profile.max_instances or available))
    num_places = num_engines * (instance.max_items or len(costs))
    if num_places >= len(costs):
        return costs
    free = [0.0] * num_places
    return np.array([heapq.heapreplace(free, free[0] + cost) + cost for cost in costs.tolist()])
