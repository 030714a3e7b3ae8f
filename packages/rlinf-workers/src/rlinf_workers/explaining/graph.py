"""Root causes of a hang: from a run's waits and its plan to a graph of which process waits for which.

A node is one stage on one rank, what the driver does at one end of a channel, what a process does besides its stages
(it sends weights, it keeps a channel), or a process that a worker has started and waits for. Its edges go to the nodes
whose move it waits for. A node without an edge waits for nobody, so the run stands until it moves: a *sink*. Nodes that
wait for each other in a cycle will never move. The root causes are the sinks and the cycles; all others are victims.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from rlinf_workers.explaining.snapshot import DRIVER, Snapshot, own_process_name, workers_of
from rlinf_workers.launchers.base import Wait

SETTLED_S = 3.0
"""Ranks tell their waits once a second, each at its own moment, so two short waits may never have been at once, and who
is said to wait may have gone on. A circle, a mismatch, and a wait that nobody could end are believed when each wait is
older than this."""

Cause = Literal["gone", "stopped", "mismatch", "deadlock", "nobody left", "busy"]
"""Why a root cause does not move: its process is gone; it is stopped; its collective is not the one of the others; it
waits in a circle; those who could end its wait have finished; it waits for nobody, so it computes or hangs."""
SEVERITY: tuple[Cause, ...] = ("gone", "stopped", "mismatch", "deadlock", "nobody left", "busy")
"""A process that is gone or stopped explains what looks like a deadlock around it, and so on."""
DOUBTFUL: tuple[Cause, ...] = ("mismatch", "deadlock", "nobody left")
Halted = Literal["gone", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitNode:
    """Somebody who has not finished."""

    name: str
    """`role/rank stage`, `driver: feeds CHANNEL`, `role/rank sends weights to GROUP`, `role/rank keeps channel NAME`
    or a process of its own."""
    process: str
    """Name of its ProcessRecord."""
    wait: Wait | None = None
    """None: it does not wait."""
    whose_move: tuple[str, ...] = ()
    """Names of the nodes that could end the wait."""
    remark: str = ""
    """What else is known of the wait, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RootCause:
    """A sink of the graph or a circle in it."""

    cause: Cause
    nodes: tuple[str, ...]
    """One node, or all of a circle or of a mismatch."""
    num_waiting: int
    """Other nodes that wait for it, directly or behind others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitGraph:
    """The wait-for graph of a run."""

    nodes: tuple[WaitNode, ...]
    """Those that wait first, the longest wait first."""
    root_causes: tuple[RootCause, ...]
    """The gravest first; of the same gravity the one that most others wait for. Empty between runs of a flow, and while
    a circle of short waits may still resolve itself."""


def wait_graph(snapshot: Snapshot, halted: Mapping[str, Halted] | None = None) -> WaitGraph:
    """The graph of a snapshot.

    Args:
        halted: processes that cannot move whatever they said last that they wait for: `role/rank` -> what they are.
    """
    return _Maker(snapshot, halted or {}).graph()


class _Maker:
    def __init__(self, snapshot: Snapshot, halted: Mapping[str, Halted]) -> None:
        self._snapshot = snapshot
        self._halted = halted
        self._stages = {stage.name: stage for stage in snapshot.stages}

    def graph(self) -> WaitGraph:
        nodes = {node.name: self._with_moves(node) for node in self._bare.values()}
        waiting = _waiting_for(nodes)
        root_causes = sorted(
            self._root_causes(nodes, waiting), key=lambda one: (SEVERITY.index(one.cause), -one.num_waiting, one.nodes)
        )
        in_order = sorted(nodes.values(), key=lambda node: node.wait.since_s if node.wait else float("inf"))
        return WaitGraph(nodes=tuple(in_order), root_causes=tuple(root_causes))

    @cached_property
    def _bare(self) -> dict[str, WaitNode]:
        """All nodes, without edges."""
        # What was told before this run of the flow began belongs to the one before it.
        current_waits = (wait for wait in self._snapshot.waits if wait.since_s >= self._snapshot.began_s)
        waits = {(wait.waiter, wait.stage): wait for wait in current_waits}
        nodes = []
        for stage in self._snapshot.stages:
            for rank in stage.unfinished:
                worker = f"{stage.worker}/{rank}"
                wait = waits.get((worker, stage.name)) if worker not in self._halted else None
                nodes.append(WaitNode(name=f"{worker} {stage.name}", process=worker, wait=wait))
        nodes += [self._driver_node("feeds", channel) for channel in self._snapshot.feeding]
        nodes += [self._driver_node("collects", channel) for channel in self._snapshot.collecting]
        for worker in self._snapshot.leaving:
            nodes.append(WaitNode(name=f"{worker} offload", process=worker, wait=waits.get((worker, ""))))
        nodes += [beside for node in nodes if node.wait is not None for beside in self._besides(node.wait)]
        seen = {node.process for node in nodes}
        nodes += [WaitNode(name=process, process=process) for process in self._halted if process not in seen]
        return {node.name: node for node in nodes}

    def _besides(self, wait: Wait) -> list[WaitNode]:
        """What a wait is for that is no stage: it goes on in some process without telling of its waits."""
        own = [WaitNode(name=name, process=name) for name in _own_processes(wait)]
        if wait.kind == "weights":  # a version that was published before this run: its senders hand it out
            source, _, target = wait.of.partition(" -> ")
            senders = workers_of(source, self._snapshot)
            return [*own, *(WaitNode(name=f"{one} sends weights to {target}", process=one) for one in senders)]
        if own:
            return own
        keeper = self._snapshot.keepers.get(wait.of, "")
        if (keeper and wait.kind == "server") or (wait.kind in ("items", "room") and keeper in self._halted):
            return [WaitNode(name=f"{keeper} keeps channel {wait.of}", process=keeper)]
        return []

    def _driver_node(self, verb: Literal["feeds", "collects"], channel: str) -> WaitNode:
        """The driver's ends tell no waits: who feeds waits for room, who collects waits for items unless some are
        there."""
        name, entries = f"{DRIVER}: {verb} {channel}", {one.name: one.num_entries for one in self._snapshot.channels}
        if DRIVER in self._halted or (verb == "collects" and entries.get(channel)):
            return WaitNode(name=name, process=DRIVER)
        kind = "room" if verb == "feeds" else "items"
        wait = Wait(waiter=DRIVER, kind=kind, of=channel, since_s=self._snapshot.began_s)
        return WaitNode(name=name, process=DRIVER, wait=wait)

    # -- edges -----------------------------------------------------------------------------------------------------

    def _with_moves(self, node: WaitNode) -> WaitNode:
        wait = node.wait
        if wait is None:
            return node
        if wait.processes or wait.kind in ("weights", "server"):
            return replace(node, whose_move=tuple(beside.name for beside in self._besides(wait)))
        if wait.kind in ("items", "room"):
            return self._at_channel(node, wait)
        if wait.kind == "lease":
            holders = self._snapshot.lease_holders.get(wait.number, ())
            leaving = tuple(f"{worker} offload" for worker in self._snapshot.leaving)
            # It is inside once it was let in, and then waits for those whose state is still there.
            return replace(node, whose_move=_unfinished(self._bare, (*holders, *leaving), but=node.name))
        if wait.kind == "room for weights":
            return replace(node, whose_move=self._of_group(wait.of.partition(" -> ")[2]))
        if wait.kind in ("collective", "backend collective"):
            return self._in_collective(node, wait)
        if wait.kind == "first rank":
            return replace(node, whose_move=self._first_ranks(node, wait))
        if wait.kind == "other ranks":
            return replace(node, whose_move=self._other_ranks(node, wait))
        if wait.kind == "other stage":
            others = (one.name for one in self._bare.values() if one.process == node.process)
            return replace(node, whose_move=_unfinished(self._bare, others, but=node.name))
        return node  # its own thread checks weights; or the driver answers, whose threads tell no waits

    def _at_channel(self, node: WaitNode, wait: Wait) -> WaitNode:
        stage = self._stages.get(wait.stage)
        if stage is not None and int(wait.waiter.rpartition("/")[2]) % stage.num_ranks_per_replica:
            return replace(node, whose_move=self._first_ranks(node, wait))
        movers = []
        for other in self._stages.values():
            if wait.of in (other.writes if wait.kind == "items" else other.reads):
                first = [rank for rank in other.unfinished if rank % other.num_ranks_per_replica == 0]
                movers += [f"{other.worker}/{rank} {other.name}" for rank in first]
        movers += [beside.name for beside in self._besides(wait)]
        movers.append(f"{DRIVER}: {'feeds' if wait.kind == 'items' else 'collects'} {wait.of}")
        states = [one for one in self._snapshot.channels if one.name == wait.of]
        remark = "".join(f"{one.num_entries} entries, {one.num_bytes} of {one.capacity_bytes} bytes" for one in states)
        return replace(node, whose_move=_unfinished(self._bare, movers), remark=remark)

    def _in_collective(self, node: WaitNode, wait: Wait) -> WaitNode:
        """Those who are not in the same collective."""
        movers, remarks = [], []
        for rank in wait.ranks:
            name = f"{node.process.rpartition('/')[0]}/{rank} {wait.stage}"
            other = self._bare.get(name)
            if other is None:
                remarks.append(f"{name} has ended its stage")
            elif other.wait is None or _collective(other.wait) != _collective(wait):
                movers.append(name)
            theirs = other.wait if other is not None else None
            if theirs is not None and theirs.kind.endswith("collective") and theirs.target != wait.target:
                remarks.append(f"{name} is in {theirs.target if theirs.number else theirs.operation}")
        return replace(node, whose_move=tuple(movers), remark="; ".join(remarks))

    def _first_ranks(self, node: WaitNode, wait: Wait) -> tuple[str, ...]:
        """The first rank of a rank's replica."""
        stage, rank = self._stages.get(wait.stage), int(wait.waiter.rpartition("/")[2])
        if stage is None:
            return ()
        name = f"{stage.worker}/{rank - rank % stage.num_ranks_per_replica} {stage.name}"
        return _unfinished(self._bare, [name], but=node.name)

    def _other_ranks(self, node: WaitNode, wait: Wait) -> tuple[str, ...]:
        """The ranks of a replica behind its first."""
        stage, rank = self._stages.get(wait.stage), int(wait.waiter.rpartition("/")[2])
        if stage is None:
            return ()
        others = range(rank + 1, rank + stage.num_ranks_per_replica)
        return _unfinished(self._bare, (f"{stage.worker}/{other} {stage.name}" for other in others))

    def _of_group(self, group: str) -> tuple[str, ...]:
        """What the ranks of a worker group have not finished."""
        stages = {stage.name for stage in self._snapshot.stages if stage.worker == group}
        return tuple(node.name for node in self._bare.values() if node.name.partition(" ")[2] in stages)

    # -- root_causes --------------------------------------------------------------------------------------------------

    def _root_causes(self, nodes: Mapping[str, WaitNode], waiting: Mapping[str, set[str]]) -> Iterable[RootCause]:
        for node in nodes.values():
            cause: Cause = self._cause(node)
            if not node.whose_move and (cause not in DOUBTFUL or (node.wait and self._is_settled(node.wait))):
                yield RootCause(cause=cause, nodes=(node.name,), num_waiting=len(waiting[node.name]))
        for circle in _circles(waiting):
            members = [nodes[name] for name in circle]
            if any(move not in circle for node in members for move in node.whose_move):
                continue  # somebody outside may end it
            if all(node.wait and self._is_settled(node.wait) for node in members):
                are_collectives = all(node.wait and node.wait.kind.endswith("collective") for node in members)
                cause = "mismatch" if are_collectives else "deadlock"
                others = set().union(*(waiting[name] for name in circle)) - set(circle)
                yield RootCause(cause=cause, nodes=circle, num_waiting=len(others))

    def _cause(self, node: WaitNode) -> Cause:
        if node.process in self._halted:
            return self._halted[node.process]
        if node.wait is None or node.wait.kind in ("check of weights", "service", "backend collective"):
            return "busy"
        if node.wait.kind == "collective":  # with all its ranks it is under way, or hangs below Python
            return "mismatch" if node.remark else "busy"
        return "nobody left"

    def _is_settled(self, wait: Wait) -> bool:
        return self._snapshot.taken_s - wait.since_s >= SETTLED_S


def _own_processes(wait: Wait) -> tuple[str, ...]:
    return tuple(own_process_name(wait, process) for process in wait.processes)


def _collective(wait: Wait) -> tuple[object, ...]:
    """Of a backend's own nobody counts them, and what is seen of one rank is another function of the same one."""
    if wait.kind == "backend collective":
        return wait.kind, wait.ranks
    return wait.kind, wait.of, wait.ranks, wait.number, wait.operation


def _unfinished(nodes: Mapping[str, WaitNode], names: Iterable[str], *, but: str = "") -> tuple[str, ...]:
    """Those of the names that have not finished."""
    return tuple(name for name in dict.fromkeys(names) if name in nodes and name != but)


def _waiting_for(nodes: Mapping[str, WaitNode]) -> dict[str, set[str]]:
    """Node -> all that wait for it, directly or behind others; itself too where it is in a circle."""
    direct: dict[str, set[str]] = defaultdict(set)
    for node in nodes.values():
        for name in node.whose_move:
            direct[name].add(node.name)
    waiting = {}
    for name in nodes:
        seen: set[str] = set()
        ahead = [name]
        while ahead:
            new = direct[ahead.pop()] - seen
            seen |= new
            ahead += new
        waiting[name] = seen
    return waiting


def _circles(waiting: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of nodes each of which waits for each other, by name."""
    circles = []
    for name, behind in waiting.items():
        circle = tuple(sorted(other for other in behind if name in waiting[other] or other == name))
        if name in behind and circle not in circles:
            circles.append(circle)
    return circles
