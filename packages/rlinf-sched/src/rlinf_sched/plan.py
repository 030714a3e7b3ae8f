"""The execution plan: for every stage of a flow its devices, ranks, granularity, offload and turn. Plain data, JSON.

A valid plan cannot deadlock on devices. Turns never decrease along the flow, and two stages on one device have
different turns unless they form a cycle. So whatever a stage waits for (an item, or a device that another stage holds)
belongs to an earlier turn, or precedes it in the flow within the same turn, and waits can never form a cycle. This
requires that no writer waits for channel *capacity* behind a reader whose turn has not come: an executor lets a waiting
writer release its devices meanwhile (as rlinf-workers does), or gives such channels capacity for a whole step.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, get_args

from rlinf_sched import strict_json
from rlinf_sched.cluster import Cluster
from rlinf_sched.errors import PlanError, did_you_mean, raise_problems
from rlinf_sched.flow_graph import FlowGraph, Stage

Mode = Literal["collocated", "disaggregated", "hybrid"]
"""The shape of a plan."""
ALL_MODES: tuple[Mode, ...] = get_args(Mode)

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """The placement of one stage.

    Example: the trainer of a collocated plan on four devices, in the flow's third turn:
        StagePlan(stage="actor", devices=(0, 1, 2, 3), num_ranks=4, granularity=0, offload=True, turn=2)
    """

    stage: str
    devices: tuple[int, ...]
    """Indices into the cluster, all of one kind; empty for a stage that needs no device. The same for every stage of a
    worker group."""
    num_ranks: int
    """Processes of the worker group, at least 1. With devices: a multiple of their number (ranks share a device: rank r
    is on `devices[r // (num_ranks // len(devices))]`) or a divisor of it (a rank spans the next several devices)."""
    granularity: int
    """Items per hand-over; 0 = the whole batch in one."""
    offload: bool
    """True: the stage's state is offloaded when its turn ends and onloaded when the next one begins."""
    turn: int
    """Order in which stages that share a device hold it, from 0; equal for the stages of one cycle."""
    num_ranks_per_replica: int = 1
    """Consecutive ranks that hold one copy of the model together (tensor, pipeline or expert parallel); divides
    num_ranks. Items go to replicas. The planner and the simulator only support 1."""

    @property
    def num_replicas(self) -> int:
        return self.num_ranks // self.num_ranks_per_replica

    @property
    def place(self) -> tuple[tuple[int, ...], int, int]:
        """What the processes of its worker group depend on: devices, ranks, and ranks of a replica. Plans with equal
        places can share the processes."""
        return self.devices, self.num_ranks, self.num_ranks_per_replica

    def devices_of(self, rank: int) -> tuple[int, ...]:
        """Devices of one rank; none for a stage on the host."""
        num_devices = len(self.devices)
        if self.num_ranks >= num_devices:
            return self.devices[rank * num_devices // self.num_ranks :][:1]
        span = num_devices // self.num_ranks
        return self.devices[rank * span : (rank + 1) * span]


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePrediction:
    """The prediction for one stage in a step; if steps overlap, means over the steady state."""

    start_s: float
    """Start of its first hand-over, counted from the moment at which the step may begin."""
    end_s: float
    """End of its last hand-over; later than `Prediction.step_s` if generation runs ahead."""
    busy_s: float
    """Seconds that the busiest of its instances computes."""
    switch_s: float
    """Seconds of onload and offload."""
    peak_bytes: int
    """Peak bytes on the first of its devices, whichever stage computes there then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerUp:
    """The best plan of another kind, and why it is worse."""

    mode: Mode
    step_s: float
    reason: str
    """The term in which it is worse, as text: "actor waits 3.1 s for rollout's longest answers"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The prediction for a plan."""

    step_s: float
    """Simulated seconds of a step."""
    estimate_s: float | None
    """Seconds of a step as estimated by the search, without simulation; None for a plan found by local search."""
    sync_s: float
    """Seconds of a step's weight syncs."""
    stages: Mapping[str, StagePrediction]
    runners_up: tuple[RunnerUp, ...] = ()
    max_staleness: int = 0
    """Steps that generation runs ahead of training in the prediction; a flow that allows fewer refuses the plan."""
    num_draws: int = 0
    """Number of steps with drawn costs over which this is the mean; 0: one step with typical costs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a flow runs on a cluster. Made by `plan_for_mode`, by the planner, or by hand; checked by `validate`."""

    flow: str
    """Name of the flow graph it belongs to."""
    mode: Mode
    """collocated: all worker groups share the same devices. disaggregated: training and generation share none.
    hybrid: any mix."""
    stages: tuple[StagePlan, ...]
    reason: str
    """Why this plan was chosen, as text."""
    prediction: Prediction | None = None
    """The planner's prediction; None if there is none."""

    def stage(self, name: str) -> StagePlan:
        """The plan of the stage of that name.

        Raises:
            PlanError: there is none; says which there are.
        """
        for stage_plan in self.stages:
            if stage_plan.stage == name:
                return stage_plan
        raise PlanError(f"plan has no stage {name!r}{did_you_mean(name, [s.stage for s in self.stages])}")

    def validate(self, graph: FlowGraph, cluster: Cluster) -> None:
        """Checks that the plan fits the flow and the cluster.

        Raises:
            PlanError: with every mistake found, one a line where there are several, each naming `plan.<stage>.<field>`.
            FlowError: the graph itself is invalid.
        """
        graph.validate()
        if self.flow != graph.name:
            raise PlanError(f"plan.flow={self.flow!r}, but the flow is {graph.name!r}; make a plan for this flow")
        if self.mode not in ALL_MODES:
            raise PlanError(f"plan.mode={self.mode!r}{did_you_mean(self.mode, ALL_MODES)}")
        subject = f"plan for flow {self.flow!r}"
        raise_problems(PlanError, subject, _coverage_problems(self, graph))
        raise_problems(PlanError, subject, _placement_problems(self, graph, cluster))
        raise_problems(PlanError, subject, _turn_problems(self, graph))

    def steps_ahead(self, graph: FlowGraph) -> int:
        """Steps by which generation runs ahead of training: as predicted, or as many as the flow allows if nothing was
        predicted."""
        return graph.max_staleness if self.prediction is None else self.prediction.max_staleness

    def to_json(self) -> str:
        """The plan as JSON text: keys sorted, versioned ("format": 1), equal plans give equal text."""
        return strict_json.dump(self, format_version=FORMAT_VERSION)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads what `to_json` wrote, or a person; does not call `validate`.

        Raises:
            PlanError: malformed JSON, unknown or missing keys, wrong types; names the place
                (`plan.stages[2].granularity`).
        """
        return strict_json.load(text, cls, root="plan", format_version=FORMAT_VERSION, error=PlanError)


def _coverage_problems(plan: Plan, graph: FlowGraph) -> Iterator[str]:
    planned = [stage_plan.stage for stage_plan in plan.stages]
    names = [stage.name for stage in graph.stages]
    for name in dict.fromkeys(planned):
        if name not in names:
            yield f"plan.{name}: the flow has no such stage{did_you_mean(name, names)}"
        if planned.count(name) > 1:
            yield f"plan.{name} is there {planned.count(name)} times; plan each stage once"
    for name in names:
        if name not in planned:
            yield f"plan.{name} is missing; every stage of the flow must be planned"


def _placement_problems(plan: Plan, graph: FlowGraph, cluster: Cluster) -> Iterator[str]:
    for stage_plan in plan.stages:
        yield from _device_problems(stage_plan, graph, cluster)
        yield from _rank_problems(stage_plan, graph.stage(stage_plan.stage))
        yield from _span_problems(stage_plan, graph.stage(stage_plan.stage))
        yield from _replica_problems(stage_plan, graph.stage(stage_plan.stage))
        yield from _granularity_problems(stage_plan, graph)
    for worker, names in graph.workers.items():
        first = plan.stage(names[0])
        for name in names[1:]:
            other = plan.stage(name)
            for field in ("devices", "num_ranks", "num_ranks_per_replica"):
                mine, theirs = getattr(other, field), getattr(first, field)
                if mine != theirs:
                    yield (
                        f"plan.{name}.{field}={_show(mine)} differs from plan.{first.stage}.{field}={_show(theirs)}; "
                        f"both run in the processes of worker group {worker!r}, so use one value"
                    )
        if first.num_ranks_per_replica > 1 and len(names) > 1:
            yield (
                f"plan.{first.stage}.num_ranks_per_replica={first.num_ranks_per_replica}: worker group {worker!r} has "
                f"the stages {', '.join(names)}, whose chunks could come in another order on each rank of a replica; "
                "use 1, or a worker group for each stage"
            )
    yield from _mode_problems(plan, graph)


def _device_problems(stage_plan: StagePlan, graph: FlowGraph, cluster: Cluster) -> Iterator[str]:
    devices = stage_plan.devices
    where = f"plan.{stage_plan.stage}.devices={_show(devices)}"
    needs_device = graph.stage(stage_plan.stage).needs_device
    if needs_device and not devices:
        yield f"{where}: the stage needs a device; give it at least one, or set needs_device=False on the stage"
    if not needs_device and devices:
        yield f"{where}: the stage has needs_device=False and runs on the host; use []"
    for device, count in Counter(devices).items():
        if count > 1:
            yield f"{where}: device {device} is named {count} times; name it once"
    num_devices = cluster.num_devices
    unknown = [device for device in dict.fromkeys(devices) if not 0 <= device < num_devices]
    for device in unknown:
        yield f"{where}: device {device} does not exist; this cluster has {_device_list(cluster)}"
    if not unknown:
        kinds = sorted({cluster.devices[device].kind for device in devices})
        if len(kinds) > 1:
            yield f"{where} mixes {' and '.join(kinds)} devices; a worker group computes on one kind"


def _device_list(cluster: Cluster) -> str:
    n = cluster.num_devices
    indices = ", ".join(map(str, range(n))) if n <= 8 else f"0 to {n - 1}"
    return f"{n} device{'s' if n > 1 else ''} ({indices})"


def _rank_problems(stage_plan: StagePlan, stage: Stage) -> Iterator[str]:
    num_ranks, num_devices = stage_plan.num_ranks, len(stage_plan.devices)
    num_parts = stage.num_parts if stage_plan.num_ranks_per_replica == 1 else 0
    where = f"plan.{stage_plan.stage}.num_ranks={num_ranks}"
    if num_ranks < 1:
        yield f"{where} must be at least 1"
    elif num_devices and num_ranks % num_devices and num_devices % num_ranks:
        first = [f"{num_devices} (one rank per device)"] if num_parts % num_devices == 0 else []
        parts = f", because the ranks also have to divide its {num_parts} parts" if num_parts else ""
        yield (
            f"{where} is neither a multiple nor a divisor of its {num_devices} devices; "
            f"use {' or '.join([*first, *_neighbours(num_ranks, num_devices, num_parts)])}{parts}"
        )


def _span_problems(stage_plan: StagePlan, stage: Stage) -> Iterator[str]:
    """A rank that computes on several devices gets exactly that many; one that computes on one may share it."""
    span, num_ranks, num_devices = stage.devices_per_rank, stage_plan.num_ranks, len(stage_plan.devices)
    if not span or not num_devices or num_ranks < 1 or max(1, num_devices // num_ranks) == span:
        return
    if num_devices % span:
        near = " or ".join(str(n) for n in (num_devices // span * span, (num_devices // span + 1) * span) if n)
        yield (
            f"plan.{stage.name}.devices={_show(stage_plan.devices)}: {num_devices} devices are not a multiple of the "
            f"{span} that a rank computes on; use {near}"
        )
    else:
        yield (
            f"plan.{stage.name}.num_ranks={num_ranks} on {num_devices} devices, but a rank computes on {span} of them; "
            f"use {num_devices // span}"
        )


def _replica_problems(stage_plan: StagePlan, stage: Stage) -> Iterator[str]:
    num_ranks, size = stage_plan.num_ranks, stage_plan.num_ranks_per_replica
    where = f"plan.{stage_plan.stage}.num_ranks_per_replica={size}"
    if size < 1:
        yield f"{where} must be at least 1"
    elif num_ranks >= 1 and num_ranks % size:
        divisors = [str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        yield f"{where} does not divide num_ranks={num_ranks}; use {' or '.join(divisors)}"
    elif num_ranks >= 1 and stage.num_parts % stage_plan.num_replicas:
        replicas = f", {stage_plan.num_replicas} replicas," if size > 1 else ""
        yield (
            f"plan.{stage_plan.stage}.num_ranks={num_ranks}{replicas} does not divide the stage's work, which comes in "
            f"{stage.num_parts} parts; use a divisor of it"
        )


def _neighbours(num_ranks: int, num_devices: int, num_parts: int) -> list[str]:
    """The allowed numbers of ranks nearest below and above."""
    allowed = [n for n in range(1, num_devices) if num_devices % n == 0]
    allowed += [num_devices * k for k in range(2, num_ranks // num_devices + 2)]
    allowed = [n for n in allowed if num_parts % n == 0]
    return [str(n) for n in sorted(allowed, key=lambda n: (abs(n - num_ranks), n))[:2]]


def _granularity_problems(stage_plan: StagePlan, graph: FlowGraph) -> Iterator[str]:
    stage, granularity = graph.stage(stage_plan.stage), stage_plan.granularity
    where = f"plan.{stage.name}.granularity={granularity}"
    multiple = stage.item_multiple
    cycle = next((cycle for cycle in graph.cycles() if stage.name in cycle), None)
    if granularity < 0:
        yield f"{where} must not be negative; use 0 for the whole batch"
    elif granularity % multiple:
        near = sorted({max(multiple, granularity // multiple * multiple), (granularity // multiple + 1) * multiple})
        yield (
            f"{where} is not a multiple of the stage's item_multiple={multiple}; "
            f"use {' or '.join(map(str, near))}, or 0 for the whole batch"
        )
    elif granularity == 0 and cycle:
        yield (
            f"{where}: the stage is part of the cycle {' <-> '.join(cycle)} and cannot wait for the whole batch, which "
            f"only ends after it; use {multiple} or a multiple of it"
        )
    elif granularity and stage.whole_batch:
        yield f"{where}: the stage has whole_batch=True; use 0"


def _mode_problems(plan: Plan, graph: FlowGraph) -> Iterator[str]:
    """The mode must be correct, because people and reports rely on its name."""
    devices_of = {worker: plan.stage(names[0]).devices for worker, names in graph.workers.items()}
    training, generation = graph.training_groups, graph.generation_groups
    if plan.mode == "disaggregated":
        for worker in training:
            for other in generation:
                shared = sorted(set(devices_of[worker]) & set(devices_of[other]))
                if shared:
                    yield (
                        f"plan.mode='disaggregated', but worker groups {worker!r} (training) and {other!r} "
                        f"(generation) share device {' and '.join(map(str, shared))}; use mode 'hybrid' or give them "
                        "devices of their own"
                    )
    if plan.mode == "collocated":
        first, *others = [*generation, *training] or [""]
        for worker in others:
            if set(devices_of[worker]) != set(devices_of[first]):
                yield (
                    f"plan.mode='collocated', but worker group {worker!r} has devices {_show(devices_of[worker])} and "
                    f"{first!r} has {_show(devices_of[first])}; use mode 'hybrid' or give all groups the same devices"
                )


def _turn_problems(plan: Plan, graph: FlowGraph) -> Iterator[str]:
    for stage_plan in plan.stages:
        if stage_plan.turn < 0:
            yield f"plan.{stage_plan.stage}.turn={stage_plan.turn} must not be negative"
    together = {name: i for i, turn in enumerate(graph.turns()) for name in turn}
    for a, b in combinations(plan.stages, 2):
        if together[a.stage] == together[b.stage]:
            if a.turn != b.turn:
                yield (
                    f"plan.{b.stage}.turn={b.turn} differs from plan.{a.stage}.turn={a.turn}; "
                    "they feed each other in a cycle and must hold their devices at the same time, so use one turn"
                )
        elif a.turn == b.turn and set(a.devices) & set(b.devices):
            device = min(set(a.devices) & set(b.devices))
            yield (
                f"plan.{b.stage}.turn={b.turn} equals plan.{a.stage}.turn, but both use device {device} and are not in "
                "one cycle; give them different turns"
            )
    for source, targets in graph.successors().items():
        for target in targets:
            before, after = plan.stage(source), plan.stage(target)
            if together[source] != together[target] and before.turn > after.turn:
                yield (
                    f"plan.{target}.turn={after.turn} comes before plan.{source}.turn={before.turn}, but {target!r} "
                    f"reads what {source!r} writes; turns must not decrease along the flow"
                )


def _show(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
