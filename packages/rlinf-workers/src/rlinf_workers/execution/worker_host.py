"""WorkerHost: owns the one worker of a process, its channels and weights, and runs its stages."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import resource
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from rlinf_comm import Channel, record
from rlinf_comm.weights import Layout, manifest_of
from rlinf_comm.weights.fp8 import BlockQuantizer
from rlinf_sched import WeightEdge
from rlinf_workers.collectives import RankGroup, RankGroups, connect
from rlinf_workers.errors import FlowDefinitionError
from rlinf_workers.execution.frozen_weights import (
    FROZEN_VERSION,
    FrozenWeights,
    edge_of,
    frozen_end,
    is_frozen,
)
from rlinf_workers.execution.item_channels import ChannelPlace, ChannelSpec, FarChannel, HomeChannel, open_channel
from rlinf_workers.execution.ports import ItemEnd, Reader, Writer
from rlinf_workers.execution.replica import FirstRank, OtherRank
from rlinf_workers.execution.running_stage import SHORTEST_WAIT_SPAN_NS, RunningStage
from rlinf_workers.execution.stage_calls import Port, StageCall, StageOutcome
from rlinf_workers.execution.step_profile import StepProfile
from rlinf_workers.execution.weight_offers import WeightOffers
from rlinf_workers.explaining.explanation import look_here
from rlinf_workers.explaining.processes import started_ticks
from rlinf_workers.explaining.snapshot import ProcessRecord
from rlinf_workers.gpu_activity import GpuActivity, gpu_activity
from rlinf_workers.gpu_memory import GpuUse
from rlinf_workers.launchers.base import Identity, RequestSender, StageProgress, Wait
from rlinf_workers.metrics import MetricTable
from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.spans import CHANNEL, LEASE, SYNC_SPAN, Processes, Span, WaitTable, now_ns
from rlinf_workers.weight_sync.base import (
    Check,
    FinishReads,
    LendsDeviceMemory,
    WeightPort,
    WeightReceiver,
    WeightSender,
    WeightTarget,
)
from rlinf_workers.worker import DIGEST_LENGTH, Decision, ShownRow, StepContext, Worker

W = TypeVar("W", bound=Worker)

CALLS = frozenset(
    {
        "run_stage",
        "unload",
        "open_channel",
        "forget_channels",
        "open_weights",
        "served_layout",
        "offer_weights",
        "end_offers",
        "condition_after_runs",
        "begin_profile",
        "end_profile",
        "publish_weights",
        "publish_frozen_weights",
        "memory_bytes",
        "held_gpu_bytes",
        "current_waits",
        "process",
        "look_at_processes",
    }
)
"""Methods of the host that the executor calls; any other method is the worker's own."""
READS = frozenset({"layout", "unmerged_layout", "save_model", "begin_checkpoint", "end_checkpoint", "save_checkpoint"})
"""Methods of workers that are called between runs and do not change weights."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """The condition of a worker after aborted runs."""

    is_spent: bool
    """The worker could not roll back and must be restarted."""
    has_met_ranks: bool
    """It has run collectives with other ranks and cannot continue without them."""
    has_begun: bool
    """One of its stages took items in one of these runs."""


class WorkerHost:
    """Creates the worker and runs its stages.

    Args:
        request: sends the worker's requests to services of the driver.
    """

    worker: Worker

    def __init__(self, identity: Identity, request: RequestSender) -> None:
        self.identity = identity
        self.request = request
        self.metrics = MetricTable()
        """What threads without a stage recorded."""
        self.waits = WaitTable(identity.name)
        self.shown_rows: list[ShownRow] = []
        """Rows for display, see Worker.show."""
        self.notes: list[str] = []
        """Notes for the manifest, see Worker.note."""
        self.body_lock = threading.RLock()
        """Held by the stage that computes: two stages of one worker never compute at once."""
        self._running: list[RunningStage] = []
        self.profile: StepProfile | None = None
        """The profile under way, if there is one."""
        self._entered: dict[str, int] = {}
        """Stage -> number of the newest run in which it has entered or ended, if it may be ahead."""
        self._entering = threading.Condition()
        self.begun: StepContext | None = None
        """The latest run in which a stage has taken items."""
        self.is_loaded = True
        """Whether the worker's state is on its devices."""
        self.may_discard = False
        """Whether the weights that it serves may be dropped on offload, because they will be received anew."""
        self._is_spent = False
        self._onloaded_bytes = 0
        """Device memory it held when it was last offloaded."""
        self._gpu_use = GpuUse()
        """What its processes held of their GPUs whenever a stage ended."""
        self.served_versions: dict[str, int] = {}
        """End of an edge -> version of the worker's weights, once all are received; see `confirm_weights`."""
        self._offers = WeightOffers()
        self._home_channels: list[HomeChannel] = []
        """Channels that live in this process."""
        self._senders: dict[str, WeightSender] = {}
        self._quantizers: dict[str, BlockQuantizer] = {}
        """Edge -> what quantizes the weights that are published on it, if its servers hold them in FP8."""
        self._unfinished_reads: dict[str, FinishReads] = {}
        """Edge -> function to call before the weights last published on it may change."""
        self._receivers: dict[str, WeightReceiver] = {}
        self._frozen = FrozenWeights()
        self._synced_buffers: dict[str, frozenset[str]] = {}
        """End of an edge with two syncs -> the worker's tensors that it moves."""
        self._checks: dict[str, Future[object]] = {}
        """Edge -> the pending check of the weights received last, if it runs in the background."""
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="rlinf-weight-check")
        self._of_thread = threading.local()

    def make(self, worker_class: type[W], *arguments: Any) -> W:
        """Creates the worker; its constructor can already use the worker's identity."""
        worker = worker_class.__new__(worker_class)
        self.worker, worker._host, worker.identity = worker, self, self.identity
        worker.__init__(*arguments)
        self.is_loaded = worker.device.type != "cuda"  # models wait on the host until the first lease
        if not self.is_loaded:
            torch.cuda.empty_cache()  # a library may have created its model on the device
        return worker

    def call(self, method: str, *arguments: Any) -> Any:
        """Handles a call of the driver."""
        if method in CALLS:
            return getattr(self, method)(*arguments)
        if method not in READS:
            self.before_change()
        return getattr(self.worker, method)(*arguments)

    @property
    def step(self) -> StepContext | None:
        """The run that the calling thread's stage takes part in."""
        return getattr(self._of_thread, "step", None)

    @step.setter
    def step(self, context: StepContext) -> None:
        self._of_thread.step = context

    @property
    def _stage(self) -> RunningStage | None:
        """The calling thread's stage; None outside of a stage."""
        return getattr(self._of_thread, "running", None)

    @property
    def recording(self) -> MetricTable:
        """The table for metrics that the calling thread records."""
        return self.metrics if self._stage is None else self._stage.metrics

    def report_progress(self, num_done: int, num_items: int, unit: str) -> None:
        """Sets the progress of the calling thread's stage; does nothing outside of a stage."""
        if (running := self._stage) is not None:
            running.reported = (num_done, num_items, unit)

    @property
    def running_call(self) -> StageCall | None:
        """The call of the calling thread's stage; None outside of a stage."""
        return None if self._stage is None else self._stage.call

    def decide(self, decision: Decision) -> None:
        """Records a decision of the calling thread's stage, if its run is recorded."""
        if (running := self._stage) is not None and running.call.records:
            running.decisions.append(decision)

    @functools.cached_property
    def rank_groups(self) -> RankGroups:
        return connect(self.identity, self.waits, self.request)

    @property
    def replica_ranks(self) -> RankGroup:
        """A single rank waits for nobody; a stage may use this within a chunk, which other ranks may never get."""
        if self.identity.num_ranks_per_replica == 1:
            return RankGroup(0, 1)
        return self.rank_groups.replica

    @property
    def serving_processes(self) -> Processes | None:
        """Lists the worker's own processes that receive and check weights; None if the worker itself does."""
        return self.worker.serving_processes if self.worker.serving_processes() else None

    @property
    def gpu_activity(self) -> GpuActivity | None:
        """The counters of the worker's first GPU, where it has one and they can be read."""
        return gpu_activity(0) if self.worker.device.type == "cuda" else None

    # -- stages ----------------------------------------------------------------------------------------------------

    def run_stage(self, call: StageCall) -> StageOutcome:
        """Runs one stage for one run of the flow."""
        stage = RunningStage(self, call)
        self._running.append(stage)
        with self.waits.in_stage(call.stage):
            try:
                return self._run_stage(stage, call)
            except BaseException:
                stage.abort()
                self._drop_records()
                raise
            finally:
                self._running.remove(stage)
                self._of_thread.running = None
                self._look_at_gpu()
                self._has_entered(call)

    def _run_stage(self, stage: RunningStage, call: StageCall) -> StageOutcome:
        self.step, self._of_thread.running = call.context, stage
        if call.replica_channel is not None:
            _ = self.rank_groups  # all ranks rendezvous here: inside the stage, one without items would be missing
        readers = [Reader(port, self._open_end(port, call), stage) for port in call.reads]
        outputs = [self._open_end(port, call) for port in call.writes]
        writers = [Writer(port, end, stage) for port, end in zip(call.writes, outputs, strict=True)]
        if call.ahead:
            self._enter_in_order(stage, call)
        if all(port.of_own_turn for port in call.reads):  # it computes before its first read
            stage.begin_chunk(0)
        getattr(self.worker, call.method)(*readers, *writers)
        stage.end_chunk()
        stage.before_put()  # metrics and weights are outputs too
        for edge in call.publishes:
            stage.enter()
            with stage.span("publish weights", SYNC_SPAN), self.waits.waiting("room for weights", edge):
                self.publish_weights(edge)
        if call.records and call.trains:
            stage.decisions.append({"weights": self._weights_digest()})
        stage.leave(is_last=True)
        for end in outputs:
            end.close()
        if call.replica_channel is not None:
            self._leave_replica(open_channel(call.replica_channel))
        is_first = self.identity.rank_in_replica == 0
        stage.metrics.absorb(self.metrics.drain())
        metrics, rows, notes = stage.metrics.drain(), self.shown_rows, self.notes
        self.shown_rows, self.notes = [], []
        return StageOutcome(
            metrics=metrics if is_first else {},
            spans=stage.spans,
            shown_rows=rows if is_first else [],
            notes=notes,
            policy_version=self.worker.policy_version,
            decisions=stage.decisions,
        )

    def _enter_in_order(self, stage: RunningStage, call: StageCall) -> None:
        """Receives the weights of a stage that may be ahead, after the same stage of the run before has."""
        if call.follows:
            with self._entering, self.waits.waiting("other stage"):
                self._entering.wait_for(lambda: self._entered.get(call.stage, -1) >= call.number - 1)
        stage.enter()
        self._has_entered(call)

    def _has_entered(self, call: StageCall) -> None:
        with self._entering:
            self._entered[call.stage] = max(call.number, self._entered.get(call.stage, -1))
            self._entering.notify_all()

    def _weights_digest(self) -> str:
        """The digest of the weights that this rank holds, hexadecimal."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.worker.weights().items()}
        version = self.worker.policy_version
        manifest = manifest_of(self.worker.layout(), self.identity.rank, tensors, policy_version=version)
        digests = [(name, manifest.digest_of(name)) for name in sorted(manifest.boxes)]
        return hashlib.sha256(repr(digests).encode()).hexdigest()[:DIGEST_LENGTH]

    def _drop_records(self) -> None:
        """Drops the records of an aborted run, so that a later one does not report them."""
        self.metrics.drain()
        self.shown_rows, self.notes = [], []
        try:
            self.worker.abandon()
        except Exception:  # noqa: BLE001 - a custom worker may raise anything
            traceback.print_exc()
            self._is_spent = True

    @property
    def is_in_use(self) -> bool:
        """Whether one of its stages holds a lease."""
        return any(stage.is_inside for stage in list(self._running))

    def condition_after_runs(self, contexts: Sequence[StepContext]) -> Condition:
        """The worker's condition after aborted runs with these contexts."""
        return Condition(
            is_spent=self._is_spent,
            has_met_ranks="rank_groups" in self.__dict__ and self.identity.num_ranks > 1,
            has_begun=self.begun in contexts,
        )

    # -- channels --------------------------------------------------------------------------------------------------

    def open_channel(self, spec: ChannelSpec, node: int) -> ChannelPlace:
        """Creates a channel in this process, which runs on that node, and its server for other nodes."""
        self._home_channels.append(HomeChannel(spec, node, has_server=True))
        return self._home_channels[-1].place

    def forget_channels(self) -> None:
        """Closes all channels; the next run uses new ones."""
        self._home_channels.clear()
        open_channel.cache_clear()

    def _open_end(self, port: Port, call: StageCall) -> ItemEnd:
        """A port's channel, as this rank of its replica uses it."""
        if call.replica_channel is not None and self.identity.rank_in_replica:
            waiting = functools.partial(self.waits.waiting, "first rank")
            return OtherRank(port.channel, open_channel(call.replica_channel), self.identity, waiting)
        asking = functools.partial(self.waits.waiting, "server", port.channel)
        with asking():
            channel = open_channel(port.address)
        end = FarChannel(channel, asking) if channel.is_remote else channel
        if call.replica_channel is None:
            return end
        waiting = functools.partial(self.waits.waiting, "other ranks")
        return FirstRank(port.channel, end, open_channel(call.replica_channel), self.identity, waiting)

    def _leave_replica(self, replica_channel: Channel) -> None:
        if self.identity.rank_in_replica == 0:
            return replica_channel.close()
        with self.waits.waiting("first rank"):
            while replica_channel.take(keys=[self.identity.rank]):
                pass  # a stage need not read to the end

    # -- the state on the devices ----------------------------------------------------------------------------------

    def prepare(self, stage: RunningStage) -> None:
        """Loads the worker's state, with the weights that the stage serves; the stage holds the lease."""
        with stage.span("keep published weights", SYNC_SPAN, at_least_ns=SHORTEST_WAIT_SPAN_NS):
            self.before_change()
        if not self.is_loaded:
            with stage.span("onload", LEASE):
                self.load()
        for edge, due in stage.call.receives.items():
            if stage.call.ahead and edge in stage.served:  # a later run may have received newer ones
                continue
            stage.served.add(edge)
            version = self._offers.at_least(edge, due)
            if self.served_versions.get(edge) != version:
                if stage.call.ahead:
                    self.worker.before_new_weights()
                self._serve(stage, edge, version)

    def _serve(self, stage: RunningStage, edge: str, version: int) -> None:
        """Receives a version on behalf of a stage, which serves it from here on."""
        target = self._target(edge)
        waiting = self.waits.waiting("weights", edge, number=version, processes=self.serving_processes)
        with stage.span("receive weights", SYNC_SPAN), waiting:
            self.receive_weights(edge, version)
        # Results that other ranks of the replica compute with these weights are sent by those ranks.
        if stage.call.replica_channel is not None or target.checks_first:
            stage.before_put()
        target.weights_received(version)

    def load(self) -> None:
        """Moves the worker's state onto its devices."""
        self.worker.onload()
        if self.worker.device.type == "cuda":
            torch.cuda.synchronize()  # later work may use the state on other streams
        self.is_loaded = True
        for end in self._frozen:
            if self._frozen.may_have_moved(end, weights := self._own_tensors(end)):
                self._checks[end] = self._checker.submit(self._frozen.check, end, weights)

    def unload(self) -> Span:
        """Offloads the state until the worker's next lease; called while it has none. Returns the span of the
        offload."""
        with self.body_lock:
            assert not self.is_in_use, f"{self.identity.name} is offloaded while it holds a lease"
            start_ns = now_ns()
            if self.is_loaded:
                self._onloaded_bytes = self._device_bytes()
                for sender in self._senders.values():
                    if isinstance(sender, LendsDeviceMemory):
                        sender.withdraw()
            if self.may_discard:
                self.served_versions = {one: version for one, version in self.served_versions.items() if is_frozen(one)}
                self.worker.discard()
            else:
                self.worker.offload()
            self.is_loaded = False
            if self.worker.device.type == "cuda":
                torch.cuda.empty_cache()  # otherwise the caching allocator keeps memory that others on this device need
            return Span("offload", LEASE, start_ns, now_ns() - start_ns, 0, self.identity.name, self.identity.devices)

    def memory_bytes(self) -> tuple[int, int]:
        """Bytes of device memory between stages while the state is loaded (otherwise the last such value), and their
        peak since the process started, with what an engine's own processes held; host memory on a CPU slot."""
        if self.worker.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() + self._gpu_use.engine_bytes
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return self._device_bytes() if self.is_loaded else self._onloaded_bytes, peak

    def held_gpu_bytes(self) -> int | None:
        """The most that its processes, with those of an engine, held on one of their GPUs when a stage ended, as the
        driver counts it; None: not known."""
        return self._gpu_use.held_bytes

    def _look_at_gpu(self) -> None:
        if self.worker.device.type == "cuda" and self.is_loaded:
            indices = range(max(1, len(self.identity.devices)))
            self._gpu_use.look(self.worker.serving_processes(), indices, self.worker.serving_reserved_bytes)

    def _device_bytes(self) -> int:
        if self.worker.device.type == "cuda":
            return torch.cuda.memory_allocated() + self._gpu_use.engine_bytes
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    # -- weights ---------------------------------------------------------------------------------------------------

    def open_weights(self, ports: Sequence[WeightPort]) -> None:
        """Opens this rank's end of a weight sync edge, or several ends if the worker serves from several processes.
        Drops an end opened before, with the weights it received."""
        port, end = ports[0], ports[0].end
        if port.side == "send":
            self.before_change()
            self._unfinished_reads.pop(end, None)
            self._senders.pop(end, None)
            self._quantizers.pop(end, None)
            if port.quantized:
                self._quantizers[end] = BlockQuantizer(self.worker.layout(), port.rank, port.quantized)
            self._senders[end] = WEIGHT_SYNCS.get(port.weight_sync).open_sender(port)
        else:
            wait(self._checks.values())
            self._checks.pop(end, None)
            self.served_versions.pop(end, None)
            self._frozen.open(end, attests=port.attests)
            self._offers = WeightOffers()
            self._receivers.pop(end, None)
            target = self._target(end)
            others = (edge_of(other) for other in self._receivers if self._target(other) is target)
            if other := next((edge for edge in others if edge != port.edge), None):
                raise FlowDefinitionError(
                    f"weights {other} and {port.edge} fill the same weights; {type(self.worker).__name__} takes them "
                    "from one group only, since it does not define weight_target()"
                )
            self._receivers[end] = target.open_receiver(ports)
        if port.tensors != "all":
            reshard = port.reshard
            buffers = reshard.src_buffers if port.side == "send" else reshard.dst_buffers
            self._synced_buffers[end] = frozenset(buffers[port.rank])

    def _target(self, edge: str) -> WeightTarget:
        """What an edge fills."""
        return self.worker.weight_target(WeightEdge.source_of(edge))

    def served_layout(self, source: str) -> Layout:
        """The layout of what the weights of the group `source` fill."""
        return self.worker.weight_target(source).layout()

    def offer_weights(self, edge: str, policy_version: int) -> None:
        """A version that stages of this worker may take from now on, before they end."""
        self._offers.add(edge, policy_version)
        self.worker.weights_offered()

    def end_offers(self, reason: str) -> None:
        """No version will be offered any more until the edge is opened anew: a stage that waits for one raises."""
        self._offers.end(reason)

    @property
    def newer_version(self) -> int | None:
        """The newest version that the calling thread's stage may take; None if the served one is as new."""
        edge = self._offered_edge()
        newest = self._offers.newest(edge)
        return newest if newest > self.served_versions.get(edge, newest) else None

    def take_weights(self, policy_version: int, pause: Callable[[], object], resume: Callable[[], object]) -> None:
        """For the calling thread's stage, see Worker.take_weights."""
        stage, edge = self._stage, self._offered_edge()
        assert stage is not None and edge, "the flow offers weights to its stage"
        with stage.interrupted():
            if self._offers.newest(edge) < policy_version:  # in a replay; who trains it may need the devices
                waits = stage.span("wait for weights", CHANNEL, at_least_ns=SHORTEST_WAIT_SPAN_NS)
                with stage.away(), waits, self.waits.waiting("weights", edge, number=policy_version):
                    self._offers.wait_for(edge, policy_version)
            with stage.span("pause requests", SYNC_SPAN, at_least_ns=SHORTEST_WAIT_SPAN_NS):
                pause()
            stage.before_put()  # of the weights that are about to change
            self._serve(stage, edge, policy_version)
            self._offers.taken(edge, policy_version)
            with stage.span("resume requests", SYNC_SPAN, at_least_ns=SHORTEST_WAIT_SPAN_NS):
                resume()

    def _offered_edge(self) -> str:
        """Empty: none is offered to the calling thread's stage."""
        return "" if self._stage is None else self._stage.call.offered

    def publish_weights(self, edge: str) -> int:
        """Publishes the worker's weights on one edge, without frozen ones that are published apart; returns the
        version."""
        self._publish(edge, self.worker.policy_version)
        return self.worker.policy_version

    def publish_frozen_weights(self, edge: str) -> None:
        """Publishes the weights that never change, once after the edge was opened."""
        self._publish(frozen_end(edge), FROZEN_VERSION)

    def _publish(self, end: str, policy_version: int) -> None:
        if (buffers := self._synced_buffers.get(end)) is None:
            weights = self.worker.weights()
        else:
            weights = {name: one for name, one in self.worker.unmerged_weights().items() if name in buffers}
        if (quantizer := self._quantizers.get(end)) is not None:
            weights = quantizer.quantized(weights, self._merge_maxima)
        finish_reads = self._senders[end].publish(weights, policy_version)
        if finish_reads is not None:
            self._unfinished_reads[end] = finish_reads

    @contextmanager
    def weights_as_served(self) -> Iterator[bool]:
        """See Worker.weights_as_served."""
        quantizer = next(iter(self._quantizers.values()), None)
        weights = {} if quantizer is None else self.worker.weights()
        if quantizer is None or not are_stored(weights, quantizer.buffers):
            yield False
            return
        self.before_change()
        with quantizer.rounded(weights, self._merge_maxima):
            yield True

    def _merge_maxima(self, maxima: torch.Tensor) -> None:
        self.rank_groups.all.max_(maxima)

    def before_change(self) -> None:
        """Called before the weights may change; until then receivers may read them by reference."""
        for finish_reads in list(self._unfinished_reads.values()):
            finish_reads()

    def receive_weights(self, edge: str, policy_version: int) -> None:
        """Fills the target of one edge with the weights published on it, before the first version also with frozen
        ones. Their check may continue in the background;
        `confirm_weights` waits for it."""
        # A running check reads the weights that are about to change, unless they are frozen.
        wait(check for end, check in self._checks.items() if not is_frozen(end))
        self.before_change()
        frozen = frozen_end(edge)
        if frozen in self._receivers and frozen not in self.served_versions:
            self._receive(frozen, FROZEN_VERSION)
        self._receive(edge, policy_version)

    def _receive(self, end: str, policy_version: int) -> None:
        self.served_versions.pop(end, None)
        check = self._receivers[end].receive(self._own_tensors(end), policy_version)
        self._checks.pop(end, None)
        if is_frozen(end):
            check = functools.partial(self._remember, end, check)
        if check is not None:
            self._checks[end] = self._checker.submit(check)
        self.served_versions[end] = policy_version

    def _own_tensors(self, end: str) -> Mapping[str, torch.Tensor]:
        """The tensors that an end fills."""
        weights, buffers = self._target(end).weights(), self._synced_buffers.get(end)
        return weights if buffers is None else {name: one for name, one in weights.items() if name in buffers}

    def _remember(self, end: str, check: Check | None) -> None:
        """Checks frozen weights, and keeps their digests."""
        if check is not None:
            check()
        self._frozen.remember(end, self._own_tensors(end))

    def check_served_weights(self) -> None:
        """`confirm_weights` for the calling thread's stage; nothing outside of a stage."""
        if (running := self._stage) is not None:
            self.confirm_weights(running)

    def confirm_weights(self, stage: RunningStage) -> None:
        """Returns once the weights are verified to be the published ones.

        Raises: WeightMismatchError, on every call until other weights are received.
        """
        checks = list(self._checks.items())
        if not all(check.done() for _, check in checks):
            waiting = self.waits.waiting("check of weights", processes=self.serving_processes)
            with stage.span("check weights", SYNC_SPAN), waiting:
                wait(check for _, check in checks)
        for edge, check in checks:
            if check.exception() is not None:
                self.served_versions.pop(edge, None)
            check.result()

    # -- profiles ----------------------------------------------------------------------------------------------------

    def begin_profile(self) -> None:
        """Begins to profile this process; a profile that an abandoned run has begun goes on."""
        self.profile = self.profile or StepProfile(on_gpu=self.worker.device.type == "cuda")

    def end_profile(self, folder: str) -> str:
        """Writes the trace of the profile into a folder and returns its path; empty if none was begun."""
        profile, self.profile = self.profile, None
        if profile is None:
            return ""
        path = Path(folder) / f"{self.identity.role}-{self.identity.rank}.json.gz"
        profile.write(path, worker=self.identity.name)
        return str(path)

    # -- for `rlinf explain` ---------------------------------------------------------------------------------------

    def process(self) -> tuple[str, int, int]:
        """Host, id and start time of this process; see ProcessRecord in explaining/snapshot.py."""
        return platform.node(), os.getpid(), started_ticks(os.getpid())

    def look_at_processes(self, records: bytes) -> bytes:
        """Describes processes of this host (ProcessRecord, as JSON) for a driver on another; see
        explaining/explanation.py."""
        return msgspec.json.encode(look_here(msgspec.json.decode(records, type=list[ProcessRecord])))

    def current_waits(self) -> list[Wait]:
        return self.waits.current()

    def current_progress(self) -> list[StageProgress]:
        """The progress of the running stages, for the heartbeat; empty on the other ranks of a replica, which would
        count its items again."""
        return [] if self.identity.rank_in_replica else [stage.progress() for stage in list(self._running)]


def are_stored(weights: Mapping[str, torch.Tensor], names: Iterable[str]) -> bool:
    """Whether these tensors are memory of the model, which can be changed in place; others are computed when they are
    read, each time anew."""
    pairs = ((weights[name], weights[name]) for name in names)
    return all(one.data_ptr() == other.data_ptr() and one.is_contiguous() for one, other in pairs)
