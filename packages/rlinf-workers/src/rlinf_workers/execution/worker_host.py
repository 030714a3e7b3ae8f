"""WorkerHost: what the framework keeps and does for the one worker of a process."""

from __future__ import annotations

import functools
import os
import platform
import resource
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch

from rlinf_comm import record
from rlinf_workers.collectives import RankGroup, RankGroups, connect
from rlinf_workers.execution.item_channels import ChannelPlace, ChannelSpec, HomeChannel, open_channel
from rlinf_workers.execution.stage_calls import StageCall, StageOutcome
from rlinf_workers.execution.stage_runner import StageRunner
from rlinf_workers.explaining.explanation import look_here
from rlinf_workers.explaining.processes import started_ticks
from rlinf_workers.explaining.snapshot import ProcessRecord
from rlinf_workers.launchers.base import Identity, RequestSender, Wait
from rlinf_workers.metrics import MetricTable
from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.spans import LEASE, Span, WaitTable, now_ns
from rlinf_workers.weight_sync.base import FinishReads, WeightPort, WeightReceiver, WeightSender
from rlinf_workers.worker import StepContext, Worker

W = TypeVar("W", bound=Worker)

CALLS = frozenset(
    {
        "run_stage",
        "unload",
        "open_channel",
        "forget_channels",
        "open_weights",
        "condition_after_run",
        "publish_weights",
        "memory_bytes",
        "current_waits",
        "process",
        "look_at_processes",
    }
)
"""What the executor calls of the host; any other method is the worker's own."""
READS = frozenset({"layout", "save_model", "begin_checkpoint", "end_checkpoint", "save_checkpoint"})
"""Methods of workers that are called between runs and change no weights."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """Of a worker after a run that was given up."""

    is_spent: bool
    """It could not forget what it had begun, and must not be used any more."""
    has_met_ranks: bool
    """It has made collectives with other ranks, and cannot go on without them."""
    has_begun: bool
    """A stage of it took items in that run."""


class WorkerHost:
    """Makes the worker and runs its stages.

    Args:
        request: how the worker asks services of the driver.
    """

    worker: Worker

    def __init__(self, identity: Identity, request: RequestSender) -> None:
        self.identity = identity
        self.request = request
        self.metrics = MetricTable()
        self.waits = WaitTable(identity.name)
        self.shown_rows: list[dict[str, str | float]] = []
        """Rows for people, see Worker.show."""
        self.notes: list[str] = []
        """Lines for the manifest, see Worker.note."""
        self.body_lock = threading.RLock()
        """Held by the stage that computes: two stages of one worker never do at once."""
        self.num_inside = 0
        """Stages that hold their lease."""
        self.begun: StepContext | None = None
        """The newest run in which a stage has taken items."""
        self.is_loaded = True
        """Whether the worker's state is on its devices."""
        self.may_discard = False
        """Whether the weights that it serves may be lost when its state leaves; they are received anew then."""
        self._is_spent = False
        self._onloaded_bytes = 0
        """What it held of its device when it was last offloaded."""
        self.served_versions: dict[str, int] = {}
        """Edge -> version that the worker's weights hold, whole; see `confirm_weights`."""
        self._home_channels: list[HomeChannel] = []
        """Channels that live in this process."""
        self._senders: dict[str, WeightSender] = {}
        self._unfinished_reads: dict[str, FinishReads] = {}
        """Edge -> what comes before the weights change that were last published on it."""
        self._receivers: dict[str, WeightReceiver] = {}
        self._checks: dict[str, Future[object]] = {}
        """Edge -> the check of the weights that came last."""
        self._of_thread = threading.local()

    def make(self, worker_class: type[W], *arguments: Any) -> W:
        """The worker knows who and where it is from the first line of its constructor."""
        worker = worker_class.__new__(worker_class)
        self.worker, worker._host, worker.identity = worker, self, self.identity
        worker.__init__(*arguments)
        self.is_loaded = worker.device.type != "cuda"  # models wait on the host, and first come with a lease
        if not self.is_loaded:
            torch.cuda.empty_cache()  # a library may have made its model on the device
        return worker

    def call(self, method: str, *arguments: Any) -> Any:
        """What a launcher calls for the driver."""
        if method in CALLS:
            return getattr(self, method)(*arguments)
        if method not in READS:
            self.before_change()
        return getattr(self.worker, method)(*arguments)

    @property
    def step(self) -> StepContext | None:
        """The run that the stage of the calling thread takes part in."""
        return getattr(self._of_thread, "step", None)

    @step.setter
    def step(self, context: StepContext) -> None:
        self._of_thread.step = context

    @functools.cached_property
    def _checker(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="rlinf-weight-check")

    @functools.cached_property
    def rank_groups(self) -> RankGroups:
        return connect(self.identity, self.waits, self.request)

    @property
    def replica_ranks(self) -> RankGroup:
        """One that is alone waits for nobody: a stage may ask within a chunk, which other ranks may never get."""
        if self.identity.num_ranks_per_replica == 1:
            return RankGroup(0, 1)
        return self.rank_groups.replica

    # -- what the driver calls -------------------------------------------------------------------------------------

    def run_stage(self, call: StageCall) -> StageOutcome:
        """Runs one stage for one run of the flow."""
        with self.waits.in_stage(call.stage):
            return StageRunner(self, call).run()

    def abandon(self) -> None:
        """SupportsAbort what a run has recorded that is given up."""
        self.metrics.drain()
        self.shown_rows, self.notes = [], []
        try:
            self.worker.abandon()
        except Exception:  # noqa: BLE001 - whatever a user's own worker raises
            traceback.print_exc()
            self._is_spent = True

    def load(self) -> None:
        """Brings the state onto the devices, within the worker's turn."""
        self.worker.onload()
        if self.worker.device.type == "cuda":
            torch.cuda.synchronize()  # what comes next may read and write it on other streams
        self.is_loaded = True

    def unload(self) -> Span:
        """Takes the state off the devices until the worker's next turn; called while it has none. Returns: when."""
        with self.body_lock:
            assert not self.num_inside, f"{self.identity.name} is sent away within its turn"
            start_ns = now_ns()
            if self.is_loaded:
                self._onloaded_bytes = self._device_bytes()
            if self.may_discard:
                self.served_versions.clear()
                self.worker.discard()
            else:
                self.worker.offload()
            self.is_loaded = False
            if self.worker.device.type == "cuda":
                torch.cuda.empty_cache()  # or the caching allocator keeps what others on this device need
            return Span("offload", LEASE, start_ns, now_ns() - start_ns, 0, self.identity.name, self.identity.devices)

    def open_channel(self, spec: ChannelSpec, node: int) -> ChannelPlace:
        """Makes a channel that lives in this process, which is on that node, and its server for the other nodes."""
        self._home_channels.append(HomeChannel(spec, node, has_server=True))
        return self._home_channels[-1].place

    def forget_channels(self) -> None:
        """Lets go of all channels; those of the next run are others."""
        self._home_channels.clear()
        open_channel.cache_clear()

    def condition_after_run(self, context: StepContext | None) -> Condition:
        """After a run that was given up, which had that context."""
        return Condition(
            is_spent=self._is_spent,
            has_met_ranks="rank_groups" in self.__dict__ and self.identity.num_ranks > 1,
            has_begun=context is not None and self.begun == context,
        )

    def open_weights(self, ports: Sequence[WeightPort]) -> None:
        """Opens this rank's end of a weight edge; its ends, where it serves from several processes. An end that was
        opened before is given up, with what came by it."""
        port = ports[0]
        if port.side == "send":
            self.before_change()
            self._unfinished_reads.pop(port.edge, None)
            self._senders.pop(port.edge, None)
            self._senders[port.edge] = WEIGHT_SYNCS.get(port.weight_sync).open_sender(port)
        else:
            wait(self._checks.values())
            self._checks.pop(port.edge, None)
            self.served_versions.pop(port.edge, None)
            self._receivers.pop(port.edge, None)
            self._receivers[port.edge] = self.worker.open_receiver(ports)

    def publish_weights(self, edge: str) -> int:
        """Publishes the worker's weights on one edge; returns the version."""
        finish_reads = self._senders[edge].publish(self.worker.weights(), self.worker.policy_version)
        if finish_reads is not None:
            self._unfinished_reads[edge] = finish_reads
        return self.worker.policy_version

    def before_change(self) -> None:
        """Called before anything may change the weights: until then they may be read where they lie."""
        for finish_reads in list(self._unfinished_reads.values()):
            finish_reads()

    def receive_weights(self, edge: str, policy_version: int) -> None:
        """Fills the worker's weights with what was published on one edge. Their check may go on; `confirm_weights` ends
        it."""
        wait(self._checks.values())  # it reads what is about to change
        self.before_change()
        self.served_versions.pop(edge, None)
        check = self._receivers[edge].receive(self.worker.weights(), policy_version)
        self._checks[edge] = _checked() if check is None else self._checker.submit(check)
        self.served_versions[edge] = policy_version

    @property
    def has_unconfirmed_weights(self) -> bool:
        return not all(check.done() for check in list(self._checks.values()))

    def confirm_weights(self) -> None:
        """Returns when the weights are known to be what was published; from any thread.

        Raises: WeightMismatchError, and again until other weights have come.
        """
        for edge, check in list(self._checks.items()):
            if check.exception() is not None:
                self.served_versions.pop(edge, None)
            check.result()

    def memory_bytes(self) -> tuple[int, int]:
        """What this process holds of its device between its stages, with its state there, and at most since it began;
        of the host's memory on a CPU slot. One whose state is away says what it was when it went."""
        on_gpu = self.worker.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return self._device_bytes() if self.is_loaded else self._onloaded_bytes, peak

    def _device_bytes(self) -> int:
        if self.worker.device.type == "cuda":
            return torch.cuda.memory_allocated()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    def process(self) -> tuple[str, int, int]:
        """Host, number and beginning of this process; see ProcessRecord in explaining/snapshot.py."""
        return platform.node(), os.getpid(), started_ticks(os.getpid())

    def look_at_processes(self, records: bytes) -> bytes:
        """Processes of this host (ProcessRecord, as JSON), as Seen in explaining/explanation.py; the driver is on
        another."""
        return msgspec.json.encode(look_here(msgspec.json.decode(records, type=list[ProcessRecord])))

    def current_waits(self) -> list[Wait]:
        return self.waits.current()


def _checked() -> Future[object]:
    """The check of a weight sync that has checked already."""
    done: Future[object] = Future()
    done.set_result(None)
    return done
