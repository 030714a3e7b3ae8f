"""The devices of a run, as the planner knows them."""

from __future__ import annotations

from collections.abc import Iterator

from rlinf.config.common import ClusterConfig
from rlinf.config.devices import DeviceKind, device_kind, devices_per_node
from rlinf.machine import Machine
from rlinf_sched import Cluster, Device


def make_cluster(config: ClusterConfig, machine: Machine) -> Cluster:
    """The devices that the config takes of the machine, or of each node. Raises: as `check_cluster`."""
    kind, counts = device_kind(config, machine), devices_per_node(config, machine)
    devices = (
        (node, *device)
        for node, (one, count) in enumerate(zip(machine.nodes or (machine,), counts, strict=True))
        for device in _devices(one, kind, count)
    )
    return Cluster(
        devices=tuple(
            Device(index=index, kind=kind, node=node, name=name or f"cpu:{index}", memory_bytes=memory_bytes)
            for index, (node, name, memory_bytes) in enumerate(devices)
        )
    )


def _devices(machine: Machine, kind: DeviceKind, count: int) -> Iterator[tuple[str, int]]:
    """(name, bytes) of the first so many of one machine; slots share its memory and are named by their number in the
    cluster."""
    if kind == "cuda":
        yield from ((gpu.name, gpu.memory_bytes) for gpu in machine.gpus[:count])
    else:
        yield from [("", machine.memory_bytes // count)] * count if count else []
