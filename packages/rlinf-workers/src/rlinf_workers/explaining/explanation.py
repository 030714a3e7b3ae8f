"""The whole answer to "why does it stand still": the graph, and what the culprits are doing."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlinf_workers.explaining.graph import Culprit, Halted, Node, WaitGraph, wait_graph
from rlinf_workers.explaining.processes import ProcessState, process_states
from rlinf_workers.explaining.snapshot import DRIVER, ProcessRecord, Snapshot
from rlinf_workers.explaining.stacks import Stacks, stacks_of

LOG_LINES = 5
TAIL_BYTES = 16 << 10
NUM_LOOKED_AT = 3
"""Culprits whose stacks are taken: one screen holds no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What a process is doing."""

    record: ProcessRecord
    state: ProcessState
    stacks: Stacks | None
    """None: nobody asked for them, or there is no process."""
    log_tail: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Who waits for what in a run, who is the cause, and what those are doing."""

    snapshot: Snapshot
    explained_s: float
    """Unix time."""
    graph: WaitGraph
    looks: dict[str, Look]
    """Process -> what it does; of those without a stack too."""

    @property
    def nodes(self) -> dict[str, Node]:
        """Those of the graph, by name."""
        return {node.name: node for node in self.graph.nodes}

    def processes_of(self, culprit: Culprit) -> list[str]:
        """Those of a culprit's nodes, each once."""
        return list(dict.fromkeys(self.nodes[name].process for name in culprit.nodes))


def explain(snapshot: Snapshot, *, every: bool = False, suspects: Collection[str] = ()) -> Explanation:
    """Looks at the processes of a snapshot, which may be gone by now; takes a second or two.

    Args:
        every: takes the stacks of all processes, not of the culprits alone.
        suspects: processes whose stacks are taken as well.
    """
    states = process_states(snapshot.processes)
    halted: dict[str, Halted] = {
        name: state.condition for name, state in states.items() if state.condition in ("gone", "stopped")
    }
    graph = wait_graph(snapshot, halted)
    chosen = {record.name for record in snapshot.processes} if every else {*_to_look_at(graph, snapshot), *suspects}
    with ThreadPoolExecutor(max_workers=8) as threads:
        looks = threads.map(
            lambda record: _look(record, states[record.name], takes_stacks=record.name in chosen), snapshot.processes
        )
        found = {look.record.name: look for look in looks}
    return Explanation(snapshot=snapshot, explained_s=time.time(), graph=graph, looks=found)


def _to_look_at(graph: WaitGraph, snapshot: Snapshot) -> set[str]:
    if not snapshot.flow:
        return {DRIVER}  # between runs of a flow the move is the driver's
    process_of = {node.name: node.process for node in graph.nodes}
    gravest = [culprit for culprit in graph.culprits if culprit.cause == graph.culprits[0].cause]
    processes = (process_of[name] for culprit in gravest for name in culprit.nodes)
    return set(list(dict.fromkeys(processes))[:NUM_LOOKED_AT])


def _look(record: ProcessRecord, state: ProcessState, *, takes_stacks: bool) -> Look:
    tail = _log_tail(record.log_path)
    is_there = state.condition not in ("gone", "unknown")
    stacks = stacks_of(record, is_stopped=state.condition == "stopped") if takes_stacks and is_there else None
    return Look(record=record, state=state, stacks=stacks, log_tail=tail)


def _log_tail(path: str) -> tuple[str, ...]:
    if not path:
        return ()
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(lines[-LOG_LINES:])
