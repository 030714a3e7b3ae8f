"""Imports torch and the model's code in one process, from which the workers of a run on CPU slots are forked.

Imports take some seconds of CPU time per worker, and a run has five workers or more. The server starts while the driver
still reads its inputs. It is multiprocessing's fork server and lives as long as the driver, so it can be used again
when a new plan moves workers. On machines with a GPU nothing is forked, because processes that initialized CUDA must
not be.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
from multiprocessing import forkserver
from pathlib import Path

from rlinf.config.common import JobConfig
from rlinf.jobs.spec import job_spec
from rlinf.machine import NVIDIA_DEVICE
from rlinf.processes.env_vars import worker_env_vars
from rlinf_workers.launchers import worker_variables

AMD_DEVICE = Path("/dev/kfd")
FIRST, LAST = "rlinf.processes.fork_server_child", "rlinf.processes.fork_server_frozen"


def start(config: JobConfig) -> bool:
    """Starts the server, unless the run may use a GPU or starts its processes on nodes; returns immediately, with
    whether it did."""
    if config.cluster.launcher_spec.has_nodes:
        return False
    if config.cluster.device != "cpu" and (NVIDIA_DEVICE.exists() or AMD_DEVICE.exists()):
        return False
    with worker_variables(worker_env_vars(config.cluster)):  # libraries read them on import
        # Before Python 3.10.9 and 3.11.1 the server accepts code from every user of the machine (CVE-2022-42919).
        multiprocessing.util.abstract_sockets_supported = False
        multiprocessing.set_forkserver_preload([FIRST, *job_spec(config).preload(config), LAST])
        forkserver.ensure_running()
    return True
