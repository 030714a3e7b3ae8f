"""Functions that the driver runs in its Ray process (process.py): the only module of this package that imports Ray."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._private import services
from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR
from ray._private.state import available_resources_per_node
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import (
    AuthenticationError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    RayError,
    TaskUnschedulableError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf_workers.addresses import LOOPBACK
from rlinf_workers.errors import ClusterRefused, NodeLost
from rlinf_workers.launchers.agent import Agent, AgentSettings
from rlinf_workers.launchers.base import Node
from rlinf_workers.launchers.ray.probe import look_at_torch
from rlinf_workers.leftovers import SweptFolder

OBJECT_STORE_BYTES = 100 << 20
"""Object store of a cluster started here. A run does not use it, but Ray requires 75 MiB."""
ANSWER_TIMEOUT_S = 3.0
"""Time limit for a node to accept a connection. A killed process refuses it at once; a dead host does not answer."""
LONGEST_PARENT = 16
"""Maximum length of the temporary folder's path: a Unix socket's path has at most 107 characters, and Ray adds some
90."""
GPU_TIMEOUT_S = 120.0
START_ONE = "`ray start --head` on the first machine and `ray start --address FIRST:6379` on the others start one"
TOKEN = (
    "put the token of the machine where `ray start --head` ran into ~/.ray/auth_token, or its path into "
    "RAY_AUTH_TOKEN_PATH"
)
GONE = (TaskUnschedulableError, NodeDiedError, LocalRayletDiedError, WorkerCrashedError)
"""Exceptions of Ray for a task whose node is gone. Ray lists such a node as alive for some time."""
_tasks: dict[int, Any] = {}
"""Ticket -> the task that runs an agent."""
_tickets = itertools.count()
_folders: list[SweptFolder] = []


def start() -> None:
    """Starts a cluster of this machine alone, at its loopback address and with its files in a folder of this user."""
    folder = SweptFolder("rlinf-ray-", None if len(tempfile.gettempdir()) <= LONGEST_PARENT else "/tmp")
    _folders.append(folder)
    _init(
        address="local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        num_cpus=len(os.sched_getaffinity(0)),
        _node_ip_address=LOOPBACK,
        _temp_dir=str(folder.path / "ray"),  # Ray makes it accessible to everybody
    )


def join(address: str) -> bool:
    """Joins the cluster at `HOST:PORT` or `auto`. Returns whether it requires a token.

    Raises: ClusterRefused.
    """
    try:
        place = services.canonicalize_bootstrap_address_or_die(address)
        host, port = services.extract_ip_port(place)
    except (ConnectionError, ValueError) as error:
        raise ClusterRefused(f"{first_line(error)}; {START_ONE}") from error
    if not _answers(host, port):
        raise ClusterRefused(f"no Ray cluster answers there; {START_ONE}")
    asks_for_token = _asks_for_token(place)
    _init(address=place)
    return asks_for_token


def leave() -> None:
    """Leaves the cluster, and ends it if it was started here."""
    ray.shutdown()
    for folder in _folders:
        folder.close()


def _init(**arguments: Any) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(logging_level=logging.ERROR, log_to_driver=False, configure_logging=False, **arguments)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterRefused(
            f"no Ray cluster could be joined there ({last_line(error)}); it needs Python {sys.version.split()[0]} and "
            f"ray {ray.__version__} on each node, as here"
        ) from error


def _asks_for_token(place: str) -> bool:
    """Raises: ClusterRefused if the token is missing or wrong, because `ray.init` would retry for 20 s."""
    try:
        _knock(place, "disabled")
        return False
    except AuthenticationError:
        pass
    if not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        raise ClusterRefused(f"this cluster requires its token, and there is none here; {TOKEN}")
    try:
        _knock(place, "token")
    except AuthenticationError as error:
        raise ClusterRefused(f"this cluster has another token than the one here; {TOKEN}") from error
    return True


def _knock(place: str, mode: str) -> None:
    os.environ[AUTH_MODE_ENV_VAR] = mode
    Config.initialize("")  # Ray read the mode when it was imported
    GcsClient(address=place)


def nodes() -> list[Node]:
    """The nodes that answer, the driver's first, then by address. Ray lists lost nodes as alive for some time.

    Raises: NodeLost if the driver's node does not answer, without which nothing can be placed on the others.
    """
    own = ray.get_runtime_context().get_node_id()
    there = [
        Node(
            id=node["NodeID"],
            hostname=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            num_cpus=int(node["Resources"].get("CPU", 0)),
            num_gpus=int(node["Resources"].get("GPU", 0)),
            memory_bytes=int(node["Resources"].get("memory", 0)),
        )
        for node in ray.nodes()
        if node["Alive"] and _answers(node["NodeManagerAddress"], node["NodeManagerPort"])
    ]
    if own not in [node.id for node in there]:
        raise NodeLost("the Ray node of the driver's machine does not answer any more")
    return sorted(there, key=lambda node: (node.id != own, node.address, node.id))


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=ANSWER_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def gpus(node_ids: Sequence[str]) -> list[tuple[tuple[str, int], ...]]:
    """Name and bytes of the GPUs that torch finds on each node.

    Raises: ClusterRefused.
    """
    listing = ray.remote(num_cpus=0, max_retries=0)(look_at_torch)
    tasks = [listing.options(scheduling_strategy=_on(node)).remote() for node in node_ids]
    try:
        listed = ray.get(tasks, timeout=GPU_TIMEOUT_S)
    except RayError as error:
        raise ClusterRefused(f"torch could not list the GPUs of the Ray cluster's nodes: {last_line(error)}") from error
    return [tuple((name, int(memory_bytes)) for name, memory_bytes in torch.get("gpus", ())) for torch in listed]


def place_agent(node: str, settings: AgentSettings, resources: Mapping[str, int]) -> int:
    """Starts an agent on a node, with its share of resources. Returns a ticket for the functions below."""
    variables = {"PYTHONPATH": os.pathsep.join(settings.path)}
    agent = ray.remote(max_calls=1, max_retries=0)(_serve_node).options(
        name=f"rlinf node {settings.node}",
        scheduling_strategy=_on(node),
        runtime_env={"env_vars": variables},
        **resources,
    )
    ticket = next(_tickets)
    _tasks[ticket] = agent.remote(settings)
    return ticket


def _serve_node(settings: AgentSettings) -> None:
    """The task that Ray runs on a node."""
    Agent(settings, [str(gpu) for gpu in ray.get_gpu_ids()]).run()


def check_agent(ticket: int) -> None:
    """Waits briefly for an agent to end.

    Raises: NodeLost, or ClusterRefused if it could not run.
    """
    try:
        ray.get(_tasks[ticket], timeout=0.1)
    except GetTimeoutError:
        return
    except GONE as error:
        raise NodeLost(last_line(error)) from error
    except RayError as error:
        raise ClusterRefused(last_line(error)) from error


def end_agents(ending: Sequence[int], waiting: Sequence[int], *, timeout_s: float) -> None:
    """Waits until the `ending` agents have ended, so that their resources are free; cancels those that do not end in
    time and those still `waiting` for resources."""
    tasks = [_tasks.pop(ticket) for ticket in ending]
    _, stuck = ray.wait(tasks, num_returns=len(tasks), timeout=timeout_s) if tasks else ([], [])
    for task in (*stuck, *(_tasks.pop(ticket) for ticket in waiting)):
        ray.cancel(task, force=True)


def free() -> dict[str, dict[str, float]]:
    """Node -> its unreserved resources."""
    return available_resources_per_node()


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
