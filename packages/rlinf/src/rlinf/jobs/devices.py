"""The devices of a run as the planner knows them, and what its processes must know about them."""

from __future__ import annotations

from rlinf.config.devices import check_cluster, device_kind
from rlinf.config.schema import ClusterConfig
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


def worker_environment(config: ClusterConfig) -> dict[str, str]:
    """Thread counts: several processes with as many threads as cores each make one another 5 to 50 times slower."""
    threads = str(config.threads_per_device)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
        # Keep what large tensors leave free instead of giving it back and faulting it in again: a training step of the
        # sorting job had 42,000 page faults, and 2,000 with these.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        "MALLOC_TOP_PAD_": str(256 << 20),
    }
