"""Who waited for whom: the times at which generation waits for weights, and training for samples, where the two
have separate devices; and what to change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rlinf.report.records import RunRecords, SpanRecord

MAX_STEPS = 100
"""Maximum number of the newest steps that are looked at."""
MIN_SHARE = 0.1
"""Waits that take a smaller share of the time are not worth a change."""
SHORTEST_S = 1e-3
"""Shorter waits are left out."""
LARGEST_STALENESS = 8
"""Largest value of algorithm.max_staleness."""

Cause = Literal["weights", "samples", "pause"]
_Interval = tuple[float, float]
"""Start and end, in seconds from the run's start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWait:
    """A wait of one worker. Steps count from 0.

    Example, with max_staleness 1: rollout/0 waits before step 7 until step 5 has been trained:
        StepWait(worker="rollout/0", group="rollout", step=7, cause="weights", of_step=5, start_s=20.0, end_s=20.4, ...)
    """

    worker: str
    group: str
    lanes: tuple[str, ...]
    is_device: bool
    step: int
    """The step that the worker computes next."""
    cause: Cause
    """`weights`: until a step has been trained; `samples`: until they have been generated and scored; `pause`: no step
    may begin before earlier ones have ended, or none is under way."""
    of_step: int
    """The step that is waited for; of a pause the last one before it."""
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def text(self) -> str:
        """The wait in words, with steps counted from 1."""
        if self.cause == "weights":
            return f"{self.group} of step {self.step + 1} waits until step {self.of_step + 1} has been trained"
        if self.cause == "samples":
            return f"{self.group} waits for samples of step {self.of_step + 1}"
        return f"{self.group} waits for the pause after step {self.of_step + 1} (evaluation, checkpoint, end)"

    @property
    def label(self) -> str:
        """A few words for a narrow bar."""
        return {
            "weights": f"waits for step {self.of_step + 1}",
            "samples": "waits for samples",
            "pause": "pause",
        }[self.cause]

    def to_span(self) -> SpanRecord:
        """The wait as a bar of the timeline."""
        return SpanRecord(
            name=self.text,
            category=WAIT,
            lanes=self.lanes,
            is_device=self.is_device,
            worker=self.worker,
            step=self.step,
            phase="train",
            num_items=0,
            start_s=self.start_s,
            duration_s=self.duration_s,
            label=self.label,
        )


WAIT = "step wait"
"""Category of the bars of these waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """The waits of both sides over consecutive steps of a run whose generation and training have separate devices."""

    steps: range
    duration_s: float
    """From the end of the step before them to the end of the last one."""
    max_staleness: int
    """Steps by which generation runs ahead of training under the plan of the run."""
    bound: int
    """Steps by which it may."""
    generation: tuple[str, ...]
    """Worker groups that generate."""
    training: tuple[str, ...]
    waits: tuple[StepWait, ...]
    num_workers: Mapping[str, int]
    """Worker group -> its workers."""

    def seconds(self, group: str, cause: Cause, step: int | None = None) -> float:
        """Seconds that a worker of the group waited, the mean over its workers; in one step or in all."""
        mine = (wait for wait in self.waits if (wait.group, wait.cause) == (group, cause) and step in (None, wait.step))
        return sum(wait.duration_s for wait in mine) / self.num_workers[group]

    def share(self, group: str, cause: Cause) -> float:
        """Share of the time that a worker of the group waited."""
        return self.seconds(group, cause) / self.duration_s

    def advice(self) -> str:
        """What to change, in one sentence; that there is nothing if neither side waits long."""
        generation = max(self.generation, key=lambda group: self.share(group, "weights"))
        training = max(self.training, key=lambda group: self.share(group, "samples"))
        generating, learning = self.share(generation, "weights"), self.share(training, "samples")
        paused = self.share(training, "pause")
        waits = f"{training} waits {learning:.0%} of the time for samples, {generation} {generating:.0%} for weights"
        more = self.max_staleness + 1
        if paused >= MIN_SHARE and paused > max(generating, learning):
            return (
                f"No step is under way {paused:.0%} of the time: evaluate and save less often (run.evaluate_every, "
                "run.checkpoint_every)."
            )
        if min(generating, learning) >= MIN_SHARE and self.max_staleness < self.bound:
            return (
                f"Both sides wait: {waits}. Mode auto chose {self.max_staleness} as the steps ahead; with "
                f"mode disaggregated they are {self.bound}."
            )
        if min(generating, learning) >= MIN_SHARE and self.max_staleness < LARGEST_STALENESS:
            return f"Both sides wait: {waits}. Let steps overlap more: algorithm.max_staleness {more}."
        if learning >= MIN_SHARE:
            return (
                f"{training} waits {learning:.0%} of the time for samples, and {generation} {generating:.0%} for "
                f"weights: give {generation} a further device (plan.devices), or shorten generation."
            )
        if generating >= MIN_SHARE:
            return (
                f"{generation} waits {generating:.0%} of the time for weights, and {training} {learning:.0%} for "
                f"samples: give {training} a further device (plan.devices)."
            )
        return f"Nothing to change: {waits}."


def steps_ahead(records: RunRecords) -> int:
    """Steps by which generation runs ahead of training under the run's plan; see `rlinf_sched.Plan.steps_ahead`."""
    bound = int(records.flow.get("max_staleness", 0))
    prediction = records.plan.get("prediction") or {}
    return min(bound, int(prediction.get("max_staleness", bound)))


def find_waits(records: RunRecords) -> Waits | None:
    """As `read_waits`; None for malformed files, too."""
    try:
        return read_waits(records)
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def read_waits(records: RunRecords) -> Waits | None:
    """The waits in the newest consecutive steps of the trace under the present plan; None if generation and training
    share devices, or the trace has no two such steps."""
    flow, plan = records.flow, records.plan
    generation, training = _groups(flow)
    placed = {stage["stage"]: set(stage["devices"]) for stage in plan.get("stages", [])}
    devices = [
        {
            device
            for stage in flow.get("stages", ())
            if stage["worker"] in groups
            for device in placed.get(stage["name"], ())
        }
        for groups in (generation, training)
    ]
    if not all(devices) or devices[0] & devices[1]:
        return None
    busy = _BusySteps.read(records, {*generation, *training}, max_staleness := steps_ahead(records))
    if len(steps := busy.consecutive()) < 2:
        return None
    workers: dict[str, set[str]] = defaultdict(set)
    for worker in busy.lanes:
        workers[busy.group(worker)].add(worker)
    present = [tuple(group for group in groups if group in workers) for groups in (generation, training)]
    if not all(present):
        return None
    counted = range(steps[1], steps[-1] + 1)
    waits = [
        wait
        for step in counted
        for worker in busy.lanes
        for wait in (
            *busy.waits(worker, step, max_staleness, generates=busy.group(worker) in generation),
            *(busy.after_the_last(worker, step) if records.result and step == steps[-1] else ()),
        )
        if wait.duration_s >= SHORTEST_S and wait.of_step >= 0
    ]
    return Waits(
        steps=counted,
        duration_s=busy.end_s(steps[-1]) - busy.end_s(steps[0]),
        max_staleness=max_staleness,
        bound=int(flow.get("max_staleness", 0)),
        generation=present[0],
        training=present[1],
        waits=tuple(waits),
        num_workers={group: len(names) for group, names in workers.items()},
    )


def _groups(flow: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Worker groups that generate with the weights of others, and those that train them."""
    trains = list(dict.fromkeys(stage["worker"] for stage in flow.get("stages", []) if stage.get("trains")))
    served = dict.fromkeys(edge["target"] for edge in flow.get("weight_edges", []) if edge["source"] in trains)
    return [group for group in served if group not in trains], trains


@dataclass(frozen=True, kw_only=True, slots=True)
class _BusySteps:
    """When the workers of both sides compute, by step."""

    extents: Mapping[int, _Interval]
    """Step -> its first and last computation, on any worker."""
    busy: Mapping[tuple[str, int], Sequence[_Interval]]
    """(worker, step) -> when it computed, in order."""
    lanes: Mapping[str, SpanRecord]
    """Worker -> one of its spans."""

    @classmethod
    def read(cls, records: RunRecords, groups: set[str], max_staleness: int) -> _BusySteps:
        """The newest steps of the trace. Spans of a step that was repeated later are left out."""
        begun = max((plan["first_step"] for plan in records.plan_times.get("plans", ())), default=0)
        rows = [row for row in records.metrics if row["step"] >= begun]  # earlier ones had other plans
        timed = [(row["step"], row["metrics"].get("time/step_s")) for row in rows]
        durations_s = {step: float(step_s) for step, step_s in timed[-MAX_STEPS:] if step_s}
        spans = [
            span
            for span in records.spans()
            if span.step in durations_s and span.phase in (None, "train") and span.category in ("stage", "sync")
        ]
        ends_s: dict[int, float] = defaultdict(float)
        for span in spans:
            ends_s[span.step or 0] = max(ends_s[span.step or 0], span.end_s)
        first = min(ends_s, default=0)
        extents: dict[int, _Interval] = {}
        busy: dict[tuple[str, int], list[_Interval]] = defaultdict(list)
        lanes: dict[str, SpanRecord] = {}
        for span in sorted(spans, key=lambda span: span.start_s):
            step = span.step or 0
            oldest = max(first, step - max_staleness)  # the earliest step during which this one may have begun
            if span.end_s < ends_s.get(oldest, 0.0) - durations_s.get(oldest, 0.0):
                continue
            start_s, end_s = extents.get(step, (span.start_s, span.end_s))
            extents[step] = (min(start_s, span.start_s), max(end_s, span.end_s))
            if cls.group(span.worker) in groups:
                busy[span.worker, step].append((span.start_s, span.end_s))
                lanes.setdefault(span.worker, span)
        return cls(extents=extents, busy=busy, lanes=lanes)

    @staticmethod
    def group(worker: str) -> str:
        return worker.rpartition("/")[0]

    def consecutive(self) -> range:
        """The newest steps without a gap between them."""
        last = max(self.extents, default=-1)
        first = last
        while first - 1 in self.extents:
            first -= 1
        return range(first, last + 1)

    def end_s(self, step: int) -> float:
        return self.extents[step][1]

    def waits(self, worker: str, step: int, max_staleness: int, *, generates: bool) -> Iterator[StepWait]:
        """The waits of a worker for a step."""
        mine, before = self.busy.get((worker, step)), self.busy.get((worker, step - 1))
        if not mine or not before:
            return
        wait = partial(self._wait, worker, step)
        pause_s, resumed_s = self.end_s(step - 1), self.extents[step][0]  # no step is under way between the two
        if generates:
            start_s, end_s = before[-1][1], mine[0][0]
            trained = step - max_staleness - 1
            ready_s = end_s
            if pause_s < resumed_s:  # for generation the pause begins when it would have gone on without
                ready_s = max(start_s, self.end_s(trained)) if trained in self.extents else start_s
            yield wait("weights", trained, start_s, ready_s)
            yield wait("pause", step - 1, ready_s, end_s)
            return
        for start_s, end_s in _between([before[-1], *mine]):
            yield wait("samples", step, start_s, min(end_s, pause_s))
            yield wait("pause", step - 1, max(start_s, pause_s), min(end_s, resumed_s))
            yield wait("samples", step, max(start_s, pause_s, resumed_s), end_s)

    def after_the_last(self, worker: str, step: int) -> Iterator[StepWait]:
        """What is left of the last step of a run that has ended, when a worker has nothing more to do."""
        if mine := self.busy.get((worker, step)):
            yield self._wait(worker, step, "pause", step, mine[-1][1], self.end_s(step))

    def _wait(self, worker: str, step: int, cause: Cause, of_step: int, start_s: float, end_s: float) -> StepWait:
        span = self.lanes[worker]
        return StepWait(
            worker=worker,
            group=self.group(worker),
            lanes=span.lanes,
            is_device=span.is_device,
            step=step,
            cause=cause,
            of_step=of_step,
            start_s=start_s,
            end_s=end_s,
        )


def _between(intervals: Iterable[_Interval]) -> Iterator[_Interval]:
    """The gaps between intervals in the order of their beginnings."""
    reached_s: float | None = None
    for start_s, end_s in intervals:
        if reached_s is not None and start_s > reached_s:
            yield reached_s, start_s
        reached_s = max(end_s, reached_s or end_s)
