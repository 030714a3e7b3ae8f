"""The executor: starts the workers of a flow where its plan says and runs the flow, step by step.

One run of a flow, in six moves:
    1. the channels are opened for as many writers as there are ranks
    2. every rank of every stage is told to run its method, with ports cut to the plan (`_stage_call`)
    3. the driver feeds the channels that no stage writes and collects those that no stage reads
    4. stages that share devices ask for their turn (lease.py), bring their state and take the weights they must serve
    5. a stage whose method returns publishes what it trained and closes its channels; so the end travels down the flow
    6. metrics, spans and collected items come back
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlinf_comm.channel import Channel
from rlinf_comm.weights import WeightStore
from rlinf_sched.cluster import Cluster
from rlinf_sched.flow_graph import FlowGraph, WeightEdge
from rlinf_sched.plan import Plan, StagePlan
from rlinf_workers.errors import FlowDefinitionError, StepTimeout
from rlinf_workers.execution.lease import LeaseService
from rlinf_workers.execution.ports import DriverPauses, Writer
from rlinf_workers.execution.stage_call import WHOLE_BATCH, ReadPort, StageCall, StageOutcome, WritePort
from rlinf_workers.execution.waits import describe_waits
from rlinf_workers.flow import Flow
from rlinf_workers.group import WorkerGroup
from rlinf_workers.launcher.base import Launcher, WorkerSpec
from rlinf_workers.launcher.futures import gather
from rlinf_workers.launcher.local import LocalLauncher
from rlinf_workers.links.shared import WeightPort, edge_plan
from rlinf_workers.metrics import merge
from rlinf_workers.spans import Span
from rlinf_workers.worker import StepContext

CHANNEL_ITEMS = 4096
CHANNEL_BYTES = 128 << 20
FEED_PIECE = 64
"""Items that the driver hands over at once, when the reader takes whole batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowRun:
    """What one run of a flow gave."""

    metrics: dict[str, float]
    """Weighted means over all ranks."""
    collected: dict[str, list[Any]]
    """Channel -> items, sorted by key; for the channels that no stage reads."""
    shown: list[dict[str, str | float]]
    """Rows that workers chose to show people."""
    spans: list[Span]
    start_s: float
    """Unix time."""
    duration_s: float


@dataclass
class _OpenFlow:
    """A flow with its plan and its channels, ready to run any number of times."""

    flow: Flow
    graph: FlowGraph
    plan: Plan
    turns: dict[str, tuple[str, ...]]
    shared_devices: dict[int, frozenset[int]]
    """Turn -> the devices that it shares with another turn; turns that share none are left out and need no lease."""
    edges: list[str] = field(default_factory=list)
    channels: dict[str, Channel] = field(default_factory=dict)


class Executor:
    """Runs flows. Use as a context manager: leaving it ends every process.

    Args:
        cluster: the devices that plans refer to.
        launcher: where processes come from; local processes by default.
        log_folder: `<log_folder>/<role>/<rank>.log` for each worker; a temporary folder by default.
        environment: variables for every worker, for example the number of threads.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        launcher: Launcher | None = None,
        log_folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        channel_bytes: int = CHANNEL_BYTES,
    ) -> None:
        self._cluster = cluster
        self._scratch = tempfile.TemporaryDirectory(prefix="rlinf-")
        self._launcher: Launcher = launcher or LocalLauncher()
        self._log_folder = log_folder or Path(self._scratch.name) / "logs"
        self._environment = dict(environment or {})
        self._channel_bytes = channel_bytes
        self._groups: dict[str, WorkerGroup] = {}
        self._placements: dict[str, tuple[tuple[int, ...], int]] = {}
        self._open: dict[str, _OpenFlow] = {}
        self._weight_edges: dict[str, tuple[str, str]] = {}
        self._stores: dict[str, WeightStore] = {}
        self._versions: dict[str, int] = {}
        self._weights_bytes: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(max_workers=16, thread_name_prefix="rlinf-driver-port")

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # -- starting --------------------------------------------------------------------------------------------------

    def start(self, flow: Flow, plan: Plan) -> None:
        """Opens a flow: starts the workers that do not run yet. A later flow may use the groups of an earlier one, on
        their devices."""
        graph = flow.graph()
        plan.validate(graph, self._cluster)
        if flow.name in self._open:
            raise FlowDefinitionError(f"flow {flow.name!r} is open already; give flows of one executor different names")
        for channel in graph.channels:
            if len(graph.readers(channel)) > 1:
                raise FlowDefinitionError(
                    f"flow {flow.name!r}: channel {channel!r} has several readers, "
                    f"{list(graph.readers(channel))}, which would take each other's items; write to a channel for each"
                )
        opened = self._open[flow.name] = _OpenFlow(
            flow=flow,
            graph=graph,
            plan=plan,
            turns={name: turn for turn in graph.turns() for name in turn},
            shared_devices=_shared_devices_by_turn(plan),
        )
        for name, stages in graph.workers.items():
            self._place_group(name, flow, plan.stage(stages[0]))
        for channel in graph.channels:
            opened.channels[channel] = Channel.create(
                f"{flow.name}.{channel}",
                capacity_items=CHANNEL_ITEMS,
                capacity_bytes=self._channel_bytes,
                lost_peers="tolerate",  # the launcher reports deaths, and starts workers again
            )
        for edge in graph.weight_edges:
            name = f"{edge.source} -> {edge.target}"
            self._weight_edges[name] = (edge.source, edge.target)
            opened.edges.append(name)

    def replan(self, flow: Flow, plan: Plan) -> None:
        """Another plan for an open flow, from its next run on; every worker group stays where it is.

        Raises:
            FlowDefinitionError: the plan moves a group, which takes a new executor.
        """
        opened = self._open[flow.name]
        plan.validate(opened.graph, self._cluster)
        for name, stages in opened.graph.workers.items():
            self._check_place(name, flow, plan.stage(stages[0]))
        opened.plan, opened.shared_devices = plan, _shared_devices_by_turn(plan)

    def group(self, name: str) -> WorkerGroup:
        """The running worker group of that name."""
        return self._groups[name]

    def weights_bytes(self, edge: WeightEdge) -> int:
        """What a sync over the edge moves; 0 before the first."""
        return self._weights_bytes.get(f"{edge.source} -> {edge.target}", 0)

    def _place_group(self, name: str, flow: Flow, placed: StagePlan) -> None:
        """Starts a group, or checks that the running one is where the plan has it."""
        if name in self._groups:
            self._check_place(name, flow, placed)
            return
        self._placements[name] = (placed.devices, placed.num_ranks)
        self._groups[name] = self._start_group(name, flow, placed)
        if placed.offload:
            self._groups[name].start_call("unload")  # comes before any other call; nothing has to wait for it

    def _check_place(self, name: str, flow: Flow, placed: StagePlan) -> None:
        devices, num_ranks = self._placements[name]
        if (placed.devices, placed.num_ranks) != (devices, num_ranks):
            raise FlowDefinitionError(
                f"flow {flow.name!r}: worker {name!r} runs on devices {list(devices)} in {num_ranks} ranks; "
                f"the plan wants {list(placed.devices)} in {placed.num_ranks}"
            )

    def _start_group(self, name: str, flow: Flow, placed: StagePlan) -> WorkerGroup:
        definition = flow.workers[name]
        handles = [
            self._launcher.start(
                WorkerSpec(
                    role=name,
                    rank=rank,
                    num_ranks=placed.num_ranks,
                    worker_class=definition.worker_class,
                    arguments=definition.arguments,
                    devices=self._device_names(placed, rank),
                    log_path=self._log_folder / name / f"{rank}.log",
                    rendezvous=f"{self._scratch.name}/{name}.rendezvous",
                    environment=self._environment | self._visible_devices(placed, rank),
                )
            )
            for rank in range(placed.num_ranks)
        ]
        return WorkerGroup(name, handles, self._launcher)

    def _device_names(self, placed: StagePlan, rank: int) -> tuple[str, ...]:
        chosen = [self._cluster.devices[index] for index in placed.devices_of(rank)]
        return tuple(f"{device.kind}:{device.index}" for device in chosen)

    def _visible_devices(self, placed: StagePlan, rank: int) -> dict[str, str]:
        chosen = [self._cluster.devices[index] for index in placed.devices_of(rank)]
        mine = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        gpus = [device.index for device in chosen if device.kind == "cuda"]
        # The cluster counts the GPUs that the driver sees; the driver's own list says which these are.
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine[index] if mine else str(index) for index in gpus)}

    # -- weights ---------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Publishes the trainers' present weights on every edge; the serving workers take them before their next chunk.

        Needed once before the first run and after anything that changes weights outside a run (a warm start, a loaded
        checkpoint).
        """
        for edge in self._weight_edges:
            if edge not in self._stores:
                self._connect(edge)
            source, _ = self._weight_edges[edge]
            self._versions[edge] = self._groups[source].call("publish_weights", edge)[0]

    def _connect(self, edge: str) -> None:
        source, target = (self._groups[name] for name in self._weight_edges[edge])
        specs = source.call("weight_specs", ranks=[0])[0]
        served = target.call("weight_specs", ranks=[0])[0]
        self._weights_bytes[edge] = sum(spec.num_bytes for spec in specs.values())
        reshard = edge_plan(specs, source.num_ranks, target.num_ranks, served)
        store = self._stores[edge] = WeightStore.create(reshard, name=edge)
        sides: list[tuple[WorkerGroup, Literal["send", "receive"]]] = [(source, "send"), (target, "receive")]
        for group, side in sides:
            ports = [
                WeightPort(
                    edge=edge,
                    side=side,
                    rank=rank,
                    address=store.address,
                    specs=specs,
                    num_source_ranks=source.num_ranks,
                    num_target_ranks=target.num_ranks,
                )
                for rank in range(group.num_ranks)
            ]
            group.scatter("open_weights", ports)

    # -- running ---------------------------------------------------------------------------------------------------

    def run(
        self,
        flow: Flow,
        *,
        context: StepContext,
        feeds: Mapping[str, Sequence[Any]] | None = None,
        timeout_s: float = 600.0,
        on_items: Callable[[str, Sequence[Any]], None] | None = None,
    ) -> FlowRun:
        """Runs an open flow once.

        Args:
            context: given to every stage as `self.step`.
            feeds: items for each channel that no stage writes; item i gets key i.
            timeout_s: past it the run is given up with a StepTimeout that says who waits for whom.
            on_items: called with a channel that no stage reads and items of it, as they come and from a thread of the
                driver; they are not collected then. What it raises ends the run.

        Raises: RemoteError (a stage raised), WorkerLost, StepTimeout. The flow cannot be run again after any of them.
        """
        opened = self._open[flow.name]
        feeds = feeds or {}
        unsynced = [edge for edge in opened.edges if edge not in self._stores]
        if unsynced:
            raise FlowDefinitionError(
                f"flow {flow.name!r}: weights {unsynced[0]} were never synced; "
                "call sync_weights() once before the first run"
            )
        if set(feeds) != set(opened.graph.feeds):
            raise FlowDefinitionError(
                f"flow {flow.name!r} is fed through {list(opened.graph.feeds)}, but got {sorted(feeds)}"
            )
        leases = LeaseService(opened.shared_devices)
        self._launcher.serve("lease", leases)
        self._reopen_channels(opened)
        start_s, clock = time.time(), time.perf_counter()
        calls = self._start_stages(opened, context)
        driver_ports: list[Future[Any]] = [
            *(self._threads.submit(self._feed, opened, channel, items) for channel, items in feeds.items()),
            *(self._threads.submit(self._collect, opened, channel, on_items) for channel in opened.graph.collects),
        ]
        try:
            results: list[Any] = gather(
                [*(future for _, future in calls), *driver_ports], self._launcher.lost, timeout_s
            )
        except TimeoutError as error:
            text = describe_waits(self._launcher.waits(), leases, opened.channels)
            self._abort(opened, "the run passed its deadline")
            raise StepTimeout(
                f"flow {flow.name!r}, step {context.step}: not done after {timeout_s:.0f} s; who waits for what:\n"
                + text
            ) from error
        except BaseException:
            self._abort(opened, "the run was given up")
            raise
        duration_s = time.perf_counter() - clock
        outcomes: list[StageOutcome] = results[: len(calls)]
        collected: list[list[Any]] = results[len(calls) + len(feeds) :]
        self._note_versions([stage_call for stage_call, _ in calls], outcomes)
        return FlowRun(
            metrics=merge(outcome.metrics for outcome in outcomes),
            collected=dict(zip(opened.graph.collects, collected, strict=True)),
            shown=[row for outcome in outcomes for row in outcome.shown],
            spans=[span for outcome in outcomes for span in outcome.spans.spans()],
            start_s=start_s,
            duration_s=duration_s,
        )

    def _reopen_channels(self, opened: _OpenFlow) -> None:
        for name, channel in opened.channels.items():
            num_writers = sum(opened.plan.stage(stage).num_ranks for stage in opened.graph.writers(name))
            channel.reopen(num_writers + (name in opened.graph.feeds))

    def _start_stages(self, opened: _OpenFlow, context: StepContext) -> list[tuple[StageCall, Future[StageOutcome]]]:
        started = []
        for stages in opened.graph.workers.values():
            for lane, stage in enumerate(stages):
                for rank, handle in enumerate(self._groups[opened.graph.stage(stage).worker].handles):
                    call = self._stage_call(opened, stage, rank, context)
                    started.append((call, handle.call("run_stage", call, lane=lane)))
        return started

    def _stage_call(self, opened: _OpenFlow, stage_name: str, rank: int, context: StepContext) -> StageCall:
        stage, placed = opened.graph.stage(stage_name), opened.plan.stage(stage_name)
        turn = opened.turns[stage_name]
        reads = tuple(self._read_port(opened, stage_name, channel, rank) for channel in stage.reads)
        edges = [(edge, ends) for edge, ends in self._weight_edges.items() if edge in self._stores]
        return StageCall(
            stage=stage_name,
            method=opened.flow.stages[stage_name].method,
            context=context,
            reads=reads,
            writes=tuple(self._write_port(opened, turn, channel) for channel in stage.writes),
            lease_turn=placed.turn if placed.turn in opened.shared_devices else None,
            offloads=placed.offload,
            starts_leased=not reads or all(port.of_own_turn for port in reads),
            receives={edge: self._versions[edge] for edge, (_, target) in edges if target == stage.worker},
            publishes=tuple(edge for edge, (source, _) in edges if source == stage.worker and stage.trains),
        )

    def _read_port(self, opened: _OpenFlow, stage_name: str, channel: str, rank: int) -> ReadPort:
        num_partitions = self._num_partitions(opened, channel)
        own_turn = opened.turns[stage_name]
        writers = opened.graph.writers(channel)
        return ReadPort(
            channel=channel,
            address=opened.channels[channel].address,
            granularity=opened.plan.stage(stage_name).granularity,
            partition=rank if num_partitions > 1 else 0,
            num_partitions=num_partitions,
            ordered=opened.flow.stages[stage_name].ordered,
            of_own_turn=bool(writers) and all(writer in own_turn for writer in writers),
        )

    def _write_port(self, opened: _OpenFlow, own_turn: Sequence[str], channel: str) -> WritePort:
        readers = opened.graph.readers(channel)
        return WritePort(
            channel=channel,
            address=opened.channels[channel].address,
            num_partitions=self._num_partitions(opened, channel),
            max_items_per_entry=min((opened.plan.stage(reader).granularity for reader in readers), default=WHOLE_BATCH),
            of_own_turn=bool(readers) and all(reader in own_turn for reader in readers),
        )

    def _num_partitions(self, opened: _OpenFlow, channel: str) -> int:
        """Ranks that items are bound to: by dispatch, or because whole batches cannot be handed out to whoever comes
        first."""
        bound = [
            opened.plan.stage(reader).num_ranks
            for reader in opened.graph.readers(channel)
            if opened.graph.stage(reader).dispatch == "key"
            or opened.plan.stage(reader).granularity == WHOLE_BATCH
            or opened.flow.stages[reader].ordered
        ]
        return max(bound, default=1)

    def _feed(self, opened: _OpenFlow, channel: str, items: Sequence[Any]) -> None:
        writer: Writer[Any] = Writer(self._write_port(opened, (), channel), opened.channels[channel], DriverPauses())
        numbered = list(enumerate(items))
        for start in range(0, len(numbered), FEED_PIECE):
            writer.put_many(numbered[start : start + FEED_PIECE])
        opened.channels[channel].close()

    def _collect(
        self, opened: _OpenFlow, channel: str, on_items: Callable[[str, Sequence[Any]], None] | None
    ) -> list[Any]:
        collected: list[tuple[int, Any]] = []
        for entry in opened.channels[channel]:
            if on_items is None:
                collected.extend(entry)
            else:
                on_items(channel, [item for _, item in entry])
        return [item for _, item in sorted(collected, key=lambda pair: pair[0])]

    def _note_versions(self, calls: Sequence[StageCall], outcomes: Sequence[StageOutcome]) -> None:
        for call, outcome in zip(calls, outcomes, strict=True):
            for edge in call.publishes:
                self._versions[edge] = outcome.policy_version

    # -- ending ----------------------------------------------------------------------------------------------------

    def _abort(self, opened: _OpenFlow, reason: str) -> None:
        for channel in opened.channels.values():
            channel.abort(reason)

    def shutdown(self) -> None:
        """Ends every process; nothing is left behind."""
        for opened in self._open.values():
            self._abort(opened, "the executor was shut down")
        self._launcher.shutdown()
        self._threads.shutdown(wait=True)
        self._scratch.cleanup()


def _shared_devices_by_turn(plan: Plan) -> dict[int, frozenset[int]]:
    devices: dict[int, set[int]] = {}
    for placed in plan.stages:
        devices.setdefault(placed.turn, set()).update(placed.devices)
    shared = {
        turn: frozenset(mine & set().union(*(theirs for other, theirs in devices.items() if other != turn)))
        for turn, mine in devices.items()
    }
    return {turn: overlap for turn, overlap in shared.items() if overlap}
