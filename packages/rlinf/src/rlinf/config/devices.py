"""Whether the machine has the devices that a config asks for."""

from __future__ import annotations

from rlinf.config.common import ClusterConfig
from rlinf.config.schema import Config
from rlinf.errors import UserError


def check_devices(config: Config, *, num_cpus: int, num_gpus: int) -> None:
    """Compares the config with the machine: its GPUs, or its CPU cores where it has no GPU.

    Raises: UserError that names what the machine has and the override that would fit.
    """
    has = _machine(num_cpus, num_gpus)
    num_devices = check_cluster(config.cluster, num_cpus=num_cpus, num_gpus=num_gpus)
    if config.mode in ("disaggregated", "hybrid") and num_devices < 2:
        share = "" if num_gpus else ", or --cluster.num_devices 2 --cluster.oversubscribe true"
        raise UserError(f"mode={config.mode} needs at least 2 devices, {has}", hint=f"use --mode auto{share}")
    for group, devices in config.plan.devices.items():
        if wrong := [device for device in devices if device >= num_devices]:
            raise UserError(
                f"plan.devices.{group}={list(devices)}: device {wrong[0]} does not exist; "
                f"the run has devices 0 to {num_devices - 1}",
                hint=f"{has}; see cluster.num_devices",
            )


def check_cluster(cluster: ClusterConfig, *, num_cpus: int, num_gpus: int) -> int:
    """Whether there are as many devices as asked for.

    Returns: their number.
    Raises: as `check_devices`.
    """
    available = num_gpus or num_cpus
    num_devices = available if cluster.num_devices == "auto" else cluster.num_devices
    if num_devices > available and (num_gpus or not cluster.oversubscribe):
        allow = "" if num_gpus else ", or let the slots share the cores with --cluster.oversubscribe true"
        raise UserError(
            f"cluster.num_devices={num_devices}: {_machine(num_cpus, num_gpus)}",
            hint=f"use --cluster.num_devices {available} or auto{allow}",
        )
    return num_devices


def _machine(num_cpus: int, num_gpus: int) -> str:
    if num_gpus:
        return f"this machine has {_count(num_gpus, 'GPU')}"
    return f"this machine has {_count(num_cpus, 'CPU core')} and no GPU"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
