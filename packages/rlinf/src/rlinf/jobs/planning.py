"""From a config to plans: the mode's rule, the user's choices, and numbers of ranks that divide the work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rlinf.errors import UserError
from rlinf.jobs.base import Flows, Job
from rlinf.jobs.devices import make_cluster
from rlinf_sched.cluster import Cluster
from rlinf_sched.errors import SchedError
from rlinf_sched.flow_graph import FlowGraph
from rlinf_sched.modes import plan_for_mode
from rlinf_sched.plan import Plan
from rlinf_workers import Flow


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Where everything will run."""

    cluster: Cluster
    plans: dict[str, Plan]
    """Flow name -> plan."""
    notes: tuple[str, ...]
    """Devices left idle, for the manifest."""


def make_plans(job: Job, flows: Flows) -> Planned:
    """The training flow by the mode's rule and the user's choices; the other flows on the same devices.

    Raises: UserError for a placement that does not fit the flow or the machine.
    """
    cluster = make_cluster(job.config.cluster)
    try:
        plan, notes = _training_plan(job, flows.train.graph(), cluster)
        plans = {flow.name: _plan_like(flow, flows.train, plan, cluster) for flow in flows if flow is not flows.train}
    except SchedError as error:
        text = str(error)
        named = text.startswith(("devices.", "granularity.", "num_ranks."))  # the config has them under `plan`
        raise UserError(f"plan.{text}" if named else text, hint="see the keys mode and plan of the config") from error
    return Planned(cluster=cluster, plans={flows.train.name: plan, **plans}, notes=tuple(notes))


def _training_plan(job: Job, graph: FlowGraph, cluster: Cluster) -> tuple[Plan, list[str]]:
    config = job.config
    choices: dict[str, Any] = {
        "granularity": dict(config.plan.granularity),
        "devices": config.plan.devices,
        "num_ranks": dict(config.plan.num_ranks),
    }
    first = plan_for_mode(graph, cluster, config.mode, **choices)
    notes = []
    for group, parts in job.max_ranks.items():
        placed = first.stage(graph.workers[group][0])
        num_devices, num_ranks = len(placed.devices), placed.num_ranks
        if parts % num_ranks and group in config.plan.num_ranks:
            raise UserError(
                f"plan.num_ranks.{group}={num_ranks} does not divide its work, which comes in {parts} parts",
                hint=f"use a divisor of {parts}, or change actor.num_shards or env.num_groups",
            )
        if parts % num_ranks:
            choices["num_ranks"][group] = math.gcd(parts, num_devices)
            notes.append(
                f"{group} runs in {choices['num_ranks'][group]} ranks on {num_devices} devices: its work comes in "
                f"{parts} parts (actor.num_shards or env.num_groups)"
            )
    ranked = plan_for_mode(graph, cluster, config.mode, **choices)
    chunks = {**job.chunks(ranked), **config.plan.granularity}
    plan = plan_for_mode(graph, cluster, config.mode, **{**choices, "granularity": chunks})
    for placed in plan.stages:
        on_gpu = any(cluster.devices[index].kind == "cuda" for index in placed.devices)
        if on_gpu and placed.num_ranks > len(placed.devices):
            raise UserError(
                f"plan.num_ranks: {placed.stage} has {placed.num_ranks} ranks on {len(placed.devices)} GPUs",
                hint="use at most one rank for each GPU",
            )
    job.check_plan(plan)
    return plan, notes


def _plan_like(flow: Flow, train: Flow, plan: Plan, cluster: Cluster) -> Plan:
    """A plan for a flow that uses worker groups of the training flow: where they are, with the chunks they have."""
    graph, train_graph = flow.graph(), train.graph()
    placed = {group: plan.stage(train_graph.workers[group][0]) for group in graph.workers}
    shared = {stage.name for stage in graph.stages} & {stage.name for stage in train_graph.stages}
    one_placement = len({stage.devices for stage in placed.values() if stage.devices}) == 1
    return plan_for_mode(
        graph,
        cluster,
        "collocated" if one_placement else "hybrid",
        granularity={stage: plan.stage(stage).granularity for stage in shared},
        devices={group: stage.devices for group, stage in placed.items()},
        num_ranks={group: stage.num_ranks for group, stage in placed.items()},
    )
