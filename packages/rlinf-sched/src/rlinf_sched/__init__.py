"""Planning for RL post-training: what depends on what (flow graph), where it may run (cluster), how it runs (plan).

Needs neither torch nor Ray nor a GPU: a plan can be made, read and checked on any machine.

A name is imported when it is first asked for, so that shapes can be read without numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_sched.cluster import Cluster, Device, Links
    from rlinf_sched.describe import describe_plan, flow_diagram
    from rlinf_sched.errors import (
        ClusterError,
        FlowError,
        InfeasibleError,
        PlanError,
        ProblemError,
        ProfileError,
        SchedError,
    )
    from rlinf_sched.flow_graph import FlowGraph, Stage, WeightEdge
    from rlinf_sched.modes import plan_for_mode
    from rlinf_sched.plan import Mode, Plan, Prediction, RunnerUp, StagePlan, StagePrediction
    from rlinf_sched.problem import Problem
    from rlinf_sched.profile import InstanceProfile, ItemCosts, Profiles, StageProfile, TimePoint
    from rlinf_sched.simulator import Timeline, simulate

__version__ = "0.1.0"

__all__ = [
    "Stage",
    "WeightEdge",
    "FlowGraph",
    "Device",
    "Links",
    "Cluster",
    "TimePoint",
    "ItemCosts",
    "InstanceProfile",
    "StageProfile",
    "Profiles",
    "Problem",
    "Mode",
    "StagePlan",
    "StagePrediction",
    "RunnerUp",
    "Prediction",
    "Plan",
    "plan_for_mode",
    "simulate",
    "Timeline",
    "describe_plan",
    "flow_diagram",
    "SchedError",
    "FlowError",
    "ClusterError",
    "ProfileError",
    "ProblemError",
    "InfeasibleError",
    "PlanError",
]

_MODULES = {
    "cluster": (
        "Cluster",
        "Device",
        "Links",
    ),
    "describe": (
        "describe_plan",
        "flow_diagram",
    ),
    "errors": (
        "ClusterError",
        "FlowError",
        "InfeasibleError",
        "PlanError",
        "ProblemError",
        "ProfileError",
        "SchedError",
    ),
    "flow_graph": (
        "FlowGraph",
        "Stage",
        "WeightEdge",
    ),
    "modes": ("plan_for_mode",),
    "plan": (
        "Mode",
        "Plan",
        "Prediction",
        "RunnerUp",
        "StagePlan",
        "StagePrediction",
    ),
    "problem": ("Problem",),
    "profile": (
        "InstanceProfile",
        "ItemCosts",
        "Profiles",
        "StageProfile",
        "TimePoint",
    ),
    "simulator": (
        "Timeline",
        "simulate",
    ),
}
_PLACES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
