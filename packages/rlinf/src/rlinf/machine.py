"""Detects CPUs, memory and GPUs of a machine, with torch and the system, or asks the launcher for those of its nodes.

A GPU counts only if torch can use it. Torch has two counts of GPUs that may differ: the driver's list, and the CUDA
runtime's, which does not work with an old driver. Both are needed, because the first alone may list unusable GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf.config.common import ClusterConfig
from rlinf.errors import UserError
from rlinf_workers import ClusterRefused
from rlinf_workers.launchers import Node

NVIDIA_DEVICE = Path("/dev/nvidia0")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledGpu:
    """A GPU that torch can use."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The resources of a run.

    Example: a server whose driver is older than torch's CUDA is
        Machine(num_cpus=64, memory_bytes=1 << 40, unusable_gpus="8 GPUs: The NVIDIA driver on your system is too old")
    """

    num_cpus: int
    """Cores that this process may use."""
    memory_bytes: int
    """Main memory of the host in bytes, or the container's limit if that is lower."""
    gpus: tuple[InstalledGpu, ...] = ()
    unusable_gpus: str = ""
    """GPUs that the system has but torch cannot use, and why; empty if there are none."""
    torch_has_cuda: bool = True
    """False: this torch was built for CPUs only, which counts as the user's choice."""
    nodes: tuple[Machine, ...] = ()
    """The machines of a cluster, the driver's first; the other fields are then totals. Empty: this machine only."""

    @classmethod
    def of_nodes(cls, nodes: Sequence[Machine]) -> Machine:
        """Combines the machines of a cluster."""
        return cls(
            num_cpus=sum(node.num_cpus for node in nodes),
            memory_bytes=sum(node.memory_bytes for node in nodes),
            gpus=tuple(gpu for node in nodes for gpu in node.gpus),
            unusable_gpus="; ".join(node.unusable_gpus for node in nodes if node.unusable_gpus),
            torch_has_cuda=any(node.torch_has_cuda for node in nodes),
            nodes=tuple(nodes),
        )


def machine_of(config: ClusterConfig) -> Machine:
    """Returns the resources of the config's launcher; may import torch.

    Raises: UserError for a cluster that does not exist or is too small.
    """
    spec = config.launcher_spec
    if not spec.has_nodes:
        return this_machine()
    try:
        return Machine.of_nodes([_of_node(node) for node in spec.nodes(config.launcher_options)])
    except (ClusterRefused, ModuleNotFoundError) as error:  # no cluster, or a package of the launcher is missing
        raise UserError(str(error)) from error


def _of_node(node: Node) -> Machine:
    gpus = tuple(InstalledGpu(name=name, memory_bytes=memory_bytes) for name, memory_bytes in node.gpus)
    lacks = f"{node}, of which torch finds {len(gpus)} there" if len(gpus) < node.num_gpus else ""
    return Machine(
        num_cpus=node.num_cpus,
        memory_bytes=node.memory_bytes,
        gpus=() if lacks else gpus,
        unusable_gpus=lacks,
        torch_has_cuda=node.num_gpus > 0,
    )


def this_machine() -> Machine:
    """Detects this machine's resources; imports torch and numpy. `CUDA_VISIBLE_DEVICES` hides GPUs as usual."""
    import torch

    from rlinf_sched import host_memory

    is_available = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count() if is_available else 0)]
    return Machine(
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=host_memory.usable_bytes(),
        gpus=tuple(InstalledGpu(name=one.name, memory_bytes=one.total_memory) for one in gpus),
        unusable_gpus="" if is_available else _why_unusable(),
        torch_has_cuda=torch.version.cuda is not None or torch.version.hip is not None,
    )


def _why_unusable() -> str:
    """Describes the GPUs that torch cannot use and why; empty if there are none or they are hidden on purpose."""
    import torch

    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    count = torch.cuda.device_count()  # uses the driver's library if possible, which works with any driver version
    if not count and not NVIDIA_DEVICE.exists():
        return ""
    seen = f"{count} GPU{'' if count == 1 else 's'}" if count else str(NVIDIA_DEVICE)
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        return f"{seen}: {str(error).splitlines()[0]}"
    return f"{seen}: torch.cuda.is_available() is False"
