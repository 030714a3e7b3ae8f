"""Simulated step times of many plans of one problem, without their timelines.

What the plans share is lowered once, and each placement of a stage once; the event core is the one that `simulate`
runs, so the times are the same.
"""

from __future__ import annotations

import math

from rlinf_sched.errors import SchedError
from rlinf_sched.planner.placements import Placements, StagePlacement, plan_of, stage_plan
from rlinf_sched.problem import Problem
from rlinf_sched.profile import InstanceProfile, seconds_table
from rlinf_sched.simulator.lowering import lower, lower_stage


class PlanTimer:
    """Times plans of one problem.

    Args:
        any_placements: of a plan that can be executed.
        seed: as in `simulate`.
    """

    def __init__(
        self, problem: Problem, any_placements: Placements, *, seed: int | None = None, num_steps: int = 1
    ) -> None:
        from rlinf_sched import _C  # imported lazily: the package imports without it

        self._problem = problem
        self._places: dict[tuple[int, StagePlacement], int | None] = {}
        flow, links = problem.flow, problem.cluster.links
        stages = [stage.name for stage in flow.stages]
        choices = [(name, choice) for name in stages for choice in problem.profile(name).instances]
        self._table_of = {(name, choice): i for i, (name, choice) in enumerate(choices)}
        lowered = lower(problem, plan_of(problem, any_placements, "hybrid", ""), seed=seed, num_steps=num_steps)
        ends = [flow.workers[group][0] for edge in flow.weight_edges for group in (edge.source, edge.target)]
        pairs = zip(lowered.arrays["edge_source"].tolist(), lowered.arrays["edge_target"].tolist(), strict=True)
        self._timer = _C.PlanTimer(
            lowered.arrays,
            names=lowered.stages,
            num_items=problem.num_items,
            num_steps=lowered.num_steps,
            max_staleness=flow.max_staleness,
            tables=[seconds_table(choice, problem.num_items) for _, choice in choices],
            node_of=[device.node for device in problem.cluster.devices],
            edge_bytes=[
                sum(
                    flow.item_bytes.get(channel, 0)
                    for channel in set(flow.stages[source].writes) & set(flow.stages[target].reads)
                )
                for source, target in pairs
            ],
            sync_bytes=[problem.synced_bytes(edge) for edge in flow.weight_edges],
            sync_latency_s=[problem.sync_latency_s(edge) for edge in flow.weight_edges],
            sync_ends=[stages.index(name) for name in ends],
            latency_s=links.latency_s,
            node_bytes_per_s=links.node_bytes_per_s,
            network_bytes_per_s=links.network_bytes_per_s,
        )

    def step_s(self, placements: Placements, most_s: float = math.inf) -> float:
        """Step time in seconds, as in `simulate`; infinity for invalid or deadlocking plans, and possibly for plans
        whose steps take longer than `most_s`, which need not be simulated to the end."""
        numbers = []
        for place in enumerate(placements):
            if place not in self._places:
                self._places[place] = self._add(*place)
            number = self._places[place]
            if number is None:
                return math.inf
            numbers.append(number)
        return self._timer.step_s(numbers, most_s)

    def _add(self, s: int, placement: StagePlacement) -> int | None:
        stage = self._problem.flow.stages[s]
        try:
            placed = lower_stage(self._problem, stage, stage_plan(stage.name, placement))
        except SchedError:
            return None
        profile: InstanceProfile = placed.profile
        return self._timer.add(
            devices=placed.plan.devices,
            num_instances=placement.num_ranks,
            hand_over=placed.hand_over,
            room=placed.room,
            whole=placement.granularity == 0,
            step_s=profile.step_s,
            onload_s=placed.onload_s,
            offload_s=placed.offload_s,
            table=self._table_of[stage.name, profile],
        )
