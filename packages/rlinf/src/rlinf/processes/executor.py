"""The executor of a run or an evaluation, with the launcher that the config names."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from rlinf.config.common import ClusterConfig
from rlinf.errors import UserError
from rlinf.processes.environment import worker_environment
from rlinf_algos.errors import AlgosError
from rlinf_sched.cluster import Cluster
from rlinf_workers import Executor
from rlinf_workers.launcher.base import Launcher
from rlinf_workers.registry import LAUNCHERS


def make_executor(
    config: ClusterConfig, cluster: Cluster, *, log_folder: Path, worker_timeout_s: float, forks: bool = False
) -> Executor:
    """An executor on the devices of `cluster`; leaving it ends every process.

    Args:
        worker_timeout_s: a worker that is silent for so long is lost.
        forks: workers are forked from the fork server.

    Raises: UserError for a launcher that is not there, or options that it does not take.
    """
    launcher = _make_launcher(config, heartbeat_timeout_s=worker_timeout_s, pins_slots=config.pin_slots, forks=forks)
    return Executor(cluster=cluster, launcher=launcher, log_folder=log_folder, environment=worker_environment(config))


def _make_launcher(config: ClusterConfig, **settings: Any) -> Launcher:
    try:
        made_by = LAUNCHERS.get(config.launcher)
    except AlgosError as error:
        raise UserError(f"cluster.launcher: {error}") from error
    try:
        if twice := sorted(settings.keys() & config.launcher_options.keys()):
            raise TypeError(f"is given {twice[0]!r} by the run")
        inspect.signature(made_by).bind(**settings, **config.launcher_options)
    except TypeError as error:
        raise UserError(
            f"cluster.launcher_options: {config.launcher} {error}",
            hint="they are keyword arguments of the launcher's constructor",
        ) from error
    return made_by(**settings, **config.launcher_options)
