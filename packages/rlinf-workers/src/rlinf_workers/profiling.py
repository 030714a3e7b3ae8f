"""Profiling: converts measurements of a running flow to the planner's profiles.

Nothing is run only to be measured. Every step of a flow records spans, and `probe_plans` vary what a plan can vary
without moving a process: the granularity. Training results are the same under every plan, so its own first steps serve
as the measurement. Runs of the same flow in another placement add their numbers of ranks.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from statistics import median

import torch

from rlinf_sched import (
    Cluster,
    FittedTimes,
    FlowGraph,
    InstanceProfile,
    Links,
    Plan,
    Problem,
    Profiles,
    Stage,
    StagePlan,
    StageProfile,
    StageSample,
    WeightEdge,
    fit_stage,
)
from rlinf_workers.execution.executor import Executor, FlowRun
from rlinf_workers.group import WorkerGroup
from rlinf_workers.item_costs import EngineTimes, engine_times, seconds_as_they_came, spread_of
from rlinf_workers.spans import COMPUTE_SPAN, LEASE, SYNC_SPAN, Span

OUTSIDE_ENGINE = "agent/group_outside_engine_s"
"""Metric of groups of episodes: the longest time that one of them was in tools and the harness."""
NUM_SIZES = 3
"""Number of granularities to measure: an even share of the step, half of it and a quarter."""


def probe_plans(graph: FlowGraph, plan: Plan, num_items: int) -> list[Plan]:
    """The plan at several granularities, the coarsest first. Stages of a cycle and those that need the whole batch keep
    theirs: smaller hand-overs of a cycle would overlap on its devices, and be timed together.

    Args:
        num_items: number of items in a step.
    """
    fixed = {name for cycle in graph.cycles() for name in cycle}
    fixed |= {stage.name for stage in graph.stages if stage.whole_batch}
    probes = []
    for halvings in range(NUM_SIZES):
        stages = []
        for placed in plan.stages:
            share = -(-num_items // placed.num_replicas)
            stage = graph.stage(placed.stage)
            multiple = (stage.granularities or (stage.item_multiple,))[0] or num_items
            size = -(-(share >> halvings) // multiple) * multiple
            granularity = 0 if size >= share else max(size, multiple)
            stages.append(placed if placed.stage in fixed else replace(placed, granularity=granularity))
        probe = replace(plan, stages=tuple(stages))
        if probe not in probes:
            probes.append(probe)
    return probes


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What profiling found."""

    problem: Problem
    fits: Mapping[tuple[str, int], FittedTimes]
    """Stage and number of its ranks -> a table of times, and the table's errors."""


@dataclass
class Profiler:
    """Collects runs of one flow, and converts them to a problem for the planner.

    Example:
        profiler = Profiler(flow.graph(), cluster, num_items=64)
        for probe in probe_plans(flow.graph(), plan, 64):
            executor.replan(flow, probe)
            profiler.observe(executor.run(flow, context=context, feeds=feeds), probe)
        profiler.observe_memory(executor, plan)
        problem = profiler.measured().problem
    """

    graph: FlowGraph
    cluster: Cluster
    num_items: int
    """Number of items in a step; every stage sees each of them."""
    _samples: dict[tuple[str, int], list[StageSample]] = field(default_factory=lambda: defaultdict(list))
    _samples_alone: dict[tuple[str, int], list[StageSample]] = field(default_factory=lambda: defaultdict(list))
    """Stage whose ranks compute together, number of ranks -> its samples without time in collectives."""
    _instances: dict[tuple[str, int, int], InstanceProfile] = field(default_factory=dict)
    """Worker group, number of its ranks and devices of each -> what its stages have in common, without times."""
    _item_seconds: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    """Stage -> for each run, the seconds of its items in order of leaving an engine or of arriving from one; more
    hand-overs distinguish more items."""
    _engine_rooms: dict[tuple[str, int], int] = field(default_factory=dict)
    """Stage that works on several items at once, number of its ranks -> the maximum capacity of a rank; 0: all."""
    _rounds: dict[str, int] = field(default_factory=dict)
    _switches_s: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    _hops_s: list[float] = field(default_factory=list)
    _syncs_s: list[float] = field(default_factory=list)
    _synced_bytes: dict[WeightEdge, int] = field(default_factory=dict)

    def observe(self, run: FlowRun, plan: Plan) -> None:
        """Adds one run under one plan."""
        spans = _by_worker(run.spans)
        compute = {
            stage.name: {
                worker: [span for span in mine if span.category == COMPUTE_SPAN and span.name == stage.name]
                for worker, mine in spans.items()
                if _group(worker) == stage.worker
            }
            for stage in self.graph.stages
        }
        chains = {name: _chain(cycle, compute) for cycle in self.graph.cycles() for name in cycle}
        successors, behind_engine = self.graph.successors(), set[str]()
        for name in (name for names in self.graph.turns() for name in names):
            of_ranks = compute[name]
            num_ranks = plan.stage(name).num_ranks
            total = sum(span.num_items for mine in of_ranks.values() for span in mine)
            self._rounds[name] = max(1, round(total / self.num_items))
            if name in chains:
                sample = self._cycle_sample(name, chains[name], plan)
            else:
                busiest = max(of_ranks.values(), key=lambda mine: _seconds(mine) - _collective_seconds(mine))
                sample = self._sample(name, busiest, num_ranks)
                waits_s = run.metrics.get(OUTSIDE_ENGINE, 0.0)
                engines = [times for mine in of_ranks.values() if (times := engine_times(mine, waits_s=waits_s))]
                if engines:
                    sample = self._engine_sample(name, engines, sample, num_ranks)
                elif name in behind_engine:
                    self._item_seconds[name].append(seconds_as_they_came(of_ranks.values()))
                if engines or name in behind_engine:
                    behind_engine |= set(successors[name])
                if _collective_seconds(busiest):
                    alone = [_without_collectives(span) for span in busiest]
                    self._samples_alone[name, num_ranks].append(self._sample(name, alone, num_ranks))
            self._samples[name, num_ranks].append(sample)
        for group, names in self.graph.workers.items():
            if plan.stage(names[0]).offload:
                self._switches_s[group].append(_switch_seconds(group, spans))
        self._hops_s += _hops(self.graph, compute, plan)
        self._syncs_s.append(_sync_seconds(spans))

    def has_seen(self, plan: Plan) -> bool:
        """Whether every stage was observed with the plan's number of ranks."""
        return all((placed.stage, placed.num_ranks) in self._samples for placed in plan.stages)

    def observe_memory(self, executor: Executor, plan: Plan) -> None:
        """Measures the memory of a placement's processes; once is enough, after its runs."""
        for group, names in self.graph.workers.items():
            placed = plan.stage(names[0])
            instance = self._instance(placed, executor.group(group))
            self._instances[group, placed.num_ranks, instance.num_devices] = instance
        self._synced_bytes = {edge: executor.weights_bytes(edge) for edge in self.graph.weight_edges}

    def measured(self) -> Measured:
        """The problem for the observed runs, with the memory of each of their placements."""
        fits = {key: fit_stage(samples) for key, samples in sorted(self._samples.items())}
        stages = {stage.name: self._stage_profile(stage, fits) for stage in self.graph.stages}
        problem = Problem(
            flow=self.graph,
            profiles=Profiles(stages=stages),
            cluster=replace(self.cluster, links=self._links()),
            num_items=self.num_items,
        )
        problem.validate()
        return Measured(problem=problem, fits=fits)

    # -- one run -----------------------------------------------------------------------------------------------------

    def _sample(self, name: str, busiest: Sequence[Span], num_ranks: int) -> StageSample:
        """From the spans of the busiest rank; a stage that works after its last item, or before its first, is timed as
        a whole."""
        chunks = [span for span in busiest if span.num_items]
        if self.graph.stage(name).whole_batch or not chunks:
            num_items = sum(span.num_items for span in chunks) or -(-self.num_items // num_ranks)
            return StageSample(num_items=num_items, seconds=_seconds(busiest), fixed_s=_collective_seconds(busiest))
        num_items = _usual_size(chunks)
        share = num_items / sum(span.num_items for span in chunks)
        return StageSample(
            num_items=num_items,
            seconds=_seconds(chunks) * share,
            fixed_s=_collective_seconds(chunks) * share,
            step_s=_seconds(busiest) - _seconds(chunks),
        )

    def _engine_sample(
        self, name: str, engines: Sequence[EngineTimes], whole: StageSample, num_ranks: int
    ) -> StageSample:
        """An item of mean cost in a full engine, on the rank whose items took longest."""
        self._item_seconds[name].append(sorted(seconds for engine in engines for seconds in engine.seconds))
        room = max(engine.most if len(engine.seconds) > engine.most else 0 for engine in engines)
        self._engine_rooms[name, num_ranks] = max(room, self._engine_rooms.get((name, num_ranks), 0))
        slowest = max(engines, key=lambda engine: engine.mean_s)
        fixed_s = slowest.waiting_share * slowest.mean_s
        return replace(whole, num_items=slowest.most, seconds=slowest.mean_s, fixed_s=fixed_s)

    def _cycle_sample(self, name: str, chain: Mapping[str, Sequence[Span]], plan: Plan) -> StageSample:
        """All work of the stage counts to its chunks, plus the transfer to the next process for each. Stages that share
        devices and compute at the same time slow each other down: each gets its share of that time."""
        chunks = [span for span in chain[name] if span.num_items]
        num_items = _usual_size(chunks)
        num_chunks = max(self._rounds[name], round(sum(span.num_items for span in chunks) / num_items))
        busy_s, wall_s = sum(map(_seconds, chain.values())), _wall_seconds(chain)
        wait_s = max(0.0, wall_s - busy_s) / sum(map(len, chain.values()))
        share = min(1.0, wall_s / busy_s) if len({plan.stage(other).devices for other in chain}) == 1 else 1.0
        seconds = _seconds(chain[name]) * share / num_chunks + wait_s
        return StageSample(num_items=num_items, seconds=seconds, fixed_s=wait_s)

    # -- all of them -------------------------------------------------------------------------------------------------

    def _instance(self, placed: StagePlan, group: WorkerGroup) -> InstanceProfile:
        """A rank of a worker group, on its devices."""
        sizes = group.call("memory_bytes")
        state, peak = (max(of_rank[i] for of_rank in sizes) for i in (0, 1))
        return InstanceProfile(
            num_devices=len(placed.devices) // placed.num_ranks,
            num_ranks=placed.num_ranks,
            device_name=self.cluster.devices[placed.devices[0]].product if placed.devices else "",
            points=(),
            state_bytes=state,
            work_bytes=max(0, peak - state),
        )

    def _stage_profile(self, stage: Stage, fits: Mapping[tuple[str, int], FittedTimes]) -> StageProfile:
        """By default a rank computes on the first of its devices, so one with several devices takes as long on one."""
        group, name = stage.worker, stage.name
        mine = {num_ranks: fit for (fitted, num_ranks), fit in fits.items() if fitted == name}
        onload_s, offload_s = None, None
        if switches_s := self._switches_s[group]:
            onload_s, offload_s = (min(filter(None, times), default=0.0) for times in zip(*switches_s, strict=True))
        instances = {}
        for (owner, num_ranks, span), instance in self._instances.items():
            if owner != group:
                continue
            fit = mine[num_ranks]
            instance = replace(
                instance,
                points=fit.points,
                max_items=self._engine_rooms.get((name, num_ranks), 0),
                step_s=fit.step_s,
                onload_s=onload_s,
                offload_s=offload_s,
            )
            for num_devices in {span} if stage.devices_per_rank else {min(span, 1), span}:
                instances[num_devices, num_ranks] = replace(instance, num_devices=num_devices)
        errors = "; ".join(f"{num_ranks} ranks: {fit.describe()}" for num_ranks, fit in mine.items())
        fewest = min(mine)
        if fewest > 1 and (name, fewest) in self._samples_alone:
            errors += f"; 1 rank: {fewest} ranks without their collectives"
            instances |= self._with_fewer_ranks(name, fewest, instances)
        cycle = next((cycle for cycle in self.graph.cycles() if name in cycle), ())
        synced = (size for edge, size in self._synced_bytes.items() if group in (edge.source, edge.target))
        is_engine = any(engine == name for engine, _ in self._engine_rooms)
        return StageProfile(
            batching="continuous" if is_engine else "sum",
            costs=spread_of(self._item_seconds[name]),
            instances=tuple(instance for _, instance in sorted(instances.items())),
            rounds=max((self._rounds[other] for other in cycle), default=1),
            weights_bytes=max(synced, default=0),
            source=f"measured on {self.cluster.describe()}, {platform.processor() or platform.machine()}, "
            f"{date.today().isoformat()}, torch {torch.__version__}: {errors}",
        )

    def _with_fewer_ranks(
        self, name: str, fewest: int, instances: Mapping[tuple[int, int], InstanceProfile]
    ) -> dict[tuple[int, int], InstanceProfile]:
        """Estimated time of a single rank: its share of the time of the fewest observed ranks, without collectives. Two
        ranks have collectives, and are assumed to spend as long in them as more ranks."""
        alone = fit_stage(self._samples_alone[name, fewest])
        profiles = {}
        for (num_devices, num_ranks), seen in instances.items():
            if num_ranks == fewest:
                profiles[num_devices, 2] = replace(seen, num_ranks=2)
                profiles[num_devices, 1] = replace(seen, num_ranks=1, points=alone.points, step_s=alone.step_s)
        return profiles

    def _links(self) -> Links:
        """Between processes: the time of a hand-over, and the bandwidth of a weight sync."""
        hop_s = median(self._hops_s) if self._hops_s else 0.0
        sync_s = median(self._syncs_s)
        num_bytes = max(self._synced_bytes.values(), default=0)
        if not num_bytes or sync_s <= 0:
            return replace(self.cluster.links, latency_s=hop_s)
        rate = num_bytes / sync_s
        return replace(self.cluster.links, latency_s=hop_s, node_bytes_per_s=rate, network_bytes_per_s=rate)


def _group(worker: str) -> str:
    """`actor/1` -> `actor`"""
    return worker.rpartition("/")[0]


def _seconds(spans: Sequence[Span]) -> float:
    return sum(span.duration_s for span in spans)


def _collective_seconds(spans: Sequence[Span]) -> float:
    return sum(span.collective_s for span in spans)


def _without_collectives(span: Span) -> Span:
    return replace(span, duration_ns=span.duration_ns - span.collective_ns, collective_ns=0)


def _usual_size(chunks: Sequence[Span]) -> int:
    return Counter(span.num_items for span in chunks).most_common(1)[0][0]


def _chain(cycle: Sequence[str], compute: Mapping[str, Mapping[str, Sequence[Span]]]) -> dict[str, Sequence[Span]]:
    """Stage -> spans of the rank that took longest in a cycle, from the first of its chunks to the last; if the stages
    have different numbers of ranks, of each stage's busiest rank."""
    by_rank: dict[str, dict[str, Sequence[Span]]] = defaultdict(dict)
    for name in cycle:
        for worker, mine in compute[name].items():
            by_rank[worker.rpartition("/")[2]][name] = mine
    if any(len(stages) < len(cycle) for stages in by_rank.values()):
        return {name: max(compute[name].values(), key=_seconds) for name in cycle}
    return max(by_rank.values(), key=_wall_seconds)


def _wall_seconds(chain: Mapping[str, Sequence[Span]]) -> float:
    spans = [span for mine in chain.values() for span in mine]
    return max(span.start_s + span.duration_s for span in spans) - min(span.start_s for span in spans)


def _by_worker(spans: Sequence[Span]) -> dict[str, list[Span]]:
    by_worker: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_worker[span.worker].append(span)
    return by_worker


def _switch_seconds(group: str, spans: Mapping[str, Sequence[Span]]) -> tuple[float, float]:
    """Onload (including the grant of the lease, but not the offloads it waited for) and offload: the first of each on
    the slowest rank; 0.0 if state stayed."""
    onloads_s, offloads_s = [0.0], [0.0]
    of_ranks = [mine for worker, mine in spans.items() if _group(worker) == group]
    devices = {device for mine in of_ranks for span in mine for device in span.devices}
    for mine in of_ranks:
        offloads_s += [span.duration_s for span in _switches(mine, "offload")][:1]
        for onload in _switches(mine, "onload")[:1]:
            waits = [wait for wait in _switches(mine, "wait for lease") if wait.start_ns <= onload.start_ns]
            onloads_s.append(onload.duration_s + sum(_granting_seconds(wait, devices, spans) for wait in waits[-1:]))
    return max(onloads_s), max(offloads_s)


def _switches(spans: Sequence[Span], name: str) -> list[Span]:
    return [span for span in spans if span.category == LEASE and span.name == name]


def _granting_seconds(wait: Span, devices: set[str], spans: Mapping[str, Sequence[Span]]) -> float:
    """A wait for a lease on these devices, counted from when they are idle, without the longest offload that began
    then."""
    others = [span for of_worker in spans.values() for span in of_worker]
    end_ns = wait.start_ns + wait.duration_ns
    busy = (span for span in others if span.category == COMPUTE_SPAN and not devices.isdisjoint(span.devices))
    ends_ns = [end for span in busy if (end := span.start_ns + span.duration_ns) <= end_ns]
    free_ns = max([wait.start_ns, *ends_ns])
    leaving = [span.duration_ns for span in _switches(others, "offload") if free_ns <= span.start_ns <= end_ns]
    return max(0, end_ns - free_ns - max(leaving, default=0)) * 1e-9


def _sync_seconds(spans: Mapping[str, Sequence[Span]]) -> float:
    """Publishing on the slowest rank plus receiving on the slowest."""
    slowest: dict[str, float] = defaultdict(float)
    for mine in spans.values():
        for name in {span.name for span in mine if span.category == SYNC_SPAN}:
            slowest[name] = max(slowest[name], sum(span.duration_s for span in mine if span.name == name))
    return sum(slowest.values())


def _hops(graph: FlowGraph, compute: Mapping[str, Mapping[str, Sequence[Span]]], plan: Plan) -> Iterator[float]:
    """Seconds from the end of producing a hand-over to the start of its use, if there is no lease in between."""
    for source, targets in graph.successors().items():
        ends = [span.start_s + span.duration_s for mine in compute[source].values() for span in mine]
        for target in targets:
            starts = [span.start_s for mine in compute[target].values() for span in mine]
            if plan.stage(target).devices or not starts:
                continue
            before = [end for end in ends if end <= min(starts)]
            if before:
                yield min(starts) - max(before)
