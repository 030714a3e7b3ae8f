"""Policy within a step: as a rollout's tail drains, its devices go to the stages after it, one legal group at a time.

The policy knows which items are done and how many each engine holds, not how long those will last. An engine that runs
dry gives its devices up. Once the unfinished items fit into one engine fewer, the emptiest engine sends its items on
(their KV cache over the network link) and is dry. An instance of a later stage, at the parallel size that the plan
gives it, begins as soon as all its devices are free and an item is ready; between hand-overs it gives them up again. So
a training stage accumulates gradients early; its optimizer step still waits for the last item.

`simulate_long_tail` is a simulator of its own, event by event, for chains of stages that begin with a rollout. It knows
nothing of the waiting rules of leases, which `rlinf_sched.simulator` models, and agrees with it where the policy hands
nothing over.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import numpy as np

from rlinf_sched.errors import ProblemError
from rlinf_sched.plan import Plan
from rlinf_sched.problem import Problem
from rlinf_sched.simulator import Timeline, simulate


@dataclass(frozen=True, kw_only=True, slots=True)
class LongTailPolicy:
    """How eagerly a draining rollout gives up devices."""

    hand_over: bool = True
    """False: a stage that shares devices with an earlier one waits for its end, as a static plan does."""
    fill: float = 1.0
    """An engine is emptied once all unfinished items take at most this share of the room in the other engines. 0: none
    is. A fuller engine is slower for each item, so the tail itself lasts longer with a larger share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongTailOutcome:
    """How a step went."""

    step_s: float
    """Seconds of the step, weight syncs included."""
    rollout_end_s: float
    first_hand_over_s: float
    """Seconds until the first later stage began on a device that the rollout had."""
    num_moved: int
    """Items sent to another engine."""
    overhead: float
    """Share of the devices' time in a step that went into sending items, offload and onload."""


def simulate_long_tail(
    problem: Problem, plan: Plan, policy: LongTailPolicy, *, seed: int | None = None
) -> LongTailOutcome:
    """One step of the plan under the policy.

    Args:
        problem: its flow is a chain whose first stage batches continuously.
        plan: a plan of that flow.
        seed: as for `simulate`.

    Raises:
        ProblemError: another flow; says what was expected.
        PlanError: the plan does not fit the problem.
    """
    timeline = simulate(problem, plan, seed=seed)
    return _Step(problem, plan, policy, seed).run(after_s=_sync_seconds(timeline))


def best_long_tail(
    problem: Problem, plans: Sequence[Plan], *, fills: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
) -> tuple[Plan, LongTailPolicy]:
    """The plan and the policy with the shortest step at typical costs; to be asked once, before the run.

    Args:
        plans: to choose from, for example the best static plan and what `parallel_choices` makes of it.
    """
    choices = [(plan, LongTailPolicy(fill=fill)) for plan in plans for fill in fills]
    return min(choices, key=lambda choice: simulate_long_tail(problem, *choice).step_s)


def _sync_seconds(timeline: Timeline) -> float:
    """Seconds that weight syncs take after the last computation of the step."""
    sync = np.concatenate([timeline.of(name, "sync") for name in timeline.stages])
    rest = np.setdiff1d(np.concatenate([timeline.of(name, kind) for name in timeline.stages
                                        for kind in ("compute", "step")]), sync)  # fmt: skip
    return max(0.0, float(timeline.step_end_s[-1] - timeline.end_s[rest].max()))


@dataclass(slots=True)
class _Engine:
    devices: tuple[int, ...]
    progress: float = 0.0
    """What an item that was inside from the beginning would have done, in items of mean cost."""
    since_s: float = 0.0
    version: int = 0
    inside: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (progress at which it leaves, item)."""
    coming: int = 0
    """Items on their way here."""
    dry: bool = False


class _Stage:
    """One stage after the rollout."""

    def __init__(self, problem: Problem, plan: Plan, name: str, costs: Callable[[str], np.ndarray]) -> None:
        placed, record, profile = plan.stage(name), problem.flow.stage(name), problem.profile(name)
        self.name = name
        self.places = [placed.devices_of(rank) for rank in range(placed.num_ranks)]
        self.instance = problem.instance(placed)
        self.costs = costs(name)
        self.longest = profile.batching == "longest"
        most = min(-(-problem.num_items // placed.num_ranks), self.instance.max_items or problem.num_items)
        self.size = min(max(placed.granularity, record.item_multiple), most) if placed.granularity else most
        self.waits_for_all = record.whole_batch
        self.ready: deque[int] = deque()
        self.busy = [False] * len(self.places)
        self.num_done = 0
        self.num_inside = 0
        switch_s = problem.switch_s(name, self.instance, len(placed.devices)) if placed.offload else (0.0, 0.0)
        self.onload_s, self.offload_s = switch_s

    def take(self, num_items: int) -> list[int]:
        """The next hand-over; empty while there is none."""
        if self.waits_for_all and self.num_done + len(self.ready) + self.num_inside < num_items:
            return []
        all_here = self.num_done + len(self.ready) + self.num_inside == num_items
        if len(self.ready) < self.size and not all_here:
            return []
        return [self.ready.popleft() for _ in range(min(self.size, len(self.ready)))]

    def longest_first(self) -> None:
        """Puts what is ready in the order in which it balances best; an answer's length is known once it is done."""
        self.ready = deque(sorted(self.ready, key=lambda item: -self.costs[item]))

    def seconds(self, items: list[int]) -> float:
        costs = self.costs[items]
        return self.instance.seconds(len(items)) * float(costs.max() if self.longest else costs.mean())


class _Step:
    def __init__(self, problem: Problem, plan: Plan, policy: LongTailPolicy, seed: int | None) -> None:
        names = [name for names in problem.flow.turns() for name in names]
        _check_chain(problem, names)
        self.problem, self.policy = problem, policy
        self.num_items = problem.num_items

        def costs(name: str) -> np.ndarray:
            spread = problem.profile(name).costs
            return spread.typical(self.num_items) if seed is None else spread.draw(self.num_items, seed)

        rollout, self.later = names[0], [_Stage(problem, plan, name, costs) for name in names[1:]]
        engines = plan.stage(rollout)
        places = [engines.devices_of(rank) for rank in range(engines.num_ranks)]
        instance = problem.instance(plan.stage(rollout))
        share = -(-self.num_items // len(places))
        self.room = min(instance.max_items or share, share)
        self.rate_s = [0.0, *(instance.seconds(n) for n in range(1, self.room + 1))]
        self.rollout_offload_s = _Stage(problem, plan, rollout, costs).offload_s
        links = problem.cluster.links
        self.move_s = links.latency_s + instance.item_work_bytes / links.network_bytes_per_s
        self.pass_s = [
            links.latency_s + max((problem.flow.item_bytes.get(c, 0) for c in problem.flow.stage(n).reads), default=0)
            / links.network_bytes_per_s for n in names[1:]
        ]  # fmt: skip
        self.work = costs(rollout)
        self.waiting = deque(range(self.num_items))
        self.engines = [_Engine(devices) for devices in places]
        self.held = {device for engine in self.engines for device in engine.devices}
        self.rollout_devices = frozenset(self.held)
        self.last_on: dict[int, int] = {}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.num_events, self.now, self.end_s, self.rollout_end_s = 0, 0.0, 0.0, 0.0
        self.first_hand_over_s = float("inf")
        self.overhead_s, self.num_moved = 0.0, 0

    def run(self, after_s: float) -> LongTailOutcome:
        for _ in range(self.room):
            for engine in self.engines:
                if self.waiting:
                    item = self.waiting.popleft()
                    heapq.heappush(engine.inside, (float(self.work[item]), item))
        for engine in self.engines:
            self._next_end(engine)
        self._release_dry()
        while self.events:
            self.now, _, act = heapq.heappop(self.events)
            act()
            if not self.events or self.events[0][0] > self.now:
                self._start()
        step_s = self.end_s + after_s
        return LongTailOutcome(
            step_s=step_s,
            rollout_end_s=self.rollout_end_s,
            first_hand_over_s=self.first_hand_over_s,
            num_moved=self.num_moved,
            overhead=self.overhead_s / (step_s * len(self.problem.cluster.compute_devices)),
        )

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (seconds, self.num_events, act))
        self.num_events += 1

    # The rollout.

    def _advance(self, engine: _Engine) -> None:
        if engine.inside:
            engine.progress += (self.now - engine.since_s) / self.rate_s[len(engine.inside)]
        engine.since_s = self.now

    def _next_end(self, engine: _Engine) -> None:
        engine.version += 1
        if engine.inside:
            left = max(engine.inside[0][0] - engine.progress, 0.0)
            version = engine.version
            self._at(self.now + left * self.rate_s[len(engine.inside)], lambda: self._item_ends(engine, version))

    def _item_ends(self, engine: _Engine, version: int) -> None:
        if version != engine.version:
            return
        self._advance(engine)
        _, item = heapq.heappop(engine.inside)
        self.rollout_end_s = self.now
        self._hand_on(0, [item])
        if self.waiting:
            following = self.waiting.popleft()
            heapq.heappush(engine.inside, (engine.progress + float(self.work[following]), following))
        self._next_end(engine)
        if self.policy.hand_over and not self.waiting:
            self._consolidate()
        self._release_dry()

    def _consolidate(self) -> None:
        """Empties the emptiest engines as far as the others have room."""
        while True:
            active = [engine for engine in self.engines if not engine.dry and (engine.inside or engine.coming)]
            num_left = sum(len(engine.inside) + engine.coming for engine in active)
            if len(active) < 2 or num_left > self.policy.fill * self.room * (len(active) - 1):
                return
            source = min(active, key=lambda engine: len(engine.inside) + engine.coming)
            if source.coming:  # it has just been filled
                return
            self._advance(source)
            others = [engine for engine in active if engine is not source]
            for leaves_at, item in source.inside:
                target = min(others, key=lambda engine: len(engine.inside) + engine.coming)
                target.coming += 1
                left = leaves_at - source.progress
                self._at(self.now + self.move_s, lambda t=target, i=item, w=left: self._arrives(t, i, w))
                self.overhead_s += self.move_s * len(source.devices)
                self.num_moved += 1
            source.inside = []
            self._next_end(source)

    def _arrives(self, engine: _Engine, item: int, left: float) -> None:
        self._advance(engine)
        engine.coming -= 1
        heapq.heappush(engine.inside, (engine.progress + left, item))
        self._next_end(engine)

    def _release_dry(self) -> None:
        for engine in self.engines:
            if not engine.dry and not engine.inside and not engine.coming and not self.waiting:
                engine.dry = True
                self.overhead_s += self.rollout_offload_s * len(engine.devices)
                pause_s = self.rollout_offload_s + (self.move_s if self.num_moved else 0.0)
                self._at(self.now + pause_s, lambda devices=engine.devices: self.held.difference_update(devices))

    # The stages after it.

    def _hand_on(self, place: int, items: list[int]) -> None:
        """Items go to the stage at that place; after the last one they are through."""
        if place < len(self.later):
            self._at(self.now + self.pass_s[place], lambda: self._receive(self.later[place], items))

    def _receive(self, stage: _Stage, items: list[int]) -> None:
        stage.ready.extend(items)
        if self.policy.hand_over:
            stage.longest_first()

    def _may_start(self, place: int) -> bool:
        """Whether the stage may start; by the static rule an earlier stage may keep the devices."""
        if self.policy.hand_over:
            return True
        stage = self.later[place]
        mine = {device for devices in stage.places for device in devices}
        own = {device for rank, devices in enumerate(stage.places) if stage.busy[rank] for device in devices}
        earlier = [other for other in self.later[:place] if not mine.isdisjoint(d for p in other.places for d in p)]
        return (mine & self.held) <= own and all(other.num_done == self.num_items for other in earlier)

    def _start(self) -> None:
        """Starts hand-overs of all stages on the devices that are free, those of earlier stages first."""
        for place, stage in enumerate(self.later):
            if not stage.ready or not self._may_start(place):
                continue
            for rank, devices in enumerate(stage.places):
                if not stage.ready:
                    break
                if stage.busy[rank] or not self.held.isdisjoint(devices):
                    continue
                items = stage.take(self.num_items)
                if not items:
                    break
                self._run(place, rank, devices, items)

    def _run(self, place: int, rank: int, devices: tuple[int, ...], items: list[int]) -> None:
        stage = self.later[place]
        switch_s = 0.0
        if any(self.last_on.get(device) != place for device in devices):
            left = {self.last_on[device] for device in devices if self.last_on.get(device, place) != place}
            switch_s = stage.onload_s + max((self.later[other].offload_s for other in left), default=0.0)
        for device in devices:
            self.last_on[device] = place
        if not self.rollout_devices.isdisjoint(devices):
            self.first_hand_over_s = min(self.first_hand_over_s, self.now)
        self.overhead_s += switch_s * len(devices)
        self.held.update(devices)
        stage.busy[rank] = True
        stage.num_inside += len(items)
        self._at(self.now + switch_s + stage.seconds(items), lambda: self._done(place, rank, devices, items))

    def _done(self, place: int, rank: int, devices: tuple[int, ...], items: list[int]) -> None:
        stage = self.later[place]
        self.held.difference_update(devices)
        stage.busy[rank] = False
        stage.num_inside -= len(items)
        stage.num_done += len(items)
        self._hand_on(place + 1, items)
        step_s = stage.instance.step_s if stage.num_done == self.num_items else 0.0
        self.end_s = max(self.end_s, self.now + step_s)


def least_step_s(problem: Problem) -> float:
    """No schedule of a step is shorter, static or not: every item at each stage's most efficient parallel size and
    batch, on all devices without a pause; or the longest item alone through its stages."""
    work = chain = 0.0
    for name, profile in problem.profiles.stages.items():
        places = [instance for instance in profile.instances if instance.num_devices]
        if places:
            sizes = {i: range(1, min(i.max_items or problem.num_items, problem.num_items) + 1) for i in places}
            work += min(i.num_devices * i.seconds(n) / n for i in places for n in sizes[i]) * problem.num_items
        longest = float(problem.profile(name).costs.typical(problem.num_items).max())
        chain = max(chain, longest * min(instance.seconds(1) for instance in profile.instances))
    return max(work / len(problem.cluster.compute_devices), chain)


def parallel_choices(problem: Problem, plan: Plan) -> list[Plan]:
    """The plan, and what it becomes with other legal parallel sizes of its stages on the same devices, with hand-overs
    of as few items as allowed; only those that fit into memory and that the static simulator can run."""
    options = []
    for placed in plan.stages:
        asked = problem.flow.devices_per_rank(problem.flow.stage(placed.stage).worker)
        spans = [i.num_devices for i in problem.profile(placed.stage).instances if i.num_devices]
        spans = [span for span in spans if not asked or span == asked]
        most = problem.profile(placed.stage).max_instances or len(placed.devices)
        fitting = [s for s in spans if len(placed.devices) % s == 0 and len(placed.devices) // s <= most]
        options.append([
            replace(placed, num_ranks=len(placed.devices) // span, granularity=min(problem.choices(placed.stage)))
            for span in fitting
        ] if placed.devices and fitting else [placed])  # fmt: skip
    found = [replace(plan, stages=stages, prediction=None) for stages in product(*options)]
    return [plan, *(other for other in found if other.stages != plan.stages and _fits(problem, other))]


def _fits(problem: Problem, plan: Plan) -> bool:
    devices = {placed.devices[0] for placed in plan.stages if placed.devices}
    timeline = simulate(problem, plan)
    return all(timeline.memory(d).peak_bytes <= problem.cluster.devices[d].memory_bytes for d in devices)


def _check_chain(problem: Problem, names: Sequence[str]) -> None:
    if problem.profile(names[0]).batching != "continuous":
        raise ProblemError(f"stage {names[0]!r} comes first and must have batching 'continuous': it is what drains")
    for before, name in pairwise(names):
        if (
            len(problem.flow.stage(name).reads) != 1
            or problem.flow.stage(name).reads[0] not in problem.flow.stage(before).writes
        ):
            raise ProblemError(f"flow {problem.flow.name!r} is no chain: stage {name!r} must read only from {before!r}")
