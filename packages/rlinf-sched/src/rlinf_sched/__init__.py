"""Planning for RL post-training: what depends on what (flow graph), where it may run (cluster), how it runs (plan).

Needs neither torch nor Ray nor a GPU: a plan can be made, read and checked on any machine.
"""

from rlinf_sched.cluster import Cluster, Device, Links
from rlinf_sched.describe import describe_plan, diagram
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
    "diagram",
    "SchedError",
    "FlowError",
    "ClusterError",
    "ProfileError",
    "ProblemError",
    "InfeasibleError",
    "PlanError",
]
