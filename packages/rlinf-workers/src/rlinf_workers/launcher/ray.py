"""The launcher for clusters that Ray manages: Ray says which machines there are, reserves a share of each for the run,
and runs an agent on each (agent.py). What comes after does not go through Ray.

Ray reserves and places the agents as tasks, each on the node that the plan was made for (node affinity), with the CPUs
and GPUs of the run's devices there.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlinf_sched.cluster import Cluster
from rlinf_workers.addresses import LOOPBACK
from rlinf_workers.errors import ClusterRefused
from rlinf_workers.launcher.agent import Agent, AgentSettings
from rlinf_workers.launcher.agents import AgentLauncher
from rlinf_workers.launcher.base import Node, plural

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
try:
    import ray
    from ray._private.state import available_resources_per_node
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; pip install 'rlinf[ray]'", name=error.name) from error

RAY_FOLDER = os.path.dirname(ray.__file__) + os.sep
"""Ray puts packages of its own on the driver's `sys.path`, before those that are installed."""
OBJECT_STORE_BYTES = 100 << 20
"""Of a cluster that is started here. Nothing of a run travels through it, and Ray wants 75 MiB."""
START_ONE = "`ray start --head` on the first machine and `ray start --address FIRST:6379` on the others start one"


LOOK_AT_GPUS = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
found = [torch.cuda.get_device_properties(index) for index in range(count)]
print()
print(json.dumps([[one.name, one.total_memory] for one in found]))
"""
LOOK_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
"""For agents to return, so that what they had is free."""
_numbers: dict[str, int] = {}
"""Ray's name of a node -> its number in this process, which stays when others join."""
_gpus: dict[str, tuple[tuple[str, int], ...]] = {}
"""Ray's name of a node -> its GPUs."""


class RayLauncher(AgentLauncher):
    """Starts workers on the nodes of a Ray cluster.

    Args:
        address: of the cluster, `HOST:PORT`, or `auto` for the one that this machine belongs to; empty: what
            RAY_ADDRESS says, else a cluster of this machine alone that is started for the run.
        num_nodes: how many nodes to wait for; 0: those that are there.
        wait_s: for the nodes to come, and for their share of the run to be free.
        working_dir: a folder with the user's own modules that Ray brings to every node; empty: they are there.
        cluster: the devices of the run, over the nodes that `nodes` says; None: none, on the driver's node.
        heartbeat_timeout_s: see ServingLauncher.
        pins_slots: as LocalLauncher's.
        forks: nothing is forked; a worker is started by its interpreter.

    Raises:
        ClusterRefused: no cluster, too few nodes, or no room in time.
    """

    def __init__(
        self,
        *,
        address: str = "",
        num_nodes: int = 0,
        wait_s: float = 120.0,
        working_dir: str = "",
        cluster: Cluster | None = None,
        heartbeat_timeout_s: float = 60.0,
        pins_slots: bool = False,
        forks: bool = False,
    ) -> None:
        self._found = find_nodes(address, num_nodes, wait_s)
        self._serving: dict[int, Any] = {}
        super().__init__(
            listen_at=self._found[0].address, heartbeat_timeout_s=heartbeat_timeout_s, pins_slots=pins_slots
        )
        try:
            self._place_agents(cluster, working_dir, time.monotonic() + wait_s)
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def nodes(cls, *, address: str = "", num_nodes: int = 0, wait_s: float = 120.0, **_: Any) -> tuple[Node, ...]:
        """The cluster's machines, the driver's first; the arguments are the constructor's. Joins the cluster.

        Raises: ClusterRefused.
        """
        return _with_gpus(find_nodes(address, num_nodes, wait_s))

    def shutdown(self) -> None:
        super().shutdown()
        serving, self._serving = self._serving, {}
        if not serving or not ray.is_initialized():
            return
        waiting = [task for number, task in serving.items() if not self._arrival_of(number).done()]
        ending = [task for task in serving.values() if task not in waiting]
        _, stuck = ray.wait(ending, num_returns=len(ending), timeout=END_TIMEOUT_S) if ending else ([], [])
        for task in (*waiting, *stuck):
            ray.cancel(task, force=True)

    def _place_agents(self, cluster: Cluster | None, working_dir: str, deadline: float) -> None:
        shares = _shares(cluster, self._found)
        if any(wanted["num_gpus"] > self._found[number].num_gpus for number, wanted in shares.items()):
            raise ClusterRefused(_no_room(self._found, shares))
        serve_node = ray.remote(max_calls=1, max_retries=0)(_serve_node)
        for number, resources in shares.items():
            settings = self._settings_of(number)
            settings = replace(settings, path=[entry for entry in settings.path if not entry.startswith(RAY_FOLDER)])
            runtime_env: dict[str, Any] = {"env_vars": {"PYTHONPATH": os.pathsep.join(settings.path)}}
            placed = serve_node.options(
                name=f"rlinf node {number}",
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._found[number].id, soft=False),
                runtime_env=runtime_env | ({"working_dir": working_dir} if working_dir else {}),
                **resources,
            )
            self._serving[number] = placed.remote(settings)
        for number in shares:
            self._wait_for(number, shares, deadline)

    def _wait_for(self, number: int, shares: Mapping[int, Mapping[str, int]], deadline: float) -> None:
        arrived = self._arrival_of(number)
        while not arrived.done():
            ended, _ = ray.wait([self._serving[number]], timeout=0.1)
            try:
                ray.get(ended)
            except RayError as error:
                raise ClusterRefused(f"no agent ran on {self._found[number]}: {last_line(error)}") from error
            if time.monotonic() > deadline and not arrived.done():
                raise ClusterRefused(_no_room(self._found, shares))


def _serve_node(settings: AgentSettings) -> None:
    """What Ray runs on a node."""
    Agent(settings, [str(gpu) for gpu in ray.get_gpu_ids()]).run()


def _join(address: str) -> None:
    """Raises: ClusterRefused."""
    if ray.is_initialized():
        return
    if address.startswith("ray://"):
        raise ClusterRefused(
            f"cluster.launcher_options.address={address} is Ray's client, and the driver has to be on a node of the "
            "cluster: start the run there, with address: auto"
        )
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    if address == "local":
        num_cpus = len(os.sched_getaffinity(0))
        quiet |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "num_cpus": num_cpus}
        quiet |= {"_node_ip_address": LOOPBACK}
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterRefused(
            f"cluster.launcher_options.address={address}: no Ray cluster could be joined there ({last_line(error)}); "
            f"{START_ONE}, with Python {sys.version.split()[0]} and ray {ray.__version__} as here"
        ) from error


def find_nodes(address: str, num_nodes: int, wait_s: float) -> tuple[Node, ...]:
    """The nodes to use, once there are as many as wanted. Raises: ClusterRefused."""
    _join(address or os.environ.get("RAY_ADDRESS", "") or "local")
    deadline = time.monotonic() + wait_s
    while len(found := _nodes()) < num_nodes and time.monotonic() < deadline:
        time.sleep(0.5)
    if len(found) < num_nodes:
        raise ClusterRefused(
            f"cluster.launcher_options.num_nodes={num_nodes}: after {wait_s:.0f} s the Ray cluster has "
            f"{plural(len(found), 'node')}:\n{_lines(found)}\n"
            "add machines with `ray start --address`, or ask for fewer nodes"
        )
    return found[:num_nodes] if num_nodes else found


def _nodes() -> tuple[Node, ...]:
    """Those that are up, the driver's first."""
    own = ray.get_runtime_context().get_node_id()
    found = [
        Node(
            id=one["NodeID"],
            hostname=one["NodeManagerHostname"],
            address=one["NodeManagerAddress"],
            num_cpus=int(one["Resources"].get("CPU", 0)),
            num_gpus=int(one["Resources"].get("GPU", 0)),
            memory_bytes=int(one["Resources"].get("memory", 0)),
        )
        for one in ray.nodes()
        if one["Alive"]
    ]
    for node in sorted(found, key=lambda node: (node.id != own, node.address, node.id)):
        _numbers.setdefault(node.id, len(_numbers))
    return tuple(sorted(found, key=lambda node: _numbers[node.id]))


def _with_gpus(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes with the GPUs that torch finds there, where Ray says that there are any."""
    look = ray.remote(num_cpus=0, max_retries=0)(_look_at_gpus)
    looks = {
        node.id: look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote()
        for node in nodes
        if node.num_gpus and node.id not in _gpus
    }
    try:
        for node, found in zip(looks, ray.get(list(looks.values()), timeout=LOOK_TIMEOUT_S), strict=True):
            _gpus[node] = tuple((name, int(memory_bytes)) for name, memory_bytes in found)
    except RayError as error:
        raise ClusterRefused(f"nobody could look at the GPUs of the Ray cluster's nodes: {last_line(error)}") from error
    return tuple(replace(node, gpus=_gpus.get(node.id, ())) for node in nodes)


def _look_at_gpus() -> list[list[Any]]:
    """[name, bytes] of each, on the node that Ray runs this on; in a process of its own, which Ray hides none from."""
    seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run([sys.executable, "-c", LOOK_AT_GPUS], env=seen, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.rstrip().rpartition("\n")[2]) if done.returncode == 0 else []


def _shares(cluster: Cluster | None, found: Sequence[Node]) -> dict[int, dict[str, int]]:
    """Node -> what Ray reserves there: a GPU or a CPU for each device of the run, and a CPU for each GPU where there
    are so many."""
    devices = Counter((device.node, device.kind) for device in cluster.devices) if cluster else Counter()
    shares = {}
    for number in sorted({0, *(node for node, _ in devices)}):
        if number >= len(found):
            raise ClusterRefused(f"the plan has devices on node {number}, and the Ray cluster has:\n{_lines(found)}")
        num_gpus = devices[number, "cuda"]
        num_cpus = min(num_gpus + devices[number, "cpu"], found[number].num_cpus)
        shares[number] = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    return shares


def _no_room(found: Sequence[Node], shares: Mapping[int, Mapping[str, int]]) -> str:
    free = available_resources_per_node()
    lines = []
    for number, wanted in shares.items():
        there = free.get(found[number].id, {})
        lines.append(
            f"node {number}, {found[number]}; free {there.get('CPU', 0):g} CPUs, {there.get('GPU', 0):g} GPUs; "
            f"wanted {wanted['num_cpus']} and {wanted['num_gpus']}"
        )
    return (
        "the Ray cluster had no room in time for the run:\n" + "\n".join(lines) + "\nend what runs there (`ray status` "
        "shows it), take fewer devices with cluster.num_devices, or wait longer with cluster.launcher_options.wait_s"
    )


def _lines(nodes: Sequence[Node]) -> str:
    return "\n".join(f"node {number}, {node}" for number, node in enumerate(nodes))


def last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
