"""Which devices a run has, and what its processes must know about them."""

from __future__ import annotations

import os

from rlinf.config.schema import ClusterConfig
from rlinf_sched.cluster import Cluster

MAX_AUTO_SLOTS = 8
"""CPU slots of `num_devices: auto`; each costs a process for every role, which loads torch."""


def make_cluster(config: ClusterConfig) -> Cluster:
    """The GPUs of this machine, or CPU slots where there is none. The config's number was checked against the
    machine."""
    import torch

    if torch.cuda.is_available():
        available = torch.cuda.device_count()
        count = available if config.num_devices == "auto" else config.num_devices
        properties = torch.cuda.get_device_properties(0)
        return Cluster.cuda_nodes(1, count, name=properties.name, memory_bytes=properties.total_memory)
    count = min(MAX_AUTO_SLOTS, len(os.sched_getaffinity(0))) if config.num_devices == "auto" else config.num_devices
    return Cluster.cpu_slots(count)


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
