"""Chooses the devices of a run and checks that the machine has them; used by every command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeVar

from rlinf.config.common import ClusterConfig, JobConfig
from rlinf.errors import UserError
from rlinf.jobs.spec import job_spec
from rlinf.machine import Machine
from rlinf.plugin_checks import spec_of
from rlinf_sched import Cluster, Device
from rlinf_workers.plugins import WEIGHT_SYNCS

DeviceKind = Literal["cuda", "cpu"]
Job = TypeVar("Job", bound=JobConfig)
MAX_AUTO_SLOTS = 8
"""Maximum CPU slots with `num_devices: auto`; each slot costs one process per role, and each process loads torch."""


def device_kind(cluster: ClusterConfig, machine: Machine) -> DeviceKind:
    """Returns the kind of the devices.

    Raises: UserError if a GPU is required and none can be used, or if torch was built for the machine's GPUs but cannot
        use them: a run must not fall back to the CPU because of a driver problem.
    """
    if cluster.device == "cpu":
        return "cpu"
    if machine.gpus:
        return "cuda"
    if machine.unusable_gpus and (cluster.device == "gpu" or machine.torch_has_cuda):
        why = f"torch cannot use the GPUs of {_place(machine)} ({machine.unusable_gpus})"
        raise UserError(
            f"cluster.device={cluster.device}: {why}",
            hint="rlinf doctor looks closer; --cluster.device cpu trains on the CPU all the same",
        )
    if cluster.device == "gpu":
        raise UserError(
            f"cluster.device=gpu: {_machine(machine, 'cuda')}", hint="use --cluster.device cpu to train on the CPU"
        )
    return "cpu"


def device_notes(cluster: ClusterConfig, machine: Machine) -> list[str]:
    """Returns a note if a run with `device: auto` trains on the CPU although there are GPUs."""
    if cluster.device == "auto" and machine.unusable_gpus and not machine.gpus:
        return [f"this torch was built for CPUs alone, so the GPUs are not used ({machine.unusable_gpus})"]
    return []


def check_cluster(cluster: ClusterConfig, machine: Machine) -> int:
    """Returns the number of devices that a config uses.

    Raises: UserError that names what the machine has and the override that would fit.
    """
    kind = device_kind(cluster, machine)
    _check_weight_sync(cluster.weight_sync, on_gpus=kind == "cuda")
    available = len(machine.gpus) if kind == "cuda" else machine.num_cpus
    if cluster.num_devices == "auto":
        return sum(_rooms(cluster, machine, kind))
    if cluster.num_devices > available and (kind == "cuda" or not cluster.oversubscribe):
        allow = "" if kind == "cuda" else ", or let the slots share the cores with --cluster.oversubscribe true"
        raise UserError(
            f"cluster.num_devices={cluster.num_devices}: {_machine(machine, kind)}",
            hint=f"use --cluster.num_devices {available} or auto{allow}",
        )
    return cluster.num_devices


def _check_weight_sync(name: str, *, on_gpus: bool) -> None:
    spec = None if name == "auto" else spec_of(WEIGHT_SYNCS, name, at="cluster.weight_sync")
    if spec is not None and (problem := spec.problem(on_gpus=on_gpus)) is not None:
        raise UserError(f"cluster.weight_sync={name}: {problem}", hint="use --cluster.weight_sync auto")


def devices_per_node(cluster: ClusterConfig, machine: Machine) -> tuple[int, ...]:
    """Returns the number of devices used on each node, driver's node first; a node is filled before the next is used.

    Raises: as `check_cluster`.
    """
    left = check_cluster(cluster, machine)
    rooms = _rooms(cluster, machine, device_kind(cluster, machine))
    if left > sum(rooms):  # slots that share cores
        rooms = [-(-left // len(rooms))] * len(rooms)
    taken = []
    for room in rooms:
        taken.append(min(room, left))
        left -= taken[-1]
    return tuple(taken)


def _rooms(cluster: ClusterConfig, machine: Machine, kind: DeviceKind) -> list[int]:
    """Returns the number of devices of each node that a config may use."""
    nodes = machine.nodes or (machine,)
    if kind == "cuda":
        return [len(node.gpus) for node in nodes]
    most = MAX_AUTO_SLOTS if cluster.num_devices == "auto" else machine.num_cpus
    return [min(most, node.num_cpus) for node in nodes]


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


def check_placement(config: JobConfig, machine: Machine, num_devices: int) -> None:
    """Raises: UserError if mode or placement do not fit the devices."""
    for conflict in config.placement_conflicts(num_devices):
        has = _machine(machine, device_kind(config.cluster, machine))
        raise UserError(str(conflict), hint=f"{has}; use another mode, or see cluster.num_devices and oversubscribe")


def resolve_for_devices(config: Job, num_devices: int) -> Job:
    """Returns the config with the values that depend on the number of devices filled in."""
    return job_spec(config).resolve_for_devices(config, num_devices)


def _machine(machine: Machine, kind: DeviceKind) -> str:
    has_gpus = bool(machine.gpus)
    count, noun = (len(machine.gpus), "GPU") if kind == "cuda" and has_gpus else (machine.num_cpus, "CPU core")
    gpus = "" if has_gpus else " and no GPU"  # a run on the CPU does not need them
    return f"{_place(machine)} has {count} {noun}{'' if count == 1 else 's'}{gpus}"


def _place(machine: Machine) -> str:
    return "the cluster" if machine.nodes else "this machine"
