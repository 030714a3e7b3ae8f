"""The executor: starts the workers of a flow where its plan says and runs the flow, step by step.

One run of a flow, in six moves:
    1. the channels are opened for as many writers as there are ranks
    2. every rank of every stage is told to run its method, with ports cut to the plan (stage_calls.py)
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlinf_comm.channel import Channel
from rlinf_comm.weights import Layout
from rlinf_comm.weights import plan as reshard_plan
from rlinf_sched.cluster import Cluster
from rlinf_sched.flow_graph import WeightEdge
from rlinf_sched.plan import Plan, StagePlan
from rlinf_workers.errors import FlowDefinitionError, StepTimeout
from rlinf_workers.execution.lease import LeaseService
from rlinf_workers.execution.ports import DriverPauses, Writer
from rlinf_workers.execution.stage_calls import NEVER_SYNCED, PlannedFlow, StageCall, StageOutcome, WeightVersion
from rlinf_workers.execution.waits import describe_waits
from rlinf_workers.flow import Flow
from rlinf_workers.group import WorkerGroup, gather
from rlinf_workers.launcher.base import Identity, Launcher, WorkerSpec
from rlinf_workers.launcher.local import LocalLauncher
from rlinf_workers.links.base import WeightLink, WeightPort
from rlinf_workers.links.choose import choose
from rlinf_workers.metrics import merge
from rlinf_workers.registry import WEIGHT_LINKS
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

    planned: PlannedFlow
    channels: dict[str, Channel]
    edges: tuple[str, ...]


class Executor:
    """Runs flows. Use as a context manager: leaving it ends every process.

    Args:
        cluster: the devices that plans refer to.
        launcher: where processes come from; local processes by default.
        log_folder: `<log_folder>/<role>/<rank>.log` for each worker; a temporary folder by default.
        environment: variables for every worker, for example the number of threads.
        weight_link: what carries weights (registry.WEIGHT_LINKS, or an import path); auto: by where the ends are.
        weight_link_options: further arguments of its constructor.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        launcher: Launcher | None = None,
        log_folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        channel_bytes: int = CHANNEL_BYTES,
        weight_link: str = "auto",
        weight_link_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._cluster = cluster
        self._scratch = tempfile.TemporaryDirectory(prefix="rlinf-")
        self._launcher: Launcher = launcher or LocalLauncher()
        self._log_folder = log_folder or Path(self._scratch.name) / "logs"
        self._environment = dict(environment or {})
        self._channel_bytes = channel_bytes
        self._weight_link = weight_link
        self._weight_link_options = dict(weight_link_options or {})
        self._groups: dict[str, WorkerGroup] = {}
        self._placements: dict[str, StagePlan] = {}
        self._open: dict[str, _OpenFlow] = {}
        self._links: dict[str, WeightLink] = {}
        self._weights: dict[str, WeightVersion] = {}
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
        for name, stages in graph.workers.items():
            self._place_group(name, flow, plan.stage(stages[0]))
        planned = PlannedFlow(flow=flow, graph=graph, plan=plan)
        channels = {channel: self._channel(f"{flow.name}.{channel}") for channel in graph.channels}
        for channel, stage in planned.told_channels.items():
            channels[channel] = self._channel(f"{flow.name}.{channel}", num_keys=plan.stage(stage).num_ranks)
        edges = {f"{edge.source} -> {edge.target}": edge for edge in graph.weight_edges}
        for name, edge in edges.items():
            self._weights.setdefault(name, WeightVersion(edge=edge, policy_version=NEVER_SYNCED))
        self._open[flow.name] = _OpenFlow(planned=planned, channels=channels, edges=tuple(edges))

    def replan(self, flow: Flow, plan: Plan) -> None:
        """Another plan for an open flow, from its next run on; every worker group stays where it is.

        Raises:
            FlowDefinitionError: the plan moves a group, which takes a new executor.
        """
        opened = self._open[flow.name]
        graph = opened.planned.graph
        plan.validate(graph, self._cluster)
        for name, stages in graph.workers.items():
            self._check_place(name, flow, plan.stage(stages[0]))
        opened.planned = replace(opened.planned, plan=plan)

    def _channel(self, name: str, num_keys: int = 1) -> Channel:
        return Channel.create(
            name,
            capacity_items=CHANNEL_ITEMS * num_keys,
            capacity_bytes=self._channel_bytes * num_keys,
            num_keys=num_keys,
            lost_peers="tolerate",  # the launcher reports deaths, and starts workers again
        )

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
        self._placements[name] = placed
        self._groups[name] = self._start_group(name, flow, placed)
        if placed.offload:
            self._groups[name].start_call("unload")  # comes before any other call; nothing has to wait for it

    def _check_place(self, name: str, flow: Flow, placed: StagePlan) -> None:
        runs, wanted = (_describe_place(stage) for stage in (self._placements[name], placed))
        if runs != wanted:
            raise FlowDefinitionError(f"flow {flow.name!r}: worker {name!r} runs on {runs}; the plan wants {wanted}")

    def _start_group(self, name: str, flow: Flow, placed: StagePlan) -> WorkerGroup:
        definition = flow.workers[name]
        handles = [
            self._launcher.start(
                WorkerSpec(
                    identity=Identity(
                        role=name,
                        rank=rank,
                        num_ranks=placed.num_ranks,
                        num_ranks_per_replica=placed.num_ranks_per_replica,
                        devices=self._device_names(placed, rank),
                        rendezvous=f"{self._scratch.name}/{name}.rendezvous",
                    ),
                    worker_class=definition.worker_class,
                    arguments=definition.arguments,
                    log_path=self._log_folder / name / f"{rank}.log",
                    environment=self._environment
                    | {"CUDA_VISIBLE_DEVICES": visible_devices(self._cluster, placed.devices_of(rank))},
                )
            )
            for rank in range(placed.num_ranks)
        ]
        return WorkerGroup(name, handles, self._launcher)

    def _device_names(self, placed: StagePlan, rank: int) -> tuple[str, ...]:
        chosen = [self._cluster.devices[index] for index in placed.devices_of(rank)]
        return tuple(f"{device.kind}:{device.index}" for device in chosen)

    # -- weights ---------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Publishes the trainers' present weights on every edge; the serving workers take them before their next chunk.

        Needed once before the first run and after anything that changes weights outside a run (a warm start, a loaded
        checkpoint).
        """
        for name, last in self._weights.items():
            if name not in self._links:
                self._connect(name, last.edge)
            version = self._groups[last.edge.source].call("publish_weights", name)[0]
            self._weights[name] = replace(last, policy_version=version)

    def _connect(self, name: str, edge: WeightEdge) -> None:
        source, target = self._groups[edge.source], self._groups[edge.target]
        reshard = reshard_plan(self._layout(edge.source), self._layout(edge.target))
        self._weights_bytes[name] = sum(spec.num_bytes for spec in reshard.specs.values())
        link = choose(self._weight_link, name, self._nodes(edge.source) | self._nodes(edge.target))
        opened = self._links[name] = WEIGHT_LINKS.get(link)(name, reshard, **self._weight_link_options)
        sides: list[tuple[WorkerGroup, Literal["send", "receive"]]] = [(source, "send"), (target, "receive")]
        for group, side in sides:
            ports = [
                WeightPort(edge=name, side=side, rank=rank, reshard=reshard, link=link, address=opened.address)
                for rank in range(group.num_ranks)
            ]
            group.scatter("open_weights", ports)

    def _layout(self, name: str) -> Layout:
        group = self._groups[name]
        layout: Layout = group.call("layout", ranks=[0])[0]
        if layout.num_ranks != group.num_ranks:
            raise FlowDefinitionError(
                f"worker {name!r}: layout() speaks of {layout.num_ranks} ranks, and there are {group.num_ranks}"
            )
        return layout

    def _nodes(self, name: str) -> set[int]:
        """The machines of a group; one without devices is with the driver, on the first."""
        return {self._cluster.devices[index].node for index in self._placements[name].devices} or {0}

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
        planned, feeds = opened.planned, feeds or {}
        unsynced = [name for name in opened.edges if name not in self._links]
        if unsynced:
            raise FlowDefinitionError(
                f"flow {flow.name!r}: weights {unsynced[0]} were never synced; "
                "call sync_weights() once before the first run"
            )
        if set(feeds) != set(planned.graph.feeds):
            raise FlowDefinitionError(
                f"flow {flow.name!r} is fed through {list(planned.graph.feeds)}, but got {sorted(feeds)}"
            )
        leases = LeaseService(planned.shared_devices)
        self._launcher.serve("lease", leases)
        for channel, opened_channel in opened.channels.items():
            opened_channel.reopen(planned.num_writers(channel))
        start_s, clock = time.time(), time.perf_counter()
        calls = self._start_stages(opened, context)
        driver_ports: list[Future[Any]] = [
            *(self._threads.submit(self._feed, opened, channel, items) for channel, items in feeds.items()),
            *(self._threads.submit(self._collect, opened, channel, on_items) for channel in planned.graph.collects),
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
            collected=dict(zip(planned.graph.collects, collected, strict=True)),
            shown=[row for outcome in outcomes for row in outcome.shown],
            spans=[span for outcome in outcomes for span in outcome.spans.spans()],
            start_s=start_s,
            duration_s=duration_s,
        )

    def _start_stages(self, opened: _OpenFlow, context: StepContext) -> list[tuple[StageCall, Future[StageOutcome]]]:
        planned, started = opened.planned, []
        addresses = {name: channel.address for name, channel in opened.channels.items()}
        for rank, lane, call in planned.stage_calls(addresses, self._weights, context):
            handle = self._groups[planned.worker_of(call)].handles[rank]
            started.append((call, handle.call("run_stage", call, lane=lane)))
        return started

    def _feed(self, opened: _OpenFlow, channel: str, items: Sequence[Any]) -> None:
        port = opened.planned.write_port(channel, opened.channels[channel].address)
        writer: Writer[Any] = Writer(port, opened.channels[channel], DriverPauses())
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
            for name in call.publishes:
                self._weights[name] = replace(self._weights[name], policy_version=outcome.policy_version)

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


def _describe_place(placed: StagePlan) -> str:
    of_replica = f", {placed.num_ranks_per_replica} a replica" if placed.num_ranks_per_replica > 1 else ""
    return f"devices {list(placed.devices)} in {placed.num_ranks} ranks{of_replica}"


def visible_devices(cluster: Cluster, devices: Sequence[int]) -> str:
    """What CUDA_VISIBLE_DEVICES is for a rank on these devices: its GPUs as their own node counts them."""
    chosen = [cluster.devices[index] for index in devices]
    gpus = [(device.node, cluster.index_on_node(device.index)) for device in chosen if device.kind == "cuda"]
    # On its own node, the first, the driver may see some of the GPUs alone, and the cluster counts those.
    drivers = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(drivers[index] if drivers and node == 0 else str(index) for node, index in gpus)
