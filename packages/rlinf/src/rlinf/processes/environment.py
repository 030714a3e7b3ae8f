"""What the processes of a run must find in their environment before they import anything."""

from __future__ import annotations

from rlinf.config.common import ClusterConfig


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
