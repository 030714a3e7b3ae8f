"""The launcher for clusters that Ray manages: Ray lists the machines, reserves a share of each for the run, and runs an
agent on each (agent.py). Everything after that bypasses Ray.

Ray reserves resources and places the agents as tasks, each on the node that the plan assumes (node affinity), with the
CPUs and GPUs of the run's devices there. The driver itself does not import Ray: a separate process joins the cluster
(process.py).
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlinf_sched import Cluster
from rlinf_workers.errors import ClusterRefused, NodeLost
from rlinf_workers.launchers.agents import AgentLauncher
from rlinf_workers.launchers.base import Node, WorkerSpec, plural
from rlinf_workers.launchers.credentials import without_credentials
from rlinf_workers.launchers.ray.process import RayProcess
from rlinf_workers.launchers.served import ServedWorker

if importlib.util.find_spec("ray") is None:
    raise ModuleNotFoundError("No module named 'ray'; pip install 'rlinf[ray]'", name="ray")

END_TIMEOUT_S = 10.0
"""Time limit for agents to return, so that their resources are free."""
OWN = "local"
"""Stands for a cluster of this machine alone, instead of an address."""
_members: dict[str, Member] = {}
"""By the address of the cluster."""
_numbers: dict[str, int] = {}
"""Ray's id of a node -> its number in this process, which stays the same when others join."""
_gpus: dict[str, tuple[tuple[str, int], ...]] = {}
"""Ray's id of a node -> its GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """The process that takes part in a cluster for this driver."""

    process: RayProcess
    is_open: bool
    """Whether the cluster accepts clients without a token."""


class RayLauncher(AgentLauncher):
    """Starts workers on the nodes of a Ray cluster.

    Args:
        address: of the cluster, `HOST:PORT`, or `auto` for the one that this machine belongs to; empty: RAY_ADDRESS, or
            else a cluster of this machine alone, started for the run at its loopback address with its own token.
        num_nodes: number of nodes to wait for; 0: those present.
        wait_s: time limit for nodes to join and for the run's share of them to be free.
        cluster: the devices of the run, on the nodes that `nodes` returns; None: none, on the driver's node.
        heartbeat_timeout_s: see ServingLauncher.
        pins_slots: as in LocalLauncher.
        forks: ignored; workers are started by their interpreter.

    Attributes:
        notes: sentences about the cluster for the user.

    Raises:
        ClusterRefused: no cluster, too few nodes, or not enough free resources in time.
        NodeLost: a node was lost meanwhile.
    """

    def __init__(
        self,
        *,
        address: str = "",
        num_nodes: int = 0,
        wait_s: float = 120.0,
        cluster: Cluster | None = None,
        heartbeat_timeout_s: float = 60.0,
        pins_slots: bool = False,
        forks: bool = False,
    ) -> None:
        self._nodes = find_nodes(address, num_nodes, wait_s)
        member = member_of(address)
        self._ray = member.process
        self.notes = (OPEN_CLUSTER,) if member.is_open else ()
        self._tickets: dict[int, int] = {}
        """Node -> its agent's ticket in the Ray process."""
        super().__init__(
            listen_at=self._nodes[0].address, heartbeat_timeout_s=heartbeat_timeout_s, pins_slots=pins_slots
        )
        try:
            self._place_agents(cluster, time.monotonic() + wait_s)
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def nodes(cls, *, address: str = "", num_nodes: int = 0, wait_s: float = 120.0, **_: Any) -> tuple[Node, ...]:
        """The cluster's machines, the driver's first; the arguments are the constructor's. Joins the cluster.

        Raises: ClusterRefused, NodeLost.
        """
        nodes = find_nodes(address, num_nodes, wait_s)
        new = [node.id for node in nodes if node.num_gpus and node.id not in _gpus]
        if new:
            _gpus.update(zip(new, member_of(address).process.call("gpus", new), strict=True))
        return tuple(replace(node, gpus=_gpus.get(node.id, ())) for node in nodes)

    def start(self, spec: WorkerSpec) -> ServedWorker:
        self._ray.log_to(spec.log_path.parents[1] / "ray.log")
        return super().start(spec)

    def shutdown(self) -> None:
        super().shutdown()
        tickets, self._tickets = self._tickets, {}
        if not tickets or not self._ray.is_alive:
            return
        waiting = [ticket for node, ticket in tickets.items() if not self._arrival_of(node).done()]
        ending = [ticket for ticket in tickets.values() if ticket not in waiting]
        self._ray.call("end_agents", ending, waiting, timeout_s=END_TIMEOUT_S)

    def _place_agents(self, cluster: Cluster | None, deadline: float) -> None:
        shares = _shares(cluster, self._nodes)
        if any(share["num_gpus"] > self._nodes[number].num_gpus for number, share in shares.items()):
            raise ClusterRefused(self._no_room(shares))
        for number, resources in shares.items():
            settings = self._settings_of(number)
            self._tickets[number] = self._ray.call("place_agent", self._nodes[number].id, settings, resources)
        for number in shares:
            self._wait_for(number, shares, deadline)

    def _wait_for(self, number: int, shares: Mapping[int, Mapping[str, int]], deadline: float) -> None:
        arrived = self._arrival_of(number)
        while not arrived.done():
            try:
                self._ray.call("check_agent", self._tickets[number])
            except ClusterRefused as error:
                raise type(error)(f"no agent ran on {self._nodes[number]}: {error}") from error
            if time.monotonic() > deadline and not arrived.done():
                raise ClusterRefused(self._no_room(shares))

    def _no_room(self, shares: Mapping[int, Mapping[str, int]]) -> str:
        free = self._ray.call("free")
        lines = []
        for number, share in shares.items():
            there = free.get(self._nodes[number].id, {})
            lines.append(
                f"node {number}, {self._nodes[number]}; free {there.get('CPU', 0):g} CPUs, {there.get('GPU', 0):g} "
                f"GPUs; wanted {share['num_cpus']} and {share['num_gpus']}"
            )
        return (
            "the Ray cluster did not have enough free resources in time:\n" + "\n".join(lines) + "\nend other jobs "
            "(`ray status` lists them), take fewer devices, or wait longer with "
            "the launcher's option wait_s"
        )


OPEN_CLUSTER = (
    "the Ray cluster asks nobody for a token: whoever reaches the ports of its nodes can run programs there; "
    "docs/clusters.md says how to start one with a token"
)


def member_of(address: str) -> Member:
    """The process that takes part in the cluster at an address of RayLauncher; starts it if needed.

    Raises: ClusterRefused.
    """
    address = address or os.environ.get("RAY_ADDRESS", "") or OWN
    if address not in _members or not _members[address].process.is_alive:
        _members[address] = _own_cluster() if address == OWN else _joined(address)
    return _members[address]


def _own_cluster() -> Member:
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        raise ClusterRefused(
            f"RAY_AUTH_MODE={os.environ['RAY_AUTH_MODE']}: a Ray cluster without a token would run what any process of "
            "this machine sends it; unset the variable, or join a cluster of yours with "
            "cluster.launcher_options.address"
        )
    process = RayProcess(
        without_credentials(os.environ)
        | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # With this variable, which Ray has for other systems, it stays at the loopback address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
    )
    process.call("start")
    return Member(process=process, is_open=False)


def _joined(address: str) -> Member:
    where = f"cluster.launcher_options.address={address}"
    if address.startswith("ray://"):
        raise ClusterRefused(
            f"{where} is Ray's client, and the driver has to be on a node of the cluster: start the run there, with "
            "address: auto"
        )
    rays = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    process = RayProcess({"RAY_USAGE_STATS_ENABLED": "0", **without_credentials(os.environ), **rays})
    try:
        return Member(process=process, is_open=not process.call("join", address))
    except ClusterRefused as error:
        process.close()
        raise ClusterRefused(f"{where}: {error}") from error


def find_nodes(address: str, num_nodes: int, wait_s: float) -> tuple[Node, ...]:
    """The nodes to use, once there are enough. Raises: ClusterRefused, NodeLost."""
    process = member_of(address).process
    try:
        process.call("nodes")
    except NodeLost:
        process.close()
        process = member_of(address).process  # this machine may have another node
    deadline = time.monotonic() + wait_s
    while len(nodes := _numbered(process.call("nodes"))) < num_nodes and time.monotonic() < deadline:
        time.sleep(0.5)
    if len(nodes) < num_nodes:
        raise ClusterRefused(
            f"cluster.launcher_options.num_nodes={num_nodes}: after {wait_s:.0f} s the Ray cluster has "
            f"{plural(len(nodes), 'node')}:\n{_lines(nodes)}\n"
            "add machines with `ray start --address`, or ask for fewer nodes"
        )
    return nodes[:num_nodes] if num_nodes else nodes


def _numbered(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Sorts nodes by the order in which they joined, so that each keeps its number."""
    for node in nodes:
        _numbers.setdefault(node.id, len(_numbers))
    return tuple(sorted(nodes, key=lambda node: _numbers[node.id]))


def _shares(cluster: Cluster | None, nodes: Sequence[Node]) -> dict[int, dict[str, int]]:
    """Node -> resources that Ray reserves there: a GPU or a CPU per device of the run, and a CPU per GPU if there are
    enough."""
    devices = Counter((device.node, device.kind) for device in cluster.devices) if cluster else Counter()
    shares = {}
    for number in sorted({0, *(node for node, _ in devices)}):
        if number >= len(nodes):
            raise NodeLost(f"the plan has devices on node {number}, and the Ray cluster has:\n{_lines(nodes)}")
        num_gpus = devices[number, "cuda"]
        num_cpus = min(num_gpus + devices[number, "cpu"], nodes[number].num_cpus)
        shares[number] = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    return shares


def _lines(nodes: Sequence[Node]) -> str:
    return "\n".join(f"node {number}, {node}" for number, node in enumerate(nodes))
