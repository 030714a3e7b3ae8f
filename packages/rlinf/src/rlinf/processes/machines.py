"""What a run may use: this machine, or the nodes that its launcher knows."""

from __future__ import annotations

from rlinf.config.common import ClusterConfig
from rlinf.errors import UserError
from rlinf.machine import Gpu, Machine, this_machine
from rlinf_algos.errors import AlgosError
from rlinf_workers.errors import ClusterRefused
from rlinf_workers.launchers.base import Node
from rlinf_workers.plugins import LAUNCHERS


def knows_nodes(launcher: str) -> bool:
    """Whether a launcher starts processes on nodes that it knows, and not on this machine. One that is not there does
    not; `check_doors` says so."""
    try:
        return hasattr(LAUNCHERS.get(launcher), "nodes")
    except AlgosError:
        return False


def machine_of(config: ClusterConfig) -> Machine:
    """What the config's launcher has; imports torch.

    Raises: UserError for a cluster that is not there, or too small.
    """
    if not knows_nodes(config.launcher):
        return this_machine()
    try:
        return Machine.of_nodes(
            [_machine(node) for node in LAUNCHERS.get(config.launcher).nodes(**config.launcher_options)]
        )
    except ClusterRefused as error:
        raise UserError(str(error)) from error


def _machine(node: Node) -> Machine:
    gpus = tuple(Gpu(name=name, memory_bytes=memory_bytes) for name, memory_bytes in node.gpus)
    lacks = f"{node}, of which torch finds {len(gpus)} there" if len(gpus) < node.num_gpus else ""
    return Machine(
        num_cpus=node.num_cpus,
        memory_bytes=node.memory_bytes,
        gpus=() if lacks else gpus,
        unusable_gpus=lacks,
        torch_has_cuda=node.num_gpus > 0,
    )
