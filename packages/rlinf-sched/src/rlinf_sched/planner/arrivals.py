"""The order in which items come to a stage, as far as it matters: what the items cost that come last."""

import heapq
from collections.abc import Mapping

import numpy as np

from rlinf_sched.problem import Problem
from rlinf_sched.profile import StageProfile


def arriving_costs(problem: Problem) -> Mapping[str, np.ndarray]:
    """Stage -> float64 [num_items]: the costs of its items in the order in which they come to it.

    Stages hand items on in the order in which they came, except with continuous batching, where cheap items overtake
    dear ones: a rollout's long answers come last to all later stages, which take long for them too. The order is that
    of a rollout on all devices. Stages of a cycle, through which items come several times, count as keeping it.
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
    """Times at which items leave if each enters an engine as soon as a place is free; one of mean cost takes 1."""
    instance = profile.instances[0]
    available = len(problem.cluster.compute_devices) // max(1, instance.num_devices)
    num_engines = max(1, min(available, profile.max_instances or available))
    num_places = num_engines * (instance.max_items or len(costs))
    if num_places >= len(costs):
        return costs
    free = [0.0] * num_places
    return np.array([heapq.heapreplace(free, free[0] + cost) + cost for cost in costs.tolist()])
