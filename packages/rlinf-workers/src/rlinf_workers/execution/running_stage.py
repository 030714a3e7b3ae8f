"""RunningStage: the state of one stage on one rank during a run, and its transitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rlinf_workers.errors import WorkersError
from rlinf_workers.execution.lease import LeaseRequest
from rlinf_workers.execution.ports import Pauses
from rlinf_workers.execution.stage_calls import StageCall
from rlinf_workers.gpu_activity import GpuSample
from rlinf_workers.launchers.base import StageProgress
from rlinf_workers.metrics import MetricTable
from rlinf_workers.spans import CHANNEL, COMPUTE_SPAN, LEASE, Span, now_ns

if TYPE_CHECKING:
    from rlinf_workers.execution.step_profile import ProfileRange
    from rlinf_workers.execution.worker_host import WorkerHost
    from rlinf_workers.worker import Decision

SHORTEST_WAIT_SPAN_NS = 500_000
"""Shorter waits are left out of the trace; they would be most of its lines and almost none of its time."""


@dataclass
class _Chunk:
    """The items that a stage computes on, and the start of their clock."""

    start_ns: int
    num_items: int
    collective_ns: int
    """Time that the thread had spent in collectives when the clock started."""
    began_ns: tuple[int, ...] = ()
    profiled: ProfileRange | None = None
    """Its range in the profile, if there is one."""


@dataclass(eq=False)
class RunningStage(Pauses):
    """A stage call in progress; its ports report to it.

    outside    no lease, the worker's state may be offloaded        at the start; after `leave`
    inside     lease held, state on the devices                     after `enter`
    computing  inside, and the clock of a chunk runs                between `begin_chunk` and `end_chunk`
    """

    host: WorkerHost
    call: StageCall
    spans: list[Span] = field(default_factory=list)
    is_inside: bool = False
    holds_lock: bool = False
    """Whether it holds `WorkerHost.body_lock`."""
    chunk: _Chunk | None = None
    """None: it is not computing."""
    num_put: dict[str, int] = field(default_factory=dict)
    """Channel -> items that it has put."""
    reported: tuple[int, int, str] | None = None
    """What `Worker.report_progress` reported last: done, total, unit."""
    decisions: list[Decision] = field(default_factory=list)
    """What `Worker.decide` recorded."""
    metrics: MetricTable = field(default_factory=MetricTable)
    """What its thread recorded."""
    served: set[str] = field(default_factory=set)
    """Weight edges whose version it has received, or found."""
    gpu_sample: GpuSample | None = None
    """Of its first GPU's counters, when it began to hold the GPU; None: they cannot be read."""

    # -- Pauses ----------------------------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, kind: Literal["items", "room"], channel: str, *, keeps_lease: bool) -> Iterator[None]:
        was_computing = self.chunk is not None
        self.end_chunk()
        if not keeps_lease:
            self.leave()
        self._unlock()
        start_ns = now_ns()
        with self.host.waits.waiting(kind, channel) as wait:
            yield
        self._add_span(f"wait for {wait.target}", CHANNEL, start_ns, at_least_ns=SHORTEST_WAIT_SPAN_NS)
        if was_computing:
            self.begin_chunk(0)

    def begin_chunk(self, num_items: int) -> None:
        self.enter()
        if num_items:
            self.host.begun = self.call.context
        profiled = self._range(self.call.stage)
        self.chunk = _Chunk(now_ns(), num_items, self.host.waits.collective_ns, profiled=profiled)

    def add_to_chunk(self, num_items: int) -> None:
        if self.chunk is None:
            return self.begin_chunk(num_items)
        self.chunk.num_items += num_items
        self.host.begun = self.call.context

    @contextmanager
    def hands_on(self, began_ns: Sequence[int]) -> Iterator[None]:
        chunk = self.chunk
        if chunk is None:
            yield
            return
        left = chunk.num_items - len(began_ns)
        chunk.num_items, chunk.began_ns = len(began_ns), tuple(began_ns)
        if left > 0:
            self.end_chunk()
        yield
        if left > 0:
            self.begin_chunk(left)

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Context in which it does not compute on the items of its chunk; it goes on with all of them."""
        chunk, num_items = self.chunk, 0
        if chunk is not None:
            num_items, chunk.num_items = chunk.num_items, 0
            self.end_chunk()
        yield
        if chunk is not None:
            self.begin_chunk(num_items)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Context in which it waits without its lease; it does not compute before it, see `interrupted`."""
        self.leave()
        self._unlock()
        yield
        self.enter()

    def was_put(self, channel: str, num_items: int) -> None:
        self.num_put[channel] = self.num_put.get(channel, 0) + num_items

    def end_chunk(self) -> None:
        if self.chunk is not None:
            chunk, self.chunk = self.chunk, None
            if chunk.profiled is not None:
                chunk.profiled.leave()
            self._add_span(self.call.stage, COMPUTE_SPAN, chunk.start_ns, chunk)

    def progress(self) -> StageProgress:
        """How far it is; from any thread."""
        num_done, num_items, unit = self.reported or (0, 0, "")
        if self.reported is None and self.call.writes:
            num_done = self.num_put.get(self.call.writes[0].channel, 0)
        return StageProgress(
            stage=self.call.stage,
            step=self.call.context.step,
            phase=self.call.context.phase,
            num_done=num_done,
            num_items=num_items,
            unit=unit,
            is_computing=self.chunk is not None,
        )

    def before_put(self) -> None:
        self.host.confirm_weights(self)

    # -- entering and leaving the devices --------------------------------------------------------------------------

    def enter(self) -> None:
        """Acquires the lease, then loads the worker's state and the weights of this run."""
        if self.is_inside:
            return self._lock()
        if self.call.lease_turn is not None:
            with self.span("wait for lease", LEASE), self.host.waits.waiting("lease", number=self.call.lease_turn):
                refusal = self._request_lease("acquire").result()
            if refusal:
                raise WorkersError(refusal)
        self._lock()
        self.is_inside = True
        self.host.prepare(self)
        if (activity := self.host.gpu_activity) is not None:
            self.gpu_sample = activity.begin()

    def leave(self, *, is_last: bool = False) -> None:
        """Releases the lease; from here on the worker's state may be offloaded."""
        if not self.is_inside:
            return
        self._lock()
        self.is_inside = False
        self._end_sample(counts=True)
        if self.call.offloads and not self.host.is_in_use:
            self.before_put()  # the check reads the weights on the device
            self.host.may_discard = is_last and self.call.discards
        self._unlock()
        if self.call.lease_turn is not None:
            self._request_lease("release")

    def abort(self) -> None:
        """Ends the stage of an aborted run, whose leases the driver has revoked."""
        if self.chunk is not None and self.chunk.profiled is not None:
            self.chunk.profiled.leave()
        self.chunk = None
        self._end_sample(counts=False)
        if self.is_inside:
            self._lock()
            self.is_inside = False
        self._unlock()

    def _end_sample(self, *, counts: bool) -> None:
        """Records how busy its GPU was while it held it."""
        sample, self.gpu_sample = self.gpu_sample, None
        if sample is None or (activity := self.host.gpu_activity) is None:
            return
        seconds, shares = activity.since(sample)
        for counter, share in shares.items() if counts else ():
            self.metrics.add(f"perf/{counter}/{self.call.stage}", share, seconds)

    def _request_lease(self, action: Literal["acquire", "release"]) -> Future[str]:
        """A release needs no reply: the driver reads it before anything that this worker sends later."""
        call = self.call
        request = LeaseRequest(action=action, turn=call.lease_turn or 0, stage=call.stage, stays=not call.offloads)
        return self.host.request("lease", request, wants_reply=action == "acquire")

    def _lock(self) -> None:
        if self.holds_lock or (self.call.ahead and self.host.worker.computes_at_once):
            return
        if not self.host.body_lock.acquire(blocking=False):
            with self.host.waits.waiting("other stage"):
                self.host.body_lock.acquire()
        self.holds_lock = True

    def _unlock(self) -> None:
        if self.holds_lock:
            self.host.body_lock.release()
            self.holds_lock = False

    # -- spans -----------------------------------------------------------------------------------------------------

    @contextmanager
    def span(self, name: str, category: str, *, at_least_ns: int = 0) -> Iterator[None]:
        start_ns, profiled = now_ns(), self._range(name)
        yield
        if profiled is not None:
            profiled.leave()
        self._add_span(name, category, start_ns, at_least_ns=at_least_ns)

    def _range(self, name: str) -> ProfileRange | None:
        """Enters a range of the profile; None if there is no profile."""
        if (profile := self.host.profile) is None:
            return None
        entered = profile.range(name)
        entered.enter()
        return entered

    def _add_span(
        self, name: str, category: str, start_ns: int, chunk: _Chunk | None = None, *, at_least_ns: int = 0
    ) -> None:
        """A span that ends now, unless it is shorter than `at_least_ns`."""
        who, duration_ns = self.host.identity, now_ns() - start_ns
        if duration_ns < at_least_ns:
            return
        num_items, began_ns, collective_ns = 0, (), 0
        if chunk is not None:
            collective_ns = self.host.waits.collective_ns - chunk.collective_ns
            if who.rank_in_replica == 0:  # count items once per replica
                num_items, began_ns = chunk.num_items, chunk.began_ns
        self.spans.append(
            Span(name, category, start_ns, duration_ns, num_items, who.name, who.devices, began_ns, collective_ns)
        )
