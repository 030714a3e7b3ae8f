"""Env vars that the processes of a run need before their first import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rlinf.config.common import ClusterConfig
from rlinf.errors import UserError
from rlinf_workers.launchers import credential_names, worker_variables


@contextmanager
def as_in_workers(config: ClusterConfig) -> Iterator[None]:
    """Context in which the driver has only the env vars of a worker, so that a custom function that needs another one
    fails before the start, with an error that explains how to pass it."""
    hidden = credential_names(os.environ)
    try:
        with worker_variables(passed_env_vars(config)):
            yield
    except UserError as error:
        missing = [name for name in hidden if name in error.message and name not in config.pass_env_vars]
        if not missing:
            raise
        names = f"'[{', '.join(missing)}]'"
        hint = f"workers get no credentials but those that the config names: --cluster.pass_env_vars {names}"
        raise UserError(error.message, hint=hint) from error


def passed_env_vars(config: ClusterConfig) -> dict[str, str]:
    """Returns the env vars to pass that are set; `check_plugins` reports the others."""
    return {name: os.environ[name] for name in config.pass_env_vars if name in os.environ}


def worker_env_vars(config: ClusterConfig) -> dict[str, str]:
    """Returns thread counts (several processes with as many threads as cores are 5 to 50 times slower) and the
    credentials that the config passes."""
    threads = str(config.threads_per_device)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
        # Keep freed memory of large tensors instead of returning and faulting it in again: a training step of the
        # sorting job had 42,000 page faults, and 2,000 with these.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        "MALLOC_TOP_PAD_": str(256 << 20),
        **passed_env_vars(config),
    }
