"""Runs one stage on one rank: connects its ports, takes and gives back the lease, syncs weights, keeps the time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlinf_comm import Channel
from rlinf_workers.errors import WorkersError
from rlinf_workers.execution.item_channels import FarChannel, open_channel
from rlinf_workers.execution.lease import LeaseRequest
from rlinf_workers.execution.ports import ItemEnd, Pauses, Reader, Writer
from rlinf_workers.execution.replica import FirstRank, OtherRank
from rlinf_workers.execution.stage_calls import Port, StageCall, StageOutcome
from rlinf_workers.spans import CHANNEL, COMPUTE_SPAN, LEASE, SYNC_SPAN, Processes, Span, now_ns

if TYPE_CHECKING:
    from rlinf_workers.execution.worker_host import WorkerHost

SHORTEST_WAIT_SPAN_NS = 500_000
"""Shorter waits are left out of the trace; they would be most of its lines and none of its time."""


@dataclass
class _Chunk:
    """What a stage computes on; the clock runs."""

    start_ns: int
    num_items: int
    collective_ns: int
    """What the thread had spent in collectives when the clock started."""
    began_ns: tuple[int, ...] = ()


class StageRunner(Pauses):
    """One stage call in progress.

    The states and who changes them:
        outside    no lease, state may be sent away   at the start; after `_leave`
        inside     lease held, state on the devices   after `_enter`
        computing  inside, and the clock of the chunk runs   between `begin_chunk` and `end_chunk`
    """

    def __init__(self, host: WorkerHost, call: StageCall) -> None:
        self._host = host
        self._worker = host.worker
        self._call = call
        self._spans: list[Span] = []
        self._is_first = host.identity.rank_in_replica == 0
        self._inside = False
        self._holds_lock = False
        self._chunk: _Chunk | None = None

    def run(self) -> StageOutcome:
        try:
            return self._run()
        except BaseException:
            self._give_up()
            raise

    def _run(self) -> StageOutcome:
        call = self._call
        self._host.step = call.context
        if call.replica_channel is not None:
            _ = self._host.rank_groups  # all ranks meet here: in the body, one without items would be missing
        readers = [Reader(port, self._link(port), self) for port in call.reads]
        writers = [Writer(port, self._link(port), self) for port in call.writes]
        if all(port.of_own_turn for port in call.reads):  # it computes before it has read anything
            self.begin_chunk(0)
        getattr(self._worker, call.method)(*readers, *writers)
        self.end_chunk()
        self.before_put()  # metrics and weights leave too
        for edge in call.publishes:
            self._enter()
            with self._span("publish weights", SYNC_SPAN), self._host.waits.waiting("room for weights", edge):
                self._host.publish_weights(edge)
        self._leave(is_last=True)
        if self._is_first:
            for port in call.writes:
                self._channel(port).close()
        if call.replica_channel is not None:
            self._end_telling(open_channel(call.replica_channel))
        metrics, rows = self._host.metrics.drain(), self._host.shown_rows
        notes, self._host.shown_rows, self._host.notes = self._host.notes, [], []
        return StageOutcome(
            metrics=metrics if self._is_first else {},
            spans=self._spans,
            shown_rows=rows if self._is_first else [],
            notes=notes,
            policy_version=self._worker.policy_version,
        )

    def _give_up(self) -> None:
        """Nothing of this run shows in a later one. The driver has given up its leases."""
        self._chunk = None
        if self._inside:
            self._lock()
            self._host.num_inside -= 1
            self._inside = False
        self._unlock()
        self._host.abandon()

    # -- replicas --------------------------------------------------------------------------------------------------

    def _link(self, port: Port) -> ItemEnd:
        """A port's channel, as this rank of its replica uses it."""
        if self._call.replica_channel is None:
            return self._channel(port)
        replica_channel, waits = open_channel(self._call.replica_channel), self._host.waits
        if self._is_first:
            waiting = functools.partial(waits.waiting, "other ranks")
            return FirstRank(port.channel, self._channel(port), replica_channel, self._host.identity, waiting)
        return OtherRank(
            port.channel, replica_channel, self._host.identity, functools.partial(waits.waiting, "first rank")
        )

    def _channel(self, port: Port) -> Channel | FarChannel:
        asking = functools.partial(self._host.waits.waiting, "server", port.channel)
        with asking():
            channel = open_channel(port.address)
        return FarChannel(channel, asking) if channel.is_remote else channel

    def _end_telling(self, replica_channel: Channel) -> None:
        if self._is_first:
            replica_channel.close()
            return
        with self._host.waits.waiting("first rank"):
            while replica_channel.take(keys=[self._host.identity.rank]):
                pass  # a body need not read to the end

    # -- Pauses ----------------------------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, kind: Literal["items", "room"], channel: str, *, keeps_lease: bool) -> Iterator[None]:
        was_computing = self._chunk is not None
        self.end_chunk()
        if not keeps_lease:
            self._leave()
        self._unlock()
        start_ns = now_ns()
        with self._host.waits.waiting(kind, channel) as wait:
            yield
        if now_ns() - start_ns >= SHORTEST_WAIT_SPAN_NS:
            self._add_span(f"wait for {wait.target}", CHANNEL, start_ns)
        if was_computing:
            self.begin_chunk(0)

    def begin_chunk(self, num_items: int) -> None:
        self._enter()
        if num_items:
            self._host.begun = self._call.context
        self._chunk = _Chunk(now_ns(), num_items, self._host.waits.collective_ns)

    def add_to_chunk(self, num_items: int) -> None:
        if self._chunk is None:
            return self.begin_chunk(num_items)
        self._chunk.num_items += num_items
        self._host.begun = self._call.context

    @contextmanager
    def hands_on(self, began_ns: Sequence[int]) -> Iterator[None]:
        chunk = self._chunk
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

    def end_chunk(self) -> None:
        if self._chunk is not None:
            chunk, self._chunk = self._chunk, None
            num_items, began_ns = (chunk.num_items, chunk.began_ns) if self._is_first else (0, ())  # counted once
            collective_ns = self._host.waits.collective_ns - chunk.collective_ns
            self._add_span(self._call.stage, COMPUTE_SPAN, chunk.start_ns, num_items, began_ns, collective_ns)

    def before_put(self) -> None:
        if self._host.has_unconfirmed_weights:
            waiting = self._host.waits.waiting("check of weights", processes=self._served_elsewhere)
            with self._span("check weights", SYNC_SPAN), waiting:
                self._host.confirm_weights()
        self._host.confirm_weights()

    @property
    def _served_elsewhere(self) -> Processes | None:
        """What says which processes of the worker's own are filled and checked; None: the worker itself is."""
        return self._worker.serving_processes if self._worker.serving_processes() else None

    # -- lease, state, weights -------------------------------------------------------------------------------------

    def _enter(self) -> None:
        if not self._inside:
            if self._call.lease_turn is not None:
                waiting = self._host.waits.waiting("lease", number=self._call.lease_turn)
                with self._span("wait for lease", LEASE), waiting:
                    refusal = self._ask("acquire").result()
                if refusal:
                    raise WorkersError(refusal)
            self._inside = True
            self._lock()
            self._host.num_inside += 1
            start_ns = now_ns()
            self._host.before_change()
            if now_ns() - start_ns >= SHORTEST_WAIT_SPAN_NS:
                self._add_span("keep published weights", SYNC_SPAN, start_ns)
            if not self._host.is_loaded:
                with self._span("onload", LEASE):
                    self._host.load()
            for edge, version in self._call.receives.items():
                if self._host.served_versions.get(edge) != version:
                    waits, elsewhere = self._host.waits, self._served_elsewhere
                    waiting = waits.waiting("weights", edge, number=version, processes=elsewhere)
                    with self._span("receive weights", SYNC_SPAN), waiting:
                        self._host.receive_weights(edge, version)
                    # What another rank of the replica makes with these weights leaves elsewhere.
                    if self._call.replica_channel is not None or self._worker.checks_first:
                        self.before_put()
                    self._worker.weights_received(version)
        self._lock()

    def _leave(self, *, is_last: bool = False) -> None:
        if not self._inside:
            return
        self._lock()
        self._host.num_inside -= 1
        if self._call.offloads and not self._host.num_inside:  # from here on the state may be sent away
            self.before_put()  # a check reads the weights where they are
            self._host.may_discard = is_last and self._call.discards
        self._unlock()
        self._inside = False
        if self._call.lease_turn is not None:
            self._ask("release")

    def _ask(self, action: Literal["acquire", "release"]) -> Future[str]:
        """A release needs no reply: the driver reads it before anything else that this worker says later."""
        call = self._call
        request = LeaseRequest(action=action, turn=call.lease_turn or 0, stage=call.stage, stays=not call.offloads)
        return self._host.request("lease", request, wants_reply=action == "acquire")

    @contextmanager
    def _span(self, name: str, category: str) -> Iterator[None]:
        start_ns = now_ns()
        yield
        self._add_span(name, category, start_ns)

    def _add_span(
        self,
        name: str,
        category: str,
        start_ns: int,
        num_items: int = 0,
        began_ns: tuple[int, ...] = (),
        collective_ns: int = 0,
    ) -> None:
        """A span that ends now."""
        who, duration_ns = self._host.identity, now_ns() - start_ns
        self._spans.append(
            Span(name, category, start_ns, duration_ns, num_items, who.name, who.devices, began_ns, collective_ns)
        )

    # -- two stages of one worker never compute at once --------------------------------------------------------------

    def _lock(self) -> None:
        if self._holds_lock:
            return
        if not self._host.body_lock.acquire(blocking=False):
            with self._host.waits.waiting("other stage"):
                self._host.body_lock.acquire()
        self._holds_lock = True

    def _unlock(self) -> None:
        if self._holds_lock:
            self._host.body_lock.release()
            self._holds_lock = False
