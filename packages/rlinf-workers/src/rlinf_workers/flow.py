"""Flow: the macro flow as a user writes it. Workers, stages with explicit reads and writes, and weight sync edges from
trainers to servers.

It names no device, mode or batch size. `Flow.graph()` is its plain-data form, which is drawn, checked and planned
(rlinf_sched); the executor runs the flow under any plan of that graph.

A worker may be given by its import path, and a method by its name. Such a flow is declared without importing torch, so
the planner and the run share one declaration; import paths are checked when processes start.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf_sched import Dispatch, FlowGraph, Stage, WeightEdge
from rlinf_workers.errors import FlowDefinitionError
from rlinf_workers.plugins import imported

if TYPE_CHECKING:
    from rlinf_workers.worker import Worker


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerDefinition:
    """A worker group of the flow."""

    worker: type[Worker] | str
    """The class, or its import path, "package.module:Class"."""
    arguments: tuple[Any, ...]
    """Arguments of the class's constructor."""
    shared_by: str = ""
    """Of a group without stages: the group whose ranks share its processes; see `Flow.worker`."""

    @property
    def worker_class(self) -> type[Worker]:
        """The class, imported."""
        return imported(self.worker) if isinstance(self.worker, str) else self.worker


@dataclass(frozen=True, kw_only=True, slots=True)
class StageDefinition:
    """A stage and the method that does its work."""

    stage: Stage
    method: str
    ordered: bool
    ahead: bool
    """Whether it may begin before the same stage of the run before has ended."""


class Flow:
    """A workflow of workers joined by channels.

    Example:
        flow = Flow("grpo")
        flow.worker("rollout", Rollout, rollout_settings)
        flow.worker("actor", Actor, actor_settings)
        flow.stage("rollout", Rollout.generate, reads="prompts", writes="samples")
        flow.stage("actor", Actor.train, reads="samples", trains=True, ordered=True)
        flow.weights("actor", to="rollout")

    Channels that no stage writes are fed by the driver; channels that no stage reads are collected by it.

    Args:
        max_staleness: runs by which generation may be ahead of training; see `FlowGraph.max_staleness`.
    """

    def __init__(self, name: str, *, max_staleness: int = 0) -> None:
        self.name = name
        self.max_staleness = max_staleness
        self.workers: dict[str, WorkerDefinition] = {}
        self.stages: dict[str, StageDefinition] = {}
        self._weight_edges: list[WeightEdge] = []
        self.offered: set[WeightEdge] = set()
        """Edges whose versions are offered to running stages, see `weights`."""

    def worker(self, name: str, worker: type[Worker] | str, *arguments: Any, shared_by: str = "") -> Flow:
        """Declares a worker group: a class or its import path, and the arguments of its constructor.

        Args:
            shared_by: the group has no stages and no devices; ranks of this group use its processes. The service `name`
                (`RequestSender`) returns what `address()` of such a process returns. Up to RANKS_PER_SHARED_PROCESS
                consecutive ranks share one, on the node of the first, and it outlives them.
        """
        if name in self.workers:
            raise FlowDefinitionError(f"flow {self.name!r}: worker {name!r} is declared twice")
        if not isinstance(worker, str):
            self._check_class(name, worker)
        self.workers[name] = WorkerDefinition(worker=worker, arguments=arguments, shared_by=shared_by)
        return self

    def workers_of(self, other: Flow, *names: str) -> Flow:
        """Declares worker groups of another flow for use by both; they are started once."""
        for name in names:
            self.worker(name, other.workers[name].worker, *other.workers[name].arguments)
        return self

    def stage(
        self,
        name: str,
        method: Callable[..., Any] | str,
        *,
        reads: str | tuple[str, ...] = (),
        writes: str | tuple[str, ...] = (),
        worker: str | None = None,
        dispatch: Dispatch = "any",
        ordered: bool = False,
        ahead: bool = False,
        trains: bool = False,
        needs_device: bool = True,
        whole_batch: bool = False,
        item_multiple: int = 1,
        granularities: tuple[int, ...] = (),
        num_parts: int = 0,
        devices_per_rank: int = 0,
    ) -> Flow:
        """Declares a stage: one method of one worker group.

        Args:
            method: called as `method(worker, *readers, *writers)` once a run on every rank, with ports in the order of
                `reads`, then `writes`; or its name.
            worker: the group; by default the one with the stage's name.
            ordered: chunks come in the order of the items' keys 0, 1, 2, ..., in whatever order they were put. With
                `dispatch="key"` a replica gets every num_replicas-th item.
            ahead: where runs overlap, the stage of a run begins with the run, in a thread of its own, while that of the
                run before goes on. All stages with `ahead` do so, or none does: they need devices that they share with
                no other turn, replicas of one rank, and no offloading. See `Worker.is_ahead`.
            dispatch, trains, needs_device, whole_batch, item_multiple, granularities, num_parts, devices_per_rank: as
                in rlinf_sched.flow_graph.Stage.
        """
        group = worker or name
        reads, writes = _names(reads), _names(writes)
        if name in self.stages:
            raise FlowDefinitionError(f"flow {self.name!r}: stage {name!r} is declared twice")
        if group not in self.workers:
            raise FlowDefinitionError(
                f"flow {self.name!r}: stage {name!r} runs on worker {group!r}, which is not declared; "
                f"there are {sorted(self.workers)}"
            )
        if not isinstance(self.workers[group].worker, str):
            self._check_method(name, group, method, len(reads) + len(writes))
        self.stages[name] = StageDefinition(
            stage=Stage(
                name=name,
                worker=group,
                role=group,
                reads=reads,
                writes=writes,
                dispatch=dispatch,
                needs_device=needs_device,
                trains=trains,
                whole_batch=whole_batch,
                item_multiple=item_multiple,
                granularities=granularities,
                num_parts=num_parts,
                devices_per_rank=devices_per_rank,
            ),
            method=method if isinstance(method, str) else method.__name__,
            ordered=ordered,
            ahead=ahead,
        )
        return self

    def weights(self, source: str, *, to: str, offers: bool = False) -> Flow:
        """Declares a weight sync edge: after a stage of group `source` has trained, group `to` serves its weights from
        the next run on; with `max_staleness`, from a later one.

        Args:
            offers: with `max_staleness`, a stage of group `to` may take newer versions while it runs
                (`Worker.take_weights`), each rank when it likes. The next run then serves no older ones. One edge of a
                group `to` may do so.
        """
        if offers and (other := next((edge for edge in self.offered if edge.target == to), None)):
            raise FlowDefinitionError(
                f"flow {self.name!r}: {to!r} is offered weights of {other.source!r} and {source!r}; offer those of one"
            )
        self._weight_edges.append(edge := WeightEdge(source=source, target=to))
        if offers:
            self.offered.add(edge)
        return self

    def check(self) -> None:
        """Imports the workers given by their paths.

        Raises: FlowDefinitionError if one is no worker, or a stage's method does not take the stage's channels.
        """
        for name, definition in self.workers.items():
            self._check_class(name, definition.worker_class)
        for name, definition in self.stages.items():
            stage = definition.stage
            self._check_method(name, stage.worker, definition.method, len(stage.reads) + len(stage.writes))

    def graph(self) -> FlowGraph:
        """The flow as plain data, validated.

        Raises: rlinf_sched.FlowError with every mistake found.
        """
        stages = tuple(definition.stage for definition in self.stages.values())
        written = {channel for stage in stages for channel in stage.writes}
        read = {channel for stage in stages for channel in stage.reads}
        channels = list(dict.fromkeys(channel for stage in stages for channel in (*stage.reads, *stage.writes)))
        graph = FlowGraph(
            name=self.name,
            stages=stages,
            weight_edges=tuple(self._weight_edges),
            feeds=tuple(channel for channel in channels if channel not in written),
            collects=tuple(channel for channel in channels if channel not in read),
            max_staleness=self.max_staleness,
        )
        graph.validate()
        return graph

    def _check_class(self, name: str, worker: Any) -> None:
        from rlinf_workers.worker import Worker  # imports torch

        if not (inspect.isclass(worker) and issubclass(worker, Worker)):
            raise FlowDefinitionError(f"flow {self.name!r}: worker {name!r} is {worker!r}; give a subclass of Worker")

    def _check_method(self, stage: str, group: str, method: Callable[..., Any] | str, num_ports: int) -> None:
        worker_class = self.workers[group].worker_class
        name = method if isinstance(method, str) else getattr(method, "__name__", "")
        own = getattr(worker_class, name, None)
        if own is None or not (isinstance(method, str) or own is method):
            raise FlowDefinitionError(
                f"flow {self.name!r}: stage {stage!r}: {method!r} is not a method of {worker_class.__name__}"
            )
        parameters = list(inspect.signature(own).parameters.values())[1:]
        takes_more = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters)
        num_parameters = len(parameters) - takes_more
        if num_ports < num_parameters or (num_ports > num_parameters and not takes_more):
            raise FlowDefinitionError(
                f"flow {self.name!r}: stage {stage!r}: {worker_class.__name__}.{name} takes {num_parameters} ports, "
                f"but the stage reads and writes {num_ports} channels"
            )


def _names(channels: str | tuple[str, ...]) -> tuple[str, ...]:
    return (channels,) if isinstance(channels, str) else tuple(channels)
