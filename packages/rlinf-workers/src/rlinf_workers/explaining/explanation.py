"""The complete diagnosis of a hang: the wait-for graph, and what the root causes are doing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rlinf_workers.explaining.graph import Halted, RootCause, WaitGraph, WaitNode, wait_graph
from rlinf_workers.explaining.processes import ProcessState, process_states
from rlinf_workers.explaining.snapshot import DRIVER, ProcessRecord, Snapshot, workers_of
from rlinf_workers.explaining.stacks import Stacks, backend_collective, stacks_of
from rlinf_workers.launchers.base import Wait, role_and_rank

LOG_LINES = 5
TAIL_BYTES = 16 << 10
NUM_LOOKED_AT = 3
"""Root causes whose stacks are taken: one screen shows no more."""
NUM_MEETING = 16
"""Ranks of a stage whose stacks are taken to find collectives: as many as a host has GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What a process is doing."""

    record: ProcessRecord
    state: ProcessState
    stacks: Stacks | None
    """None: not requested, or the process is gone."""
    log_tail: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunExplanation:
    """Which process of a run waits for which, the root causes, and what they are doing."""

    snapshot: Snapshot
    graph: WaitGraph
    looks: dict[str, Look]
    """Process -> what it is doing; including those without stacks."""

    @property
    def nodes(self) -> dict[str, WaitNode]:
        """The nodes of the graph, by name."""
        return {node.name: node for node in self.graph.nodes}

    def processes_of(self, root_cause: RootCause) -> list[str]:
        """The processes of a root cause's nodes, without duplicates."""
        return list(dict.fromkeys(self.nodes[name].process for name in root_cause.nodes))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSight:
    """A process as seen on its own host."""

    name: str
    state: ProcessState
    stacks: Stacks


def look_here(records: Sequence[ProcessRecord]) -> list[ProcessSight]:
    """Inspects processes of this host, with stacks; takes seconds."""
    states = process_states(records)
    with ThreadPoolExecutor(max_workers=8) as threads:
        looks = threads.map(lambda record: _look(record, states[record.name], True, None), records)
        stacks = [look.stacks or Stacks(source="no stack: the process is gone") for look in looks]
    return [
        ProcessSight(name=record.name, state=states[record.name], stacks=taken)
        for record, taken in zip(records, stacks, strict=True)
    ]


def explain(
    snapshot: Snapshot,
    *,
    every: bool = False,
    suspects: Collection[str] = (),
    elsewhere: Collection[ProcessSight] = (),
) -> RunExplanation:
    """Inspects the processes of a snapshot, some of which may be gone; takes a second or two.

    Args:
        every: take the stacks of all processes, not only of the root causes.
        suspects: further processes whose stacks are taken.
        elsewhere: processes of other hosts, as seen there.
    """
    states = process_states(snapshot.processes) | {seen.name: seen.state for seen in elsewhere}
    halted: dict[str, Halted] = {
        name: state.condition for name, state in states.items() if state.condition in ("gone", "stopped")
    }
    copies = {name for name, state in states.items() if state.computes}  # receivers of weights copy them, too
    waits = tuple(wait for wait in snapshot.waits if not (wait.kind == "weights" and wait.waiter in copies))
    graph = wait_graph(replace(snapshot, waits=waits), halted)
    with ThreadPoolExecutor(max_workers=8) as threads:
        taken = {seen.name: seen.stacks for seen in elsewhere}
        unknown = {name for name, state in states.items() if state.condition in ("gone", "stopped", "unknown")}
        names = _may_meet(graph, snapshot) - taken.keys() - unknown
        meeting = [record for record in snapshot.processes if record.name in names]
        meeting_stacks = threads.map(lambda record: stacks_of(record, is_stopped=False), meeting)
        taken |= {record.name: stacks for record, stacks in zip(meeting, meeting_stacks, strict=True)}
    if inside := _backend_waits(graph, snapshot, taken):
        graph = wait_graph(replace(snapshot, waits=(*waits, *inside)), halted)
    chosen = {record.name for record in snapshot.processes} if every else {*_to_look_at(graph, snapshot), *suspects}
    with ThreadPoolExecutor(max_workers=8) as threads:
        looks = threads.map(
            lambda record: _look(record, states[record.name], record.name in chosen, taken.get(record.name)),
            snapshot.processes,
        )
        by_name = {look.record.name: look for look in looks}
    return RunExplanation(snapshot=snapshot, graph=graph, looks=by_name)


def _may_meet(graph: WaitGraph, snapshot: Snapshot) -> set[str]:
    """Workers without a recorded wait, of stages with a root cause and of groups with several ranks.

    They may wait for each other in a collective of their backend, which their stacks show."""
    silent = {node.name: node.process for node in graph.nodes if node.wait is None}
    root_causes = {name for root_cause in graph.root_causes if root_cause.cause == "busy" for name in root_cause.nodes}
    workers: set[str] = set()
    for stage in snapshot.stages:
        names = {f"{stage.worker}/{rank} {stage.name}" for rank in stage.unfinished}
        if names & root_causes & silent.keys() and len(_ranks(stage.worker, snapshot)) > 1:
            workers |= {silent[name] for name in sorted(names & silent.keys())[:NUM_MEETING]}
    return workers


def _backend_waits(graph: WaitGraph, snapshot: Snapshot, taken: Mapping[str, Stacks]) -> list[Wait]:
    """The collectives found in those stacks."""
    inside = {name: operation for name, stacks in taken.items() if (operation := backend_collective(stacks))}
    stages = {f"{stage.worker}/{rank} {stage.name}": stage for stage in snapshot.stages for rank in stage.unfinished}
    return [
        Wait(
            waiter=node.process,
            stage=stages[node.name].name,
            kind="backend collective",
            operation=inside[node.process],
            ranks=_ranks(stages[node.name].worker, snapshot),
            since_s=snapshot.began_s,
        )
        for node in graph.nodes
        if node.wait is None and node.process in inside and node.name in stages
    ]


def _ranks(group: str, snapshot: Snapshot) -> tuple[int, ...]:
    """The running workers of a group."""
    return tuple(role_and_rank(name)[1] for name in workers_of(group, snapshot))


def _to_look_at(graph: WaitGraph, snapshot: Snapshot) -> set[str]:
    if not snapshot.flow:
        return {DRIVER}  # between runs of a flow, everything waits for the driver
    process_of = {node.name: node.process for node in graph.nodes}
    gravest = [root_cause for root_cause in graph.root_causes if root_cause.cause == graph.root_causes[0].cause]
    processes = (process_of[name] for root_cause in gravest for name in root_cause.nodes)
    return set(list(dict.fromkeys(processes))[:NUM_LOOKED_AT])


def _look(record: ProcessRecord, state: ProcessState, takes_stacks: bool, taken: Stacks | None) -> Look:
    tail = _log_tail(record.log_path)
    is_there = state.condition not in ("gone", "unknown")
    if takes_stacks and is_there and taken is None:
        taken = stacks_of(record, is_stopped=state.condition == "stopped")
    return Look(record=record, state=state, stacks=taken if takes_stacks else None, log_tail=tail)


def _log_tail(path: str) -> tuple[str, ...]:
    if not path:
        return ()
    try:
        if not Path(path).is_file():  # reading a pipe would block
            return ()
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(lines[-LOG_LINES:])
