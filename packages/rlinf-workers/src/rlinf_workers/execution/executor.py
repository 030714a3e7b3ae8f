"""The executor: starts the workers of a flow on the devices of its plan and runs the flow, step by step;
docs/architecture.md walks through a run."""

from __future__ import annotations

import concurrent.futures
import os
import platform
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rlinf_comm import Channel, PeerLost
from rlinf_sched import Cluster, Plan, StagePlan, WeightEdge
from rlinf_workers.addresses import DRIVERS_NODE
from rlinf_workers.errors import (
    FlowDefinitionError,
    ProcessLost,
    RemoteError,
    StepTimeout,
    WorkerLost,
)
from rlinf_workers.execution.groups import RunningGroups
from rlinf_workers.execution.item_channels import (
    ChannelPlace,
    ChannelSpec,
    HomeChannel,
    home_of,
    open_channel,
    placed,
)
from rlinf_workers.execution.lease import LeaseRequest, Leases, Reply
from rlinf_workers.execution.ports import Pauses, Writer
from rlinf_workers.execution.stage_calls import PlannedFlow, StageCall, StageOutcome
from rlinf_workers.execution.weight_edges import WeightEdges
from rlinf_workers.explaining.explanation import ProcessSight, RunExplanation, explain
from rlinf_workers.explaining.processes import started_ticks
from rlinf_workers.explaining.snapshot import (
    DRIVER,
    ChannelState,
    ProcessRecord,
    Snapshot,
    StageState,
    StepsAhead,
    own_processes,
)
from rlinf_workers.explaining.text import graph_lines
from rlinf_workers.flow import Flow
from rlinf_workers.group import WorkerGroup
from rlinf_workers.launchers.base import Launcher, StageProgress
from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.leftovers import SweptFolder
from rlinf_workers.metrics import merge
from rlinf_workers.spans import Span
from rlinf_workers.worker import Decisions, ShownRow, StepContext

CHANNEL_ITEMS = 4096
CHANNEL_BYTES = 128 << 20
OnItems = Callable[[str, Sequence[Any]], None]
SETTLE_S = 30.0
"""Time for the stages of an abandoned run to end; a chunk that takes longer is not worth waiting for."""
LOOK_LANE = -2
"""The lane for inspecting the processes of a worker's host, independent of its other calls."""
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_SHARE = 0.5
"""Share of the free shared memory that `Executor.shared_folder` may offer."""
OFFER_LANE = -3
"""The lane for versions of the weights that a running stage may take."""
LOOK_S = 20.0
NUM_ASKED = 3
"""Workers of a host that are asked at once, because a stopped one does not answer."""
FEED_PIECE = 64
"""Items that the driver writes at once if the reader takes whole batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowRun:
    """The results of one run of a flow."""

    metrics: dict[str, float]
    """Weighted means over all ranks."""
    collected: dict[str, list[Any]]
    """Channel -> items, sorted by key, for the channels that no stage reads."""
    shown_rows: list[ShownRow]
    """Rows that workers chose to display, see Worker.show."""
    spans: list[Span]
    decisions: dict[str, Decisions] = field(default_factory=dict)
    """Stage -> what decided its numbers, see Worker.decide; empty unless they are recorded."""
    start_s: float
    """Unix time at which it began, or at which the run before it ended if they overlap."""
    duration_s: float
    """From then to its end."""


@dataclass
class _ChannelSet:
    """The channels of one run of a flow; runs that overlap have different sets."""

    channels: dict[str, Channel] = field(default_factory=dict)
    """The driver's ends of the channels."""
    homes: dict[str, HomeChannel] = field(default_factory=dict)
    """The channels that live in the driver."""
    places: dict[str, ChannelPlace] = field(default_factory=dict)
    keepers: dict[str, str] = field(default_factory=dict)
    """Channel -> the process that holds it."""


@dataclass
class _OpenFlow:
    """A flow with its plan and its channels, ready to run any number of times."""

    planned: PlannedFlow
    channel_sets: list[_ChannelSet]
    """One for each run that can be under way at once."""
    num_begun: int = 0
    """Runs so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnderWay:
    """A run of a flow that has not ended."""

    planned: PlannedFlow
    channel_set: _ChannelSet
    context: StepContext
    leases: Leases
    calls: list[tuple[StageCall, int, Future[StageOutcome]]]
    """Each stage call, its rank and its result."""
    feeding: dict[str, Future[Any]]
    collecting: dict[str, Future[Any]]

    @property
    def stage_calls(self) -> list[tuple[str, int, Future[StageOutcome]]]:
        """Stage, rank and result of each stage call."""
        return [(call.stage, rank, future) for call, rank, future in self.calls]

    @property
    def futures(self) -> list[Future[Any]]:
        """All that the run does."""
        return [*(future for _, _, future in self.calls), *self.feeding.values(), *self.collecting.values()]


class Executor:
    """Runs flows. Use as a context manager: leaving it ends every process.

    Args:
        cluster: the devices that plans refer to.
        launcher: starts the worker processes; local processes by default.
        log_folder: `<log_folder>/<role>/<rank>.log` for each worker; a temporary folder by default.
        env_vars: env vars for every worker, for example the number of threads.
        pythons: worker group -> path of its Python interpreter; other groups use the driver's.
        weight_sync: a name in plugins.WEIGHT_SYNCS, or an import path; auto: chosen by where the two ends are.
        weight_sync_options: further arguments of its constructor.
        attest_weights: whether servers compare digests of what they hold with what was published.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        launcher: Launcher | None = None,
        log_folder: Path | None = None,
        env_vars: Mapping[str, str] | None = None,
        pythons: Mapping[str, str] | None = None,
        weight_sync: str = "auto",
        weight_sync_options: Mapping[str, Any] | None = None,
        attest_weights: bool = True,
    ) -> None:
        self._cluster = cluster
        self._scratch = SweptFolder("rlinf-")
        self._launcher: Launcher = launcher or LocalLauncher()
        self._groups = RunningGroups(
            cluster=cluster,
            launcher=self._launcher,
            log_folder=log_folder or self._scratch.path / "logs",
            env_vars=env_vars or {},
            pythons=pythons or {},
            scratch=self._scratch.path,
        )
        self._weights = WeightEdges(
            self._groups,
            weight_sync=weight_sync,
            options=weight_sync_options or {},
            attests=attest_weights,
            note=lambda text: self.notes.append(text),
        )
        self._open: dict[str, _OpenFlow] = {}
        self.notes: list[str] = []
        """Fall-backs and failures, one sentence each, for a run's manifest."""
        self.explanation: RunExplanation | None = None
        """Diagnosis of the run that passed its deadline or lost a worker, taken before anything was ended."""
        self.driver_log = ""
        """File to which faulthandler writes the driver's stacks; set by the code that registers faulthandler."""
        self._under_way: list[_UnderWay] = []
        """The runs in progress, in the order in which they began and will end."""
        self._oldest_since = 0.0, 0.0
        """When the first of them became the first: Unix time, and `time.perf_counter()`."""
        self._failed: list[_UnderWay] = []
        """The latest runs that were abandoned, until `repair`."""
        self._broken: set[str] = set()
        """Workers that reported the loss of a process of their own."""
        self._offers: list[Future[None]] = []
        """The latest calls of OFFER_LANE."""
        self._threads = ThreadPoolExecutor(max_workers=16, thread_name_prefix="rlinf-driver-port")

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # -- starting --------------------------------------------------------------------------------------------------

    def start(self, flow: Flow, plan: Plan) -> None:
        """Opens a flow: starts the workers that are not running yet. A later flow may use the groups of an earlier one,
        on their devices."""
        if flow.name in self._open:
            raise FlowDefinitionError(f"flow {flow.name!r} is open already; give flows of one executor different names")
        flow.check()
        planned = self._planned(flow, plan)
        self._note_stages_behind(planned)
        for name, stages in planned.graph.workers.items():
            if name not in self._groups:
                self._groups.start(name, flow.workers[name], plan.stage(stages[0]))
        for name, definition in flow.workers.items():
            if definition.shared_by and name not in self._groups:
                self._groups.start_shared(name, definition)
        channel_sets = [_ChannelSet() for _ in range(planned.graph.max_staleness + 1)]
        self._open_channels(self._open.setdefault(flow.name, _OpenFlow(planned, channel_sets)))

    def _note_stages_behind(self, planned: PlannedFlow) -> None:
        declared = [name for name, stage in planned.flow.stages.items() if stage.ahead]
        if declared and not planned.stages_ahead and planned.plan.steps_ahead(planned.graph):
            self.notes.append(
                f"flow {planned.flow.name!r}: the stages {', '.join(declared)} of a run begin when those of the run "
                "before have ended: to begin earlier, they need devices that they share with no other stages, no "
                "offloading, and replicas of one rank"
            )

    def replan(self, flow: Flow, plan: Plan) -> None:
        """Uses another plan for an open flow from its next run on; every worker group stays on its devices. No run
        may be under way.

        Raises:
            FlowDefinitionError: the plan moves a group; `move` does that.
        """
        assert not self._under_way, "a plan changes between runs"
        self._open[flow.name].planned = self._planned(flow, plan)

    def start_ahead(self, plans: Mapping[str, Plan]) -> dict[str, WorkerGroup]:
        """Starts the workers that `move` to these plans needs, while runs go on with the present ones; needs memory for
        both. Workers with devices of other nodes than the driver's are not among them. `repair` ends them.

        Args:
            plans: name of each open flow -> its plan.

        Returns: their groups, which can be called before the move.
        Raises: FlowDefinitionError.
        """
        return self._groups.start_ahead(self._placements(plans))

    @property
    def is_ahead(self) -> bool:
        """Whether all workers that `start_ahead` has started are up. A move then need not wait for their start."""
        return self._groups.is_ahead

    def end_ahead(self) -> None:
        """Ends the workers that `start_ahead` has started and that have not replaced others; `repair` does, too."""
        self._groups.end_ahead()

    def move(self, plans: Mapping[str, Plan]) -> set[str]:
        """Uses other plans from the next run on. Worker groups that they place elsewhere are replaced, by those that
        `start_ahead` has started or by new ones; the others keep running. No run may be under way. If any has moved,
        call `sync_weights` before the next one.

        Args:
            plans: name of each open flow -> its plan.

        Returns: the groups that have moved; whatever state they had is gone.
        Raises: FlowDefinitionError before anything has changed.
        """
        assert not self._under_way, "a plan changes between runs"
        moved = self._groups.move(self._placements(plans))
        for name, opened in self._open.items():
            opened.planned = self._planned(opened.planned.flow, plans[name])
        if moved:
            self._begin_anew("the plan has changed")
        return moved

    def _placements(self, plans: Mapping[str, Plan]) -> dict[str, StagePlan]:
        """The place of each worker group. Raises: FlowDefinitionError if the plans contradict each other."""
        placements: dict[str, StagePlan] = {}
        for name, opened in self._open.items():
            plan, graph = plans[name], opened.planned.graph
            plan.validate(graph, self._cluster)
            for worker, stages in graph.workers.items():
                placed = plan.stage(stages[0])
                self._groups.check_place(name, worker, placed, beside=placements.setdefault(worker, placed))
        return placements

    def group(self, name: str) -> WorkerGroup:
        """The running worker group of that name."""
        return self._groups[name]

    def steps_ahead(self, flow: Flow) -> int:
        """Steps by which generation runs ahead of training under the present plan of an open flow; at most its
        max_staleness."""
        planned = self._open[flow.name].planned
        return planned.plan.steps_ahead(planned.graph)

    def shared_folder(self, num_bytes: int) -> Path | None:
        """An empty folder in the shared memory of the driver's node, which the caller deletes, or else the end of the
        executor; None if there is no room for so many bytes."""
        if not os.path.isdir(SHARED_MEMORY) or num_bytes > SHARED_MEMORY_SHARE * shutil.disk_usage(SHARED_MEMORY).free:
            return None
        folder = Path(tempfile.mkdtemp(prefix="rlinf-state-", dir=SHARED_MEMORY))
        self._scratch.also(folder)
        return folder

    def weights_bytes(self, edge: WeightEdge) -> int:
        """Bytes that a sync over the edge moves; 0 before the first sync."""
        return self._weights.num_bytes.get(edge, 0)

    def _planned(self, flow: Flow, plan: Plan) -> PlannedFlow:
        """The flow with its plan, after checking the plan against the flow, the cluster and the running groups."""
        graph = flow.graph()
        plan.validate(graph, self._cluster)
        ahead = plan.prediction.max_staleness if plan.prediction else 0
        if ahead > graph.max_staleness:
            raise FlowDefinitionError(
                f"flow {flow.name!r}: the plan lets generation run {ahead} steps ahead of training (max_staleness="
                f"{ahead}), but the flow has max_staleness={graph.max_staleness}; plan it with that"
            )
        if graph.max_staleness and (several := [name for name, stages in graph.workers.items() if len(stages) > 1]):
            raise FlowDefinitionError(
                f"flow {flow.name!r}: max_staleness={graph.max_staleness} lets runs overlap, and worker {several[0]!r} "
                f"has the stages {list(graph.workers[several[0]])}, of which one could be a run ahead of the other; "
                "give each stage a worker group, or set max_staleness to 0"
            )
        for channel in graph.channels:
            if len(graph.readers(channel)) > 1:
                raise FlowDefinitionError(
                    f"flow {flow.name!r}: channel {channel!r} has several readers, "
                    f"{list(graph.readers(channel))}, which would take each other's items; write to a channel for each"
                )
        for name, stages in graph.workers.items():
            self._groups.check_place(flow.name, name, plan.stage(stages[0]))
        return PlannedFlow(flow=flow, graph=graph, plan=plan)

    def _open_channels(self, opened: _OpenFlow) -> None:
        for number, channel_set in enumerate(opened.channel_sets):
            for channel in (*opened.planned.graph.channels, *opened.planned.replica_channels):
                self._open_channel(opened.planned, channel_set, channel, number)

    def _open_channel(self, planned: PlannedFlow, opened: _ChannelSet, channel: str, number: int) -> None:
        """Opens a channel of the set with that number."""
        stage = planned.replica_channels.get(channel)
        readers = self._ranks_of(planned, [stage] if stage else planned.graph.readers(channel))
        writers = self._ranks_of(planned, [stage] if stage else planned.graph.writers(channel))
        nodes = {rank: self._groups.node(*rank) for rank in (*readers, *writers)}
        home = home_of(nodes[rank] for rank in readers)
        num_keys = planned.plan.stage(stage).num_ranks if stage else 1
        spec = ChannelSpec(
            name=f"{planned.flow.name}.{channel}" + (f".{number}" if number else ""),
            capacity_items=CHANNEL_ITEMS * num_keys,
            capacity_bytes=CHANNEL_BYTES * num_keys,
            num_keys=num_keys,
        )
        if home == DRIVERS_NODE:
            mine = HomeChannel(spec, home, has_server=any(node != home for node in nodes.values()))
            opened.homes[channel], opened.channels[channel], opened.places[channel] = mine, mine.channel, mine.place
            opened.keepers[channel] = DRIVER
            return
        keeper, rank = next(rank for rank in readers if nodes[rank] == home)
        opened.keepers[channel] = f"{keeper}/{rank}"
        future = self._groups[keeper].handles[rank].call("open_channel", spec, home)
        (place,) = self._groups.gather([future])
        opened.places[channel], opened.channels[channel] = place, open_channel(place.seen_from(DRIVERS_NODE))

    def _ranks_of(self, planned: PlannedFlow, stages: Sequence[str]) -> list[tuple[str, int]]:
        """(worker group, rank) of all ranks of the stages."""
        return [
            (planned.graph.stage(stage).worker, rank)
            for stage in stages
            for rank in range(planned.plan.stage(stage).num_ranks)
        ]

    # -- weights ---------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Publishes the trainers' current weights on every edge; the serving workers receive them before their next
        chunk.

        Needed once before the first run and after anything that changes weights outside a run (an SFT warm-up, a loaded
        checkpoint).
        """
        graphs = [opened.planned.graph for opened in self._open.values()]
        self._weights.sync(
            dict.fromkeys(edge for graph in graphs for edge in graph.weight_edges),
            num_versions=1 + max(graph.max_staleness for graph in graphs),
            offered={edge for opened in self._open.values() for edge in opened.planned.flow.offered},
        )

    # -- running ---------------------------------------------------------------------------------------------------

    def run(
        self,
        flow: Flow,
        *,
        context: StepContext,
        feeds: Mapping[str, Sequence[Any]] | None = None,
        timeout_s: float = 600.0,
        on_items: OnItems | None = None,
    ) -> FlowRun:
        """Runs an open flow once: `begin`, then `finish`."""
        self.begin(flow, context=context, feeds=feeds, on_items=on_items)
        return self.finish(timeout_s)

    @property
    def num_under_way(self) -> int:
        """Runs that have begun and that `finish` has not returned yet."""
        return len(self._under_way)

    def begin(
        self,
        flow: Flow,
        *,
        context: StepContext,
        feeds: Mapping[str, Sequence[Any]] | None = None,
        on_items: OnItems | None = None,
        records: bool = False,
        recorded: Mapping[str, Decisions] | None = None,
    ) -> None:
        """Begins a run of an open flow. Its stages serve the weights of the runs that have finished, and each begins as
        soon as the same stage has ended in the run before, or at once if it may be `ahead`. Of a flow with
        `max_staleness` k, k + 1 runs may be under way at once; of any other, one.

        Args:
            context: given to every stage as `self.step`.
            feeds: items for each channel that no stage writes; item i gets key i.
            on_items: called with the name and items of a channel that no stage reads, as they arrive, in a thread of
                the driver; these items are not collected. An exception in it ends the run.
            records: whether to record the decisions of the stages.
            recorded: stage -> decisions of an earlier run, which the stages follow.
        """
        opened = self._open[flow.name]
        planned, feeds = opened.planned, feeds or {}
        assert len(self._under_way) < len(opened.channel_sets), f"{self.num_under_way} runs are under way"
        assert all(run.planned is planned for run in self._under_way), "runs of one flow under one plan may overlap"
        for edge in planned.graph.weight_edges:
            if edge not in self._weights.versions:
                raise FlowDefinitionError(
                    f"flow {flow.name!r}: weights {edge.name} were never synced; "
                    "call sync_weights() once before the first run"
                )
        if set(feeds) != set(planned.graph.feeds):
            raise FlowDefinitionError(
                f"flow {flow.name!r} is fed through {list(planned.graph.feeds)}, but got {sorted(feeds)}"
            )
        number = opened.num_begun
        channel_set = opened.channel_sets[number % len(opened.channel_sets)]
        opened.num_begun += 1
        channels = channel_set.channels
        if not self._under_way:
            self._oldest_since = time.time(), time.perf_counter()
            self._launcher.serve("lease", leases := self._leases(planned))
        else:
            leases = self._under_way[0].leases  # stages of overlapping runs take turns on the devices that they share
        for name, channel in channels.items():
            channel.reopen(planned.num_writers(name))
        calls = self._start_stages(planned, channel_set, context, number, records, recorded)
        feeding = {
            channel: self._threads.submit(self._feed, planned, channels[channel], channel, items)
            for channel, items in feeds.items()
        }
        collecting = {
            channel: self._threads.submit(self._collect, channel, channels[channel], on_items)
            for channel in planned.graph.collects
        }
        self._under_way.append(
            _UnderWay(
                planned=planned,
                channel_set=channel_set,
                context=context,
                leases=leases,
                calls=calls,
                feeding=feeding,
                collecting=collecting,
            )
        )

    def finish(self, timeout_s: float = 600.0) -> FlowRun:
        """Waits for the run that began first and returns its results.

        Args:
            timeout_s: deadline from now on; past it, all runs under way are abandoned with a StepTimeout that shows who
                waits for whom.

        Raises: RemoteError (a stage raised), WorkerLost, StepTimeout. After any of them no flow can be run again,
        except after the last two by calling `repair`.
        """
        run, (start_s, clock) = self._under_way[0], self._oldest_since
        calls, context = run.calls, run.context
        later = [future for other in self._under_way[1:] for future in other.futures]  # a failure there may block this
        try:
            self._groups.gather(run.futures, timeout_s, watched=later)
        except TimeoutError as error:
            explanation = self.explanation = self.explain(self.snapshot())
            self._give_up("the run passed its deadline")
            raise StepTimeout(
                f"flow {run.planned.flow.name!r}, step {context.step}: not done after {timeout_s:.0f} s\n"
                + "\n".join(graph_lines(explanation))
            ) from error
        except BaseException as error:
            if isinstance(error, WorkerLost):
                self.explanation = self.explain(self.snapshot())
            if isinstance(error, RemoteError) and error.error_type == ProcessLost.__name__:
                self._broken.add(error.worker)
            self._give_up("the run was given up")
            raise
        self._oldest_since = time.time(), time.perf_counter()
        self._under_way = self._under_way[1:]
        outcomes = [future.result() for _, _, future in calls]
        self.notes += [f"step {context.step}: {text}" for outcome in outcomes for text in outcome.notes]
        for (call, _, _), outcome in zip(calls, outcomes, strict=True):
            self._weights.were_published(call.publishes, outcome.policy_version)
        self._offer_weights()
        return FlowRun(
            metrics=merge(outcome.metrics for outcome in outcomes),
            collected={channel: future.result() for channel, future in run.collecting.items()},
            shown_rows=[row for outcome in outcomes for row in outcome.shown_rows],
            decisions=_decisions_of(calls),
            spans=[*(span for outcome in outcomes for span in outcome.spans), *self._groups.device_state.take_spans()],
            start_s=start_s,
            duration_s=self._oldest_since[1] - clock,
        )

    def _offer_weights(self) -> None:
        """Tells the stages of the runs under way which versions they may take."""
        flows = {run.planned.flow.name: run.planned.flow for run in self._under_way}
        self._offers = [
            call
            for flow in flows.values()
            for edge in flow.offered
            for call in self._groups[edge.target].start_call(
                "offer_weights", edge.name, self._weights.versions[edge], lane=OFFER_LANE
            )
        ]

    def _end_offers(self, reason: str) -> None:
        """Ends the waits of stages for versions that will not be published."""
        targets = {edge.target for run in self._failed for edge in run.planned.flow.offered}
        self._offers += [
            call for name in targets for call in self._groups[name].start_call("end_offers", reason, lane=OFFER_LANE)
        ]

    def _leases(self, planned: PlannedFlow) -> Leases:
        """The leases of one run, or of several that overlap; the table of device state outlives it."""

        def make_room(worker: str, request: LeaseRequest, reply: Reply) -> None:
            beside = planned.groups_of(request.turn)
            self._groups.make_room(worker, beside=beside, stays=request.stays, ready=reply)

        return Leases(planned.leased_devices, make_room)

    def _start_stages(
        self,
        planned: PlannedFlow,
        channel_set: _ChannelSet,
        context: StepContext,
        number: int,
        records: bool,
        recorded: Mapping[str, Decisions] | None,
    ) -> list[tuple[StageCall, int, Future[StageOutcome]]]:
        started: list[tuple[StageCall, int, Future[StageOutcome]]] = []
        addresses = {name: channel.address for name, channel in channel_set.channels.items()}
        replica_channels = {stage: channel for channel, stage in planned.replica_channels.items()}
        versions = self._weights.versions
        of_run: dict[str, Any] = {"number": number, "follows": bool(self._under_way)}
        of_run |= {"records": records, "recorded": recorded}
        for rank, lane, call in planned.stage_calls(addresses, versions, context, **of_run):
            worker = planned.graph.stage(call.stage).worker
            there = placed(call, self._groups.node(worker, rank), channel_set.places, replica_channels.get(call.stage))
            handle = self._groups[worker].handles[rank]
            started.append((call, rank, handle.call("run_stage", there, lane=lane)))
        return started

    @staticmethod
    def _feed(planned: PlannedFlow, channel: Channel, name: str, items: Sequence[Any]) -> None:
        port = planned.port(name, channel.address, other_end=planned.graph.readers(name))
        writer: Writer[Any] = Writer(port, channel, Pauses())
        numbered = list(enumerate(items))
        for start in range(0, len(numbered), FEED_PIECE):
            writer.put_many(numbered[start : start + FEED_PIECE])
        channel.close()

    @staticmethod
    def _collect(name: str, channel: Channel, on_items: OnItems | None) -> list[Any]:
        collected: list[tuple[int, Any]] = []
        for entry in channel:
            if on_items is None:
                collected.extend(entry)
            else:
                on_items(name, [item for _, item in entry])
        return [item for _, item in sorted(collected, key=lambda pair: pair[0])]

    # -- explaining ------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The state of the oldest run at this moment; can be called from any thread."""
        run = next(iter(self._under_way), None)
        waits, workers, taken_s = tuple(self._launcher.waits()), tuple(self._processes()), time.time()
        processes = (*workers, *own_processes(waits, {worker.name: worker for worker in workers}))
        if run is None:
            return Snapshot(taken_s=taken_s, waits=waits, processes=processes)
        planned, channel_set = run.planned, run.channel_set
        turns = sorted({wait.number for wait in waits if wait.kind == "lease"} & set(planned.leased_devices))
        return Snapshot(
            taken_s=taken_s,
            flow=planned.flow.name,
            step=run.context.step,
            phase=run.context.phase,
            began_s=self._oldest_since[0],
            ahead=_steps_ahead(self._under_way),
            stages=tuple(_stage_states(run)),
            channels=tuple(_channel_state(name, home.channel) for name, home in channel_set.homes.items()),
            keepers=channel_set.keepers,
            feeding=tuple(channel for channel, future in run.feeding.items() if not future.done()),
            collecting=tuple(channel for channel, future in run.collecting.items() if not future.done()),
            waits=waits,
            lease_holders={turn: tuple(run.leases.holders(turn)) for turn in turns},
            leaving=tuple(self._groups.device_state.leaving()),
            processes=processes,
        )

    def progress(self) -> list[StageProgress]:
        """How far the unfinished stages of the oldest run are, added up over their ranks, as of the last heartbeats;
        empty between runs. Can be called from any thread."""
        run, report = next(iter(self._under_way), None), getattr(self._launcher, "progress", None)
        if run is None or report is None:
            return []
        unfinished = {stage for stage, _, future in run.stage_calls if not future.done()}
        by_stage: dict[str, StageProgress] = {}
        for one in report():
            if one.stage in unfinished and (one.step, one.phase) == (run.context.step, run.context.phase):
                one = one if one.unit else replace(one, num_items=run.context.num_items)
                before = by_stage.get(one.stage)
                by_stage[one.stage] = one if before is None else _added(before, one)
        order = [stage.name for stage in run.planned.graph.stages]
        return sorted(by_stage.values(), key=lambda one: order.index(one.stage))

    def num_started(self) -> tuple[int, int]:
        """Workers that are up, and all workers."""
        return sum(1 for _ in self._groups.processes()), len(self._groups.handles())

    def explain(self, snapshot: Snapshot) -> RunExplanation:
        """Like `explaining.explanation.explain`, including the processes of other hosts."""
        return explain(snapshot, elsewhere=self.look_elsewhere(snapshot))

    def look_elsewhere(self, snapshot: Snapshot) -> list[ProcessSight]:
        """The processes of other hosts, as reported by a worker there that answers within LOOK_S; for any thread."""
        hosts: dict[str, list[ProcessRecord]] = defaultdict(list)
        for record in snapshot.processes:
            if record.host != platform.node():
                hosts[record.host].append(record)
        processes: list[ProcessSight] = []
        for records in hosts.values():
            order = msgspec.json.encode(records)
            workers = [record.name for record in records if " " not in record.name]
            futures = [
                self._groups.handle(worker).call("look_at_processes", order, lane=LOOK_LANE)
                for worker in workers[:NUM_ASKED]
            ]
            with suppress(concurrent.futures.TimeoutError):
                for one in concurrent.futures.as_completed(futures, LOOK_S):
                    if one.exception() is None:
                        processes += msgspec.json.decode(one.result(), type=list[ProcessSight])
                        break
        return processes

    def _processes(self) -> Iterator[ProcessRecord]:
        """The driver and the workers that have started."""
        pid = os.getpid()
        yield ProcessRecord(
            name=DRIVER, host=platform.node(), pid=pid, started_ticks=started_ticks(pid), log_path=self.driver_log
        )
        yield from self._groups.processes()

    # -- profiles ----------------------------------------------------------------------------------------------------

    def begin_profile(self) -> None:
        """Begins to profile every worker; call it between runs."""
        self._groups.gather([handle.call("begin_profile") for handle in self._groups.handles().values()])

    def end_profile(self, folder: Path) -> list[Path]:
        """Ends the profile of every worker. Each writes `<role>-<rank>.json.gz`, a Chrome trace, into a folder that all
        nodes share. Returns the files; workers that were started after `begin_profile` have none."""
        calls = [handle.call("end_profile", str(folder)) for handle in self._groups.handles().values()]
        return [Path(file) for file in self._groups.gather(calls) if file]

    # -- repairing -------------------------------------------------------------------------------------------------

    def repair(self, *, settle_s: float = SETTLE_S) -> set[str]:
        """Makes flows runnable again after WorkerLost, StepTimeout, or an exception of a worker that lost a process of
        its own (ProcessLost) or a connection (PeerLost, TornStream of rlinf_comm).

        Stages in progress end because their channels are closed. Replaces workers that were lost or whose stages did
        not end in time, and with them the other ranks of a group that runs collectives. Channels and weight syncs are
        new, so that nothing of the failed run reaches a later one; call `sync_weights` before the next run.

        Args:
            settle_s: seconds to wait for the stages in progress.

        Returns:
            Worker groups whose state differs from before the failed run: replaced groups, and groups that train and had
            taken items.

        Raises: WorkerLost if another worker is lost meanwhile.
        """
        failed, self._failed = self._failed, []
        self._groups.end_ahead()
        self._launcher.forget_lost()
        broken, self._broken = self._broken, set()
        concurrent.futures.wait([future for run in failed for future in run.futures], settle_s)
        for run in failed:
            worker_of = run.planned.graph.stage
            broken |= {f"{worker_of(stage).worker}/{rank}" for stage, rank, call in run.stage_calls if not call.done()}
        replaced, begun = self._groups.replace_unusable(broken, [run.context for run in failed])
        self._begin_anew("a worker was lost")
        train = {
            stage.worker for opened in self._open.values() for stage in opened.planned.graph.stages if stage.trains
        }
        return (begun & train) | replaced

    def _begin_anew(self, reason: str) -> None:
        """Replaces channels and weight syncs, between runs."""
        concurrent.futures.wait(self._offers, SETTLE_S)  # none may arrive after the weight syncs are opened anew
        self._offers = []
        self._groups.gather([handle.call("forget_channels") for handle in self._groups.handles().values()])
        self._weights.forget()
        for opened in self._open.values():
            self._abort(opened, reason)
            for channel_set in opened.channel_sets:
                for channels in (channel_set.channels, channel_set.homes, channel_set.places):
                    channels.clear()
            self._open_channels(opened)

    # -- ending ----------------------------------------------------------------------------------------------------

    def _give_up(self, reason: str) -> None:
        """Abandons all runs under way: their stages end at their next request to a channel or lease."""
        self._failed, self._under_way = self._under_way, []
        for run in self._failed:
            self._abort(self._open[run.planned.flow.name], reason)
            run.leases.refuse(reason)
        self._end_offers(reason)

    def _abort(self, opened: _OpenFlow, reason: str) -> None:
        for channel in [channel for one in opened.channel_sets for channel in one.channels.values()]:
            try:
                channel.abort(reason)
            except PeerLost:
                pass  # the channel ended with its process

    def shutdown(self) -> None:
        """Ends every process; leaves nothing behind."""
        for opened in self._open.values():
            self._abort(opened, "the executor was shut down")
        self._groups.wait_for_endings()
        self._launcher.shutdown()
        self._threads.shutdown(wait=True)
        self._scratch.close()


def _decisions_of(calls: Sequence[tuple[StageCall, int, Future[StageOutcome]]]) -> dict[str, Decisions]:
    """Stage -> the decisions of its ranks, of a run that has ended."""
    decisions: dict[str, Decisions] = {}
    for call, rank, future in calls:
        decisions.setdefault(call.stage, []).extend((rank, decision) for decision in future.result().decisions)
    return {stage: of_stage for stage, of_stage in decisions.items() if of_stage}


def _added(one: StageProgress, other: StageProgress) -> StageProgress:
    """The progress of two ranks; items of the flow are those of all ranks already."""
    return replace(
        one,
        num_done=one.num_done + other.num_done,
        num_items=one.num_items + other.num_items if one.unit else one.num_items,
        is_computing=one.is_computing or other.is_computing,
    )


def _stage_states(run: _UnderWay) -> Iterator[StageState]:
    graph, plan = run.planned.graph, run.planned.plan
    for stage in graph.stages:
        yield StageState(
            name=stage.name,
            worker=stage.worker,
            num_ranks_per_replica=plan.stage(stage.name).num_ranks_per_replica,
            reads=stage.reads,
            writes=stage.writes,
            unfinished=tuple(
                rank for name, rank, future in run.stage_calls if name == stage.name and not _has_returned(future)
            ),
        )


def _steps_ahead(under_way: Sequence[_UnderWay]) -> StepsAhead | None:
    """How far generation is ahead; None for a flow whose runs do not overlap, and where the last run has just ended."""
    under_way = list(under_way)  # a watching thread reads it
    if not under_way:
        return None
    planned, newest = under_way[0].planned, under_way[-1]
    graph = planned.graph
    if not (max_staleness := planned.plan.steps_ahead(graph)):
        return None
    running = {graph.stage(name).worker for name, _, future in newest.stage_calls if not _has_returned(future)}
    return StepsAhead(
        max_staleness=max_staleness,
        num_under_way=len(under_way),
        idle=tuple(dict.fromkeys(edge.target for edge in graph.weight_edges if edge.target not in running)),
    )


def _has_returned(future: Future[Any]) -> bool:
    """False for the call of a lost worker."""
    return future.done() and future.exception() is None


def _channel_state(name: str, channel: Channel) -> ChannelState:
    stats = channel.stats()
    return ChannelState(
        name=name, num_entries=stats.num_items, num_bytes=stats.num_bytes, capacity_bytes=stats.capacity_bytes
    )
