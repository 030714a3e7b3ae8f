"""Creates the executor of a run or an evaluation, with the config's launcher and weight sync."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlinf.config.common import ClusterConfig
from rlinf.errors import ProcessesLost, RlinfError, RunFailed, UserError
from rlinf.plugin_checks import named_class
from rlinf.processes.env_vars import worker_env_vars
from rlinf.processes.node_downloads import download_to_nodes
from rlinf_comm import PeerLost, TornStream
from rlinf_sched import Cluster
from rlinf_workers import (
    ClusterRefused,
    Executor,
    NodeLost,
    ProcessLost,
    RemoteError,
    StepTimeout,
    WorkerLost,
    WorkersError,
)
from rlinf_workers.launchers import Interpreter
from rlinf_workers.plugins import LAUNCHERS, WEIGHT_SYNCS

NONE: Mapping[str, Interpreter] = MappingProxyType({})


def check_plugins(config: ClusterConfig) -> None:
    """Raises: UserError for an unknown launcher or weight sync, options that it does not take, and an env var that is
    not set."""
    if unset := [name for name in config.pass_env_vars if name not in os.environ]:
        raise UserError(
            f"cluster.pass_env_vars: {', '.join(unset)} not set", hint="export it, or leave it out of the list"
        )
    options = config.launcher_options
    named_class(LAUNCHERS, config.launcher, options, at="cluster.launcher", **_settings(config, 1.0, False))
    if config.weight_sync != "auto":
        options = config.weight_sync_options
        named_class(WEIGHT_SYNCS, config.weight_sync, options, at="cluster.weight_sync", edge="", reshard=None)
    elif config.weight_sync_options:
        raise UserError("cluster.weight_sync_options: auto takes none", hint="name one with cluster.weight_sync")


def make_executor(
    config: ClusterConfig,
    cluster: Cluster,
    *,
    models: Sequence[Path],
    log_folder: Path,
    worker_timeout_s: float,
    forks: bool = False,
    venvs: Mapping[str, Interpreter] = NONE,
) -> Executor:
    """Yields an executor on the devices of `cluster`; on exit, all its processes end.

    Args:
        config: already checked by `check_plugins`.
        models: folders of models from the Hub that workers read (`rlinf.config.downloads.snapshot_folders`); nodes of
            the cluster that lack them download them.
        worker_timeout_s: heartbeat timeout in seconds.
        forks: workers are forked from the fork server.
        venvs: worker group -> interpreter of its venv; its workers are not forked.

    Raises: UserError if nodes of the cluster are missing or have no free capacity; ProcessesLost if a node was lost
        meanwhile.
    """
    spec = config.launcher_spec
    make_launcher, nodes = spec.load(), {"cluster": cluster} if spec.has_nodes else {}
    try:
        launcher = make_launcher(**_settings(config, worker_timeout_s, forks), **nodes, **config.launcher_options)
    except NodeLost as error:
        raise ProcessesLost(str(error)) from error
    except ClusterRefused as error:
        raise UserError(str(error)) from error
    try:
        download_to_nodes(launcher, cluster, models, config, log_folder)
    except WorkersError as error:
        launcher.shutdown()
        raise run_failed(error, log_folder, during="downloading to the nodes: ") from error
    except BaseException:
        launcher.shutdown()
        raise
    executor = Executor(
        cluster=cluster,
        launcher=launcher,
        log_folder=log_folder,
        env_vars=worker_env_vars(config),
        pythons={role: interpreter.path for role, interpreter in venvs.items()},
        weight_sync=config.weight_sync,
        weight_sync_options=config.weight_sync_options,
        attest_weights=config.attest_weights,
    )
    executor.notes.extend(getattr(launcher, "notes", ()))
    return executor


LOSSES = tuple(loss.__name__ for loss in (ProcessLost, PeerLost, TornStream))
"""Errors of a worker that lost a child process or the connection to another process; a restart may fix both."""


def _settings(config: ClusterConfig, worker_timeout_s: float, forks: bool) -> dict[str, Any]:
    """Returns the settings that a launcher gets from the run."""
    return {"heartbeat_timeout_s": worker_timeout_s, "pins_slots": config.pin_slots, "forks": forks}


def run_failed(error: WorkersError, log_folder: Path | None, *, during: str = "") -> RlinfError:
    """Returns the error that ends a run: what was raised, where, and how to see the traceback. Settings that a worker
    rejected on creation become user errors.

    Args:
        log_folder: contains `ROLE/RANK.log`; None if the logs are deleted with the command.
        during: prefix with the current phase, for example "step 3: ".
    """
    if isinstance(error, WorkerLost) and error.refusal is not None:
        log = f"; {log_folder / error.worker}.log has what it said before" if log_folder else ""
        return UserError(error.refusal, hint=f"worker {error.worker} was not started{log}")
    if isinstance(error, StepTimeout) or (isinstance(error, WorkerLost) and not error.raised_at_start):
        return ProcessesLost(f"{during}{error}")
    if not isinstance(error, RemoteError):
        return RunFailed(f"{during}{error}")
    if error.error_type in LOSSES:
        return ProcessesLost(f"{during}{error}")
    place = f"raised in {error.raised_in}\n" if error.raised_in else ""
    log = f", and so does {log_folder / error.worker}.log" if log_folder else ""
    return RunFailed(f"{during}{error}\n{place}hint: --traceback shows the way there{log}")
