"""From a config to plans: the planner's or the mode's rule, the user's choices, and numbers of ranks that divide the
work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.config.devices import device_notes
from rlinf.errors import UserError
from rlinf.jobs.base import Flows, Job
from rlinf.planning.cluster import make_cluster
from rlinf.run_folder.folder import PROBLEM
from rlinf_sched.cluster import Cluster
from rlinf_sched.errors import SchedError
from rlinf_sched.flow_graph import FlowGraph
from rlinf_sched.modes import plan_for_mode
from rlinf_sched.plan import Mode, Plan, StagePlan
from rlinf_sched.planner import plan as make_plan
from rlinf_sched.problem import Problem
from rlinf_sched.problem_file import read_problem
from rlinf_workers import Flow


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Where everything will run."""

    cluster: Cluster
    plans: dict[str, Plan]
    """Flow name -> plan."""
    notes: tuple[str, ...] = ()
    """Devices left idle, for the manifest."""
    problem: Problem | None = None
    """What the plan was made from, or can be compared with; None where nothing is measured."""


def make_plans(job: Job, flows: Flows, folder: Path) -> Planned:
    """The training flow by the planner (mode auto with a profile) or by the mode's rule and the user's choices; the
    other flows on the same devices. Mode auto without a profile begins collocated.

    Args:
        folder: the run's; what an earlier session measured there is the profile, unless the config names another.

    Raises: UserError for a placement that does not fit the flow or the machine, or a profile of another flow.
    """
    config, graph = job.config, flows.train.graph()
    cluster = make_cluster(config.cluster, job.machine)
    path = config.plan.profile or folder / PROBLEM
    problem = _read_profile(path, job, graph, cluster) if config.plan.profile or path.is_file() else None
    if problem is not None and config.mode == "auto":
        return plans_of_problem(job, flows, problem)
    mode = "collocated" if config.mode == "auto" else config.mode
    return replace(plans_by_rule(job, flows, mode), problem=problem)


def plans_by_rule(job: Job, flows: Flows, mode: Mode) -> Planned:
    """The training flow by the mode's rule and the user's choices.

    Raises: UserError for a placement that does not fit the flow or the machine.
    """
    cluster = make_cluster(job.config.cluster, job.machine)
    try:
        plan, notes = _training_plan(job, flows.train.graph(), cluster, mode)
        notes = (*device_notes(job.config.cluster, job.machine), *notes)
        return replace(_with_others(flows, plan, cluster), notes=notes)
    except SchedError as error:
        text = str(error)
        named = text.startswith(
            ("devices.", "granularity.", "num_ranks.", "num_ranks_per_replica.")
        )  # the config has them under `plan`
        raise UserError(f"plan.{text}" if named else text, hint="see the keys mode and plan of the config") from error


def plans_of_problem(job: Job, flows: Flows, problem: Problem) -> Planned:
    """The training flow by the planner.

    Raises: UserError where nothing fits, or what fits does not suit the job.
    """
    try:
        plan = make_plan(problem)
        job.check_plan(plan)
        return replace(_with_others(flows, plan, problem.cluster), problem=problem)
    except SchedError as error:
        raise UserError(f"mode=auto: {error}", hint="choose a mode by hand") from error


def _with_others(flows: Flows, plan: Plan, cluster: Cluster) -> Planned:
    plans = {flow.name: _plan_like(flow, flows.train, plan, cluster) for flow in flows if flow is not flows.train}
    return Planned(cluster=cluster, plans={flows.train.name: plan, **plans})


def _read_profile(path: Path, job: Job, graph: FlowGraph, cluster: Cluster) -> Problem:
    """The problem in the file, on this machine's devices and with this recipe's items."""
    try:
        problem = read_problem(path)
    except SchedError as error:
        raise UserError(f"plan.profile={path}: {error}", hint="rlinf profile RECIPE writes such a file") from error
    known, mine = [stage.name for stage in problem.flow.stages], [stage.name for stage in graph.stages]
    if known != mine:
        raise UserError(
            f"plan.profile={path}: is of the stages {', '.join(known)}; this recipe has {', '.join(mine)}",
            hint="rlinf profile RECIPE measures this one",
        )
    return complete_problem(job, replace(problem, flow=graph, cluster=replace(cluster, links=problem.cluster.links)))


def complete_problem(job: Job, problem: Problem) -> Problem:
    """With what the job knows and its stages do not tell; stages on the host have the machine's cores."""
    stages = {
        name: profile if problem.flow.stage(name).needs_device else replace(profile, max_instances=job.machine.num_cpus)
        for name, profile in problem.profiles.stages.items()
    }
    return replace(
        problem,
        num_items=job.num_items,
        granularities=dict(job.granularities),
        profiles=replace(problem.profiles, stages=stages),
    )


def _training_plan(job: Job, graph: FlowGraph, cluster: Cluster, mode: Mode) -> tuple[Plan, Sequence[str]]:
    config = job.config
    choices: dict[str, Any] = {
        "granularity": dict(config.plan.granularity),
        "devices": config.plan.devices,
        "num_ranks": dict(config.plan.num_ranks),
        "num_ranks_per_replica": config.plan.num_ranks_per_replica,
    }
    first = plan_for_mode(graph, cluster, mode, **choices)
    notes = []
    for group, parts in job.num_parts.items():
        placed = first.stage(graph.workers[group][0])
        num_ranks = _ranks_that_divide(job, group, parts, placed)
        if num_ranks != placed.num_ranks:
            choices["num_ranks"][group] = num_ranks
        if placed.devices and num_ranks < placed.num_ranks:
            notes.append(
                f"{group} runs in {num_ranks} ranks on {len(placed.devices)} devices: its work comes in "
                f"{parts} parts (actor.num_shards or env.num_groups)"
            )
    ranked = plan_for_mode(graph, cluster, mode, **choices)
    chunks = {**job.chunks(ranked), **config.plan.granularity}
    plan = plan_for_mode(graph, cluster, mode, **{**choices, "granularity": chunks})
    for placed in plan.stages:
        on_gpu = any(cluster.devices[index].kind == "cuda" for index in placed.devices)
        if on_gpu and placed.num_ranks > len(placed.devices):
            raise UserError(
                f"plan.num_ranks: {placed.stage} has {placed.num_ranks} ranks on {len(placed.devices)} GPUs",
                hint="use at most one rank for each GPU",
            )
    job.check_plan(plan)
    return replace(plan, reason=first.reason), notes


def _ranks_that_divide(job: Job, group: str, parts: int, placed: StagePlan) -> int:
    """The ranks of a worker group whose work comes in parts, which are dealt to replicas: one rank for each device or,
    on the host, for each core, as far as the parts can be dealt out evenly."""
    size = placed.num_ranks_per_replica
    if group in job.config.plan.num_ranks:
        if parts % placed.num_replicas:
            replicas = f", in {placed.num_replicas} replicas," if size > 1 else ""
            raise UserError(
                f"plan.num_ranks.{group}={placed.num_ranks}{replicas} does not divide its work, which comes in {parts} "
                "parts",
                hint=f"use a divisor of {parts}{f' times {size}' if size > 1 else ''}, or change actor.num_shards or "
                "env.num_groups",
            )
        return placed.num_ranks
    if placed.devices:
        return math.gcd(parts, placed.num_replicas) * size
    most = max(1, min(parts, job.machine.num_cpus // size))
    return max(count for count in range(1, most + 1) if parts % count == 0) * size


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
        num_ranks_per_replica={group: stage.num_ranks_per_replica for group, stage in placed.items()},
    )
