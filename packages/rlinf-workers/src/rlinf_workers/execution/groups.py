"""The worker groups of an executor: placing, starting, moving and replacing their ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from rlinf_sched import Cluster, StagePlan
from rlinf_workers.addresses import DRIVERS_NODE, LOOPBACK
from rlinf_workers.errors import FlowDefinitionError
from rlinf_workers.execution.device_state import DeviceState, Ready
from rlinf_workers.execution.meetings import Meetings
from rlinf_workers.execution.worker_host import Condition
from rlinf_workers.explaining.snapshot import ProcessRecord
from rlinf_workers.flow import WorkerDefinition
from rlinf_workers.group import WorkerGroup, gather
from rlinf_workers.launchers.base import Identity, Launcher, WorkerHandle, WorkerSpec, role_and_rank
from rlinf_workers.worker import StepContext

T = TypeVar("T")
LEAVE_LANE = -1
"""The lane for offloading a worker, whose stages may be waiting for other workers."""
RANKS_PER_SHARED_PROCESS = 8
"""Ranks that share a process of a group without stages (`Flow.worker`): those of a node with eight GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ranks:
    """The processes of a group in one place."""

    placed: StagePlan
    rendezvous: str
    """Identity.rendezvous of each rank."""
    group: WorkerGroup
    born: list[Future[tuple[str, int, int]]]
    """Host, id and start time of each rank's process."""


class RunningGroups:
    """The running groups, by name, and groups that have started in another place and wait to replace them.

    Args:
        log_folder: `<log_folder>/<role>/<rank>.log` for each worker.
        env_vars: env vars for every worker.
        pythons: worker group -> path of its Python interpreter; other groups use the driver's.
        scratch: a folder for the rendezvous of ranks on one node.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        launcher: Launcher,
        log_folder: Path,
        env_vars: Mapping[str, str],
        pythons: Mapping[str, str],
        scratch: Path,
    ) -> None:
        self._cluster, self._launcher, self._log_folder, self._scratch = cluster, launcher, log_folder, scratch
        self._env_vars, self._pythons = dict(env_vars), dict(pythons)
        self._running: dict[str, _Ranks] = {}
        self._ahead: dict[str, _Ranks] = {}
        """Groups started by `start_ahead`, until `move`."""
        self._definitions: dict[str, WorkerDefinition] = {}
        self._endings: list[Thread] = []
        """They end processes that `move` has replaced."""
        self.device_state = DeviceState(lambda worker: self.handle(worker).call("unload", lane=LEAVE_LANE))
        self._meetings = Meetings()
        launcher.serve("meeting", self._meetings)

    def __contains__(self, name: str) -> bool:
        return name in self._running

    def __getitem__(self, name: str) -> WorkerGroup:
        return self._running[name].group

    def handle(self, worker: str) -> WorkerHandle:
        """The driver's handle of a worker such as `actor/1`."""
        role, rank = role_and_rank(worker)
        return self._running[role].group.handles[rank]

    def handles(self) -> dict[str, WorkerHandle]:
        """Worker -> the driver's handle, for all workers."""
        return {
            f"{name}/{rank}": handle
            for name, ranks in self._running.items()
            for rank, handle in enumerate(ranks.group.handles)
        }

    def gather(
        self, futures: Sequence[Future[T]], timeout_s: float | None = None, *, watched: Sequence[Future[Any]] = ()
    ) -> list[T]:
        """The results of calls to any workers and of other work in the driver; `watched` as in `group.gather`. Raises:
        WorkerLost as soon as a worker is lost."""
        return gather(futures, self._launcher.lost, timeout_s, watched=watched)

    def processes(self) -> Iterator[ProcessRecord]:
        """The workers that have started."""
        for role, ranks in list(self._running.items()):
            for rank, born in enumerate(list(ranks.born)):
                if not born.done() or born.exception() is not None:
                    continue
                name, (host, pid, ticks) = f"{role}/{rank}", born.result()
                log_path = str(self._log_folder / f"{name}.log")
                yield ProcessRecord(name=name, host=host, pid=pid, started_ticks=ticks, log_path=log_path)

    # -- places ----------------------------------------------------------------------------------------------------

    def check_place(self, flow: str, name: str, placed: StagePlan, beside: StagePlan | None = None) -> None:
        """Raises: FlowDefinitionError if the group runs on other devices already, or in the plan `beside` this one."""
        expected = beside or (self._running[name].placed if name in self._running else placed)
        if expected.place != placed.place:
            planned, runs = _describe_place(placed), _describe_place(expected)
            raise FlowDefinitionError(f"flow {flow!r}: worker {name!r} runs on {runs}; the plan wants {planned}")

    def node(self, name: str, rank: int) -> int:
        """The node of a rank; the driver's node for a rank without devices."""
        return self._node_of(name, self._running[name].placed, rank)

    def _node_of(self, name: str, placed: StagePlan, rank: int) -> int:
        if owner := self._definitions[name].shared_by:
            return self.node(owner, rank * self[owner].num_ranks // placed.num_ranks)
        devices = placed.devices_of(rank)
        node, *others = sorted({self._cluster.devices[index].node for index in devices}) or [DRIVERS_NODE]
        if others:
            raise FlowDefinitionError(
                f"{name}/{rank} has devices {list(devices)}, of nodes {[node, *others]}; a process runs on one node: "
                f"give the group as many ranks as devices, or devices of one node for each rank"
            )
        return node

    def nodes(self, name: str) -> set[int]:
        """The nodes of a group; the driver's node for a group without devices."""
        return self._nodes_of(self._running[name].placed)

    def _nodes_of(self, placed: StagePlan) -> set[int]:
        return {self._cluster.devices[index].node for index in placed.devices} or {DRIVERS_NODE}

    def is_on_gpus(self, name: str) -> bool:
        """Whether the group has devices and all of them are GPUs."""
        devices = self._running[name].placed.devices
        return bool(devices) and all(map(self._is_gpu, devices))

    def make_room(self, worker: str, *, beside: Collection[str], stays: bool, ready: Ready) -> None:
        """Frees the worker's devices; see `DeviceState.make_room`."""
        role, rank = role_and_rank(worker)
        devices = self._running[role].placed.devices_of(rank)
        self.device_state.make_room(worker, devices, beside=beside, stays=stays, ready=ready)

    def _is_gpu(self, index: int) -> bool:
        return self._cluster.devices[index].kind == "cuda"

    # -- starting --------------------------------------------------------------------------------------------------

    def start(self, name: str, definition: WorkerDefinition, placed: StagePlan) -> None:
        """Starts the ranks of a group without waiting for them."""
        self._definitions[name] = definition
        self._running[name] = self._start_ranks(name, placed)

    def start_shared(self, name: str, definition: WorkerDefinition) -> None:
        """Starts the processes that ranks of a running group share, and the service that returns their addresses."""
        num_processes = -(-self[definition.shared_by].num_ranks // RANKS_PER_SHARED_PROCESS)
        placed = StagePlan(stage=name, devices=(), num_ranks=num_processes, granularity=0, offload=False, turn=0)
        self.start(name, definition, placed)

        def reply_with_address(worker: str, _: Any, reply: Callable[[Any], None]) -> None:
            role, rank = role_and_rank(worker)
            processes = self[name].handles
            address = processes[rank * len(processes) // self[role].num_ranks].call("address", lane=LEAVE_LANE)
            address.add_done_callback(lambda done: reply(None if done.exception() else done.result()))

        self._launcher.serve(name, reply_with_address)

    def _start_ranks(self, name: str, placed: StagePlan) -> _Ranks:
        self._meetings.begin(name)
        rendezvous, group, born = self._rendezvous_of(name, placed), WorkerGroup([], self._launcher), []
        ranks = _Ranks(placed=placed, rendezvous=rendezvous, group=group, born=born)
        for rank in range(placed.num_ranks):
            handle, process = self._start_rank(name, rank, placed, rendezvous)
            group.handles.append(handle)
            born.append(process)
        return ranks

    def _start_rank(
        self, name: str, rank: int, placed: StagePlan, rendezvous: str
    ) -> tuple[WorkerHandle, Future[tuple[str, int, int]]]:
        definition, devices = self._definitions[name], placed.devices_of(rank)
        identity = Identity(
            role=name,
            rank=rank,
            num_ranks=placed.num_ranks,
            num_ranks_per_replica=placed.num_ranks_per_replica,
            devices=tuple(f"{self._cluster.devices[index].kind}:{index}" for index in devices),
            rendezvous=rendezvous,
        )
        gpus = {"CUDA_VISIBLE_DEVICES": visible_devices(self._cluster, devices)}
        spec = WorkerSpec(
            identity=identity,
            worker_class=definition.worker_class,
            arguments=definition.arguments,
            log_path=self._log_folder / name / f"{rank}.log",
            env_vars=self._env_vars | gpus,
            python=self._pythons.get(name),
            node=self._node_of(name, placed, rank),
            gpus=tuple(self._cluster.index_on_node(index) for index in devices if self._is_gpu(index)),
        )
        handle = self._launcher.start(spec)
        born = handle.call("process", lane=LEAVE_LANE)
        if placed.offload:
            handle.call("unload")  # runs before any other call, so there is no need to wait for it
        return handle, born

    def _rendezvous_of(self, name: str, placed: StagePlan) -> str:
        """The value of Identity.rendezvous for the ranks of a group that is about to start."""
        nodes = self._nodes_of(placed)
        if nodes == {DRIVERS_NODE}:
            return f"{self._scratch}/{name}.{self._meetings.count(name)}.rendezvous"
        return LOOPBACK if len(nodes) == 1 else ""

    # -- moving ----------------------------------------------------------------------------------------------------

    def start_ahead(self, placements: Mapping[str, StagePlan]) -> dict[str, WorkerGroup]:
        """Starts the groups that `move` would start, beside the running ones and without waiting for them. Returns
        them. Groups with devices of other nodes are not among them: ranks of one group at a time can rendezvous through
        the driver."""
        self.end_ahead()
        for name, placed in self._moved(placements).items():
            if self._nodes_of(placed) | self.nodes(name) == {DRIVERS_NODE}:
                self._ahead[name] = self._start_ranks(name, placed)
        return {name: ranks.group for name, ranks in self._ahead.items()}

    @property
    def is_ahead(self) -> bool:
        """Whether all ranks that were started ahead have been constructed, or are lost."""
        return all(born.done() for ranks in self._ahead.values() for born in ranks.born)

    def end_ahead(self) -> None:
        """Ends the groups that were started ahead."""
        ahead, self._ahead = self._ahead, {}
        for ranks in ahead.values():
            self._end(ranks)

    def move(self, placements: Mapping[str, StagePlan]) -> set[str]:
        """Replaces groups that have another place than before by those that were started ahead there. The others end
        before their successors start, so that their devices are free. Waits for none of the new ranks. Returns the
        names of the groups.

        Args:
            placements: the place of each group.
        """
        moved = self._moved(placements)
        ahead = {name: ranks for name, ranks in self._ahead.items() if moved.get(name) == ranks.placed}
        self._ahead = {name: ranks for name, ranks in self._ahead.items() if name not in ahead}
        self.end_ahead()
        before = {name: self._running[name] for name in moved}
        for name, ranks in before.items():
            for rank in range(ranks.group.num_ranks):
                self.device_state.forget(f"{name}/{rank}")
        for name in before.keys() - ahead.keys():
            self._end(before[name])
        replaced = [before[name] for name in ahead]
        self._endings.append(Thread(target=lambda: [self._end(ranks) for ranks in replaced], name="end replaced ranks"))
        self._endings[-1].start()
        for name, placed in moved.items():
            self._running[name] = ahead.get(name) or self._start_ranks(name, placed)
        return set(moved)

    def wait_for_endings(self) -> None:
        """Waits until the processes that were replaced have ended."""
        while self._endings:
            self._endings.pop().join()

    def _moved(self, placements: Mapping[str, StagePlan]) -> dict[str, StagePlan]:
        """The groups that have another place there than now."""
        return {name: placed for name, placed in placements.items() if placed.place != self._running[name].placed.place}

    def _end(self, ranks: _Ranks) -> None:
        for handle in ranks.group.handles:
            self._launcher.end(handle)

    # -- repairing -------------------------------------------------------------------------------------------------

    def replace_unusable(self, broken: Collection[str], contexts: Sequence[StepContext]) -> tuple[set[str], set[str]]:
        """Replaces ranks that cannot be used, and the other ranks of their group if they have run collectives; returns
        the groups with new ranks, and the groups of which a rank had begun one of the runs.

        Args:
            broken: workers known to be unusable, which are not queried.
            contexts: contexts of the failed runs.

        Raises: WorkerLost if another worker is lost meanwhile.
        """
        conditions = self._conditions(broken, contexts)
        replaced = set()
        for name, ranks in self._running.items():
            if gone := _gone(name, ranks.group.num_ranks, conditions):
                self._replace(name, gone)
                replaced.add(name)
        return replaced, {role_and_rank(worker)[0] for worker, condition in conditions.items() if condition.has_begun}

    def _conditions(self, broken: Collection[str], contexts: Sequence[StepContext]) -> dict[str, Condition]:
        """Worker -> its condition, for those that can be used."""
        futures = {
            worker: handle.call("condition_after_runs", list(contexts), lane=LEAVE_LANE)
            for worker, handle in self.handles().items()
            if worker not in broken and not handle.is_lost
        }
        conditions = zip(futures, self.gather(list(futures.values())), strict=True)
        return {worker: condition for worker, condition in conditions if not condition.is_spent}

    def _replace(self, name: str, gone: Sequence[int]) -> None:
        ranks = self._running[name]
        handles = ranks.group.handles
        for rank in gone:
            if not handles[rank].is_lost:
                self._launcher.end(handles[rank])
            self.device_state.forget(f"{name}/{rank}")
        if len(gone) == len(handles):
            self._running[name] = self._start_ranks(name, ranks.placed)
            return
        for rank in gone:  # the surviving ranks still rendezvous at the old address
            handles[rank], ranks.born[rank] = self._start_rank(name, rank, ranks.placed, ranks.rendezvous)


def _gone(name: str, num_ranks: int, conditions: Mapping[str, Condition]) -> list[int]:
    """The ranks of a group that have to be replaced.

    Args:
        conditions: worker -> condition, of the workers that can be used.
    """
    ranks = [conditions.get(f"{name}/{rank}") for rank in range(num_ranks)]
    gone = [rank for rank, condition in enumerate(ranks) if condition is None]
    return list(range(num_ranks)) if gone and any(one is not None and one.has_met_ranks for one in ranks) else gone


def _describe_place(placed: StagePlan) -> str:
    of_replica = f", {placed.num_ranks_per_replica} a replica" if placed.num_ranks_per_replica > 1 else ""
    return f"devices {list(placed.devices)} in {placed.num_ranks} ranks{of_replica}"


def visible_devices(cluster: Cluster, devices: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for a rank on these devices: its GPUs by their numbers on their own node."""
    chosen = [cluster.devices[index] for index in devices]
    gpus = [(device.node, cluster.index_on_node(device.index)) for device in chosen if device.kind == "cuda"]
    # On the first node the driver may see only some of the GPUs, and the cluster counts those.
    drivers = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(drivers[index] if drivers and node == 0 else str(index) for node, index in gpus)
