"""The resources of a run: this machine, or the nodes of its launcher."""

from __future__ import annotations

from rlinf.config.common import ClusterConfig
from rlinf.errors import UserError
from rlinf.machine import InstalledGpu, Machine, this_machine
from rlinf_workers import ClusterRefused
from rlinf_workers.launchers import Node


def machine_of(config: ClusterConfig) -> Machine:
    """Returns the resources of the config's launcher; may import torch.

    Raises: UserError for a cluster that does not exist or is too small.
    """
    spec = config.launcher_spec
    if not spec.has_nodes:
        return this_machine()
    try:
        return Machine.of_nodes([_machine(node) for node in spec.nodes(config.launcher_options)])
    except (ClusterRefused, ModuleNotFoundError) as error:  # no cluster, or a package of the launcher is missing
        raise UserError(str(error)) from error


def _machine(node: Node) -> Machine:
    gpus = tuple(InstalledGpu(name=name, memory_bytes=memory_bytes) for name, memory_bytes in node.gpus)
    lacks = f"{node}, of which torch finds {len(gpus)} there" if len(gpus) < node.num_gpus else ""
    return Machine(
        num_cpus=node.num_cpus,
        memory_bytes=node.memory_bytes,
        gpus=() if lacks else gpus,
        unusable_gpus=lacks,
        torch_has_cuda=node.num_gpus > 0,
    )
