"""The devices of a run, as the planner knows them."""

from __future__ import annotations

from rlinf.config.common import ClusterConfig
from rlinf.config.devices import check_cluster, device_kind
from rlinf.machine import Machine
from rlinf_sched.cluster import Cluster, Device


def make_cluster(config: ClusterConfig, machine: Machine) -> Cluster:
    """The devices that the config takes of the machine. Raises: as `check_cluster`."""
    count = check_cluster(config, machine)
    if device_kind(config, machine) == "cpu":
        return Cluster.cpu_slots(count, memory_bytes=machine.memory_bytes // count)
    gpus = enumerate(machine.gpus[:count])
    return Cluster(
        devices=tuple(Device(index=i, kind="cuda", name=gpu.name, memory_bytes=gpu.memory_bytes) for i, gpu in gpus)
    )
