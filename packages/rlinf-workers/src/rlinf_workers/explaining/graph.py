"""Root causes of a hang: from a run's waits and its plan to a graph of which process waits for which.

A node is one stage on one rank, the driver's end of a channel, a background activity of a process (it sends weights, it
holds a channel), or a process that a worker has started and waits for. Its edges lead to the nodes it waits for. A node
without outgoing edges waits for nobody, so the run hangs until it moves: a *sink*. Nodes that wait for each other in a
cycle never move. Root causes are the sinks and the cycles; all others are victims.
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
"""Ranks report their waits once a second, each at its own time, so two short waits may not have been simultaneous, and
a reported wait may have ended. A cycle, a mismatch, and a wait that nobody could end count only if each wait is older
than this."""

Cause = Literal["gone", "stopped", "mismatch", "deadlock", "nobody left", "busy"]
"""Why a root cause does not move: its process is gone; it is stopped; it is in another collective than the others; it
is in a cycle of waits; those that could end its wait have finished; it waits for nobody, so it computes or hangs."""
SEVERITY: tuple[Cause, ...] = ("gone", "stopped", "mismatch", "deadlock", "nobody left", "busy")
"""Most severe first: a process that is gone or stopped explains an apparent deadlock around it, and so on."""
DOUBTFUL: tuple[Cause, ...] = ("mismatch", "deadlock", "nobody left")
Halted = Literal["gone", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitNode:
    """An activity that has not finished."""

    name: str
    """`role/rank stage`, `driver: feeds CHANNEL`, `role/rank sends weights to GROUP`, `role/rank keeps channel NAME`,
    or a process that a worker has started."""
    process: str
    """Name of its ProcessRecord."""
    wait: Wait | None = None
    """None: it is not waiting."""
    whose_move: tuple[str, ...] = ()
    """Names of the nodes that could end the wait."""
    remark: str = ""
    """Further information about the wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RootCause:
    """A sink of the graph, or a cycle in it."""

    cause: Cause
    nodes: tuple[str, ...]
    """One node, or all nodes of a cycle or a mismatch."""
    num_waiting: int
    """Other nodes that wait for it, directly or indirectly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitGraph:
    """The wait-for graph of a run."""

    nodes: tuple[WaitNode, ...]
    """Waiting nodes first, the longest wait first."""
    root_causes: tuple[RootCause, ...]
    """Most severe first; of equal severity, the one with most waiting nodes. Empty between runs of a flow, and while a
    cycle of short waits may still resolve itself."""


def wait_graph(snapshot: Snapshot, halted: Mapping[str, Halted] | None = None) -> WaitGraph:
    """The graph of a snapshot.

    Args:
        halted: processes that cannot move whatever wait they reported last: `role/rank` -> their condition.
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
        # Waits reported before this run of the flow began belong to the previous run.
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
        """Nodes that a wait is for and that are not stages: background activities, which do not report waits."""
        own = [WaitNode(name=name, process=name) for name in _own_processes(wait)]
        if wait.kind == "weights":  # a version that was published before this run: its senders still send it
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
        """The driver's ends report no waits: a feeder waits for channel capacity, a collector for items if there are
        none."""
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
            # After admission it is inside, and waits for workers whose state is still on the devices.
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
        return node  # its own thread checks weights; or the driver replies, whose threads report no waits

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
        """The ranks that are not in the same collective."""
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
        """The other ranks of a replica."""
        stage, rank = self._stages.get(wait.stage), int(wait.waiter.rpartition("/")[2])
        if stage is None:
            return ()
        others = range(rank + 1, rank + stage.num_ranks_per_replica)
        return _unfinished(self._bare, (f"{stage.worker}/{other} {stage.name}" for other in others))

    def _of_group(self, group: str) -> tuple[str, ...]:
        """The unfinished stages of a worker group."""
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
                continue  # a node outside may end the wait
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
        if node.wait.kind == "collective":  # with all its ranks in it, it is running or hangs below Python
            return "mismatch" if node.remark else "busy"
        return "nobody left"

    def _is_settled(self, wait: Wait) -> bool:
        return self._snapshot.taken_s - wait.since_s >= SETTLED_S


def _own_processes(wait: Wait) -> tuple[str, ...]:
    return tuple(own_process_name(wait, process) for process in wait.processes)


def _collective(wait: Wait) -> tuple[object, ...]:
    """A backend's own collectives have no number, and stacks of ranks may show different functions of the same one."""
    if wait.kind == "backend collective":
        return wait.kind, wait.ranks
    return wait.kind, wait.of, wait.ranks, wait.number, wait.operation


def _unfinished(nodes: Mapping[str, WaitNode], names: Iterable[str], *, but: str = "") -> tuple[str, ...]:
    """The unfinished nodes among these names."""
    return tuple(name for name in dict.fromkeys(names) if name in nodes and name != but)


def _waiting_for(nodes: Mapping[str, WaitNode]) -> dict[str, set[str]]:
    """Node -> all nodes that wait for it, directly or indirectly; including itself in a cycle."""
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
    """Groups of nodes that wait for each other (strongly connected components), by name."""
    circles = []
    for name, behind in waiting.items():
        circle = tuple(sorted(other for other in behind if name in waiting[other] or other == name))
        if name in behind and circle not in circles:
            circles.append(circle)
    return circles
