"""The result of a simulation: spans, and queries over them that are computed on request."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from rlinf_sched.errors import SchedError, did_you_mean

SpanKind = Literal["compute", "onload", "offload", "sync", "transfer", "step"]
SPAN_KINDS: tuple[SpanKind, ...] = get_args(SpanKind)
"""The kinds of spans; `Timeline.kind` holds indices into this."""
COMPUTE, ONLOAD, OFFLOAD, SYNC, TRANSFER, STEP = range(6)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCurve:
    """Bytes on a device: `num_bytes[i]` from `times_s[i]` until the next time, the last one until the end."""

    times_s: np.ndarray
    num_bytes: np.ndarray

    @property
    def peak_bytes(self) -> int:
        return int(self.num_bytes.max())


@dataclass(frozen=True, kw_only=True, slots=True)
class PathSegment:
    """A piece of the critical path: during it, only a shorter duration of this piece would have helped."""

    span: int
    stage: str
    kind: SpanKind
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """All spans, as arrays of equal length, in the order in which the spans began.

    Times are seconds from the beginning of the first step. A span of kind "compute" is one hand-over on one instance;
    with continuous batching it is the time of an engine from its first item until it is empty, or until it accepts the
    first item of a later step, while the rest of this one continues.
    """

    stages: tuple[str, ...]
    """Names of the stages; `stage` holds indices into this."""
    num_steps: int
    max_staleness: int
    num_devices: int
    num_instances: np.ndarray
    """[stages]: instances of each stage."""
    stage: np.ndarray
    rank: np.ndarray
    """Instance of the stage; -1 for a weight sync, whose stage is the one that trained."""
    kind: np.ndarray
    """Indices into `SPAN_KINDS`."""
    step: np.ndarray
    num_items: np.ndarray
    width: np.ndarray
    """Concurrent items: `num_items`, or the maximum in the engine."""
    cause: np.ndarray
    """The span whose end this one waited for last; -1: the beginning."""
    start_s: np.ndarray
    end_s: np.ndarray
    step_end_s: np.ndarray
    """[steps]: end of each step, including its weight syncs."""
    step_cause: np.ndarray
    """[steps]: the span that the end of the step waited for."""
    num_events: int
    """Starts and ends of hand-overs, items that left an engine, lease changes."""
    device_start: np.ndarray
    """[instances + 1]: offsets in `device` of the devices of each instance (of all stages, by rank)."""
    device: np.ndarray
    resident_bytes: np.ndarray
    """[stages]: bytes of the stage's state on each of its devices."""
    leaving: np.ndarray
    """bool [stages]: whether the state is offloaded between the stage's turns."""
    work_bytes: np.ndarray
    item_work_bytes: np.ndarray

    @property
    def first_settled(self) -> int:
        """The first step of the steady state: step 0, or with `max_staleness` the one in the middle."""
        return self.num_steps // 2 if self.max_staleness else 0

    @property
    def step_s(self) -> float:
        """Mean seconds between the ends of consecutive steps in the steady state."""
        begins_s = float(self.step_end_s[self.first_settled - 1]) if self.first_settled else 0.0
        return (float(self.step_end_s[-1]) - begins_s) / (self.num_steps - self.first_settled)

    @property
    def total_s(self) -> float:
        """Seconds until everything has ended; with staleness an offload may end after the last step."""
        return float(max(self.step_end_s[-1], self.end_s.max()))

    def of(self, stage: str, kind: SpanKind = "compute") -> np.ndarray:
        """Indices of the spans of that stage and kind.

        Raises:
            SchedError: the flow has no such stage.
        """
        if stage not in self.stages:
            raise SchedError(f"the timeline has no stage {stage!r}{did_you_mean(stage, self.stages)}")
        return np.flatnonzero((self.stage == self.stages.index(stage)) & (self.kind == SPAN_KINDS.index(kind)))

    def busiest_s(self, stage: str, *kinds: SpanKind) -> float:
        """Mean seconds per steady-state step that the stage's busiest instance spends in such spans."""
        spans = np.concatenate([self.of(stage, kind) for kind in kinds])
        spans = spans[self.step[spans] >= self.first_settled]
        spent_s = np.zeros((self.num_steps - self.first_settled, self.num_instances[self.stages.index(stage)]))
        place = (self.step[spans] - self.first_settled, self.rank[spans])
        np.add.at(spent_s, place, self.end_s[spans] - self.start_s[spans])
        return float(spent_s.max(axis=1).mean())

    def devices_of(self, stage: str, rank: int) -> tuple[int, ...]:
        """Devices of one instance."""
        i = self._instance_start[self.stages.index(stage)] + rank
        return tuple(int(device) for device in self.device[self.device_start[i] : self.device_start[i + 1]])

    def memory(self, device: int) -> MemoryCurve:
        """Bytes on that device over time: the state of each stage while it is there, plus work memory while it
        computes."""
        instances = np.repeat(np.arange(len(self.device_start) - 1), np.diff(self.device_start))
        here = instances[self.device == device]
        stage_of = np.repeat(np.arange(len(self.stages)), self.num_instances)
        staying = np.unique(stage_of[here])
        base = int(self.resident_bytes[staying[~self.leaving[staying]]].sum())
        mine = (self.rank >= 0) & (self.kind != TRANSFER)
        mine[mine] = np.isin(self._instance[mine], here)
        comes, goes = self._presence(mine, here, stage_of)
        working = np.flatnonzero(mine & np.isin(self.kind, (COMPUTE, STEP)))
        work = self.work_bytes[self.stage[working]]
        work = work + self.item_work_bytes[self.stage[working]] * self.width[working]
        state = self.resident_bytes[self.stage[comes]]
        times = np.concatenate([self.start_s[comes], self.end_s[goes], self.start_s[working], self.end_s[working]])
        changes = np.concatenate([state, -self.resident_bytes[self.stage[goes]], work, -work])
        moments, place = np.unique(np.concatenate([[0.0], times]), return_inverse=True)
        levels = np.zeros(len(moments), dtype=np.int64)
        np.add.at(levels, place.reshape(-1)[1:], changes)
        return MemoryCurve(times_s=moments, num_bytes=base + np.cumsum(levels))

    @cached_property
    def critical_path(self) -> tuple[PathSegment, ...]:
        """The chain of spans, each of which waited for the one before, up to the end of the last step; in order of
        time.

        A span is on the path until it lets the next one begin.
        """
        segments, until, span = [], float(self.step_end_s[-1]), int(self.step_cause[-1])
        while span >= 0:
            start = float(self.start_s[span])
            if until > start:
                segments.append(
                    PathSegment(
                        span=span,
                        stage=self.stages[self.stage[span]],
                        kind=SPAN_KINDS[self.kind[span]],
                        start_s=start,
                        end_s=until,
                    )
                )
            until, span = start, int(self.cause[span])
        return tuple(reversed(segments))

    @cached_property
    def _instance_start(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.num_instances)])

    @cached_property
    def _instance(self) -> np.ndarray:
        return self._instance_start[self.stage] + self.rank

    def _presence(self, mine: np.ndarray, here: np.ndarray, stage_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Spans with which the state of each stage comes and goes: ranks on one device share it."""
        first = {stage: instance for instance, stage in reversed(list(zip(here, stage_of[here], strict=True)))}
        mine = mine & np.isin(self._instance, list(first.values()))
        return np.flatnonzero(mine & (self.kind == ONLOAD)), np.flatnonzero(mine & (self.kind == OFFLOAD))
