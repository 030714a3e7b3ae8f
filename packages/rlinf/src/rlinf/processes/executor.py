"""The executor of a run or an evaluation, with the launcher and the weight link that the config names."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal

from rlinf.config.common import ClusterConfig
from rlinf.errors import UserError
from rlinf.processes.environment import worker_environment
from rlinf_algos.errors import AlgosError
from rlinf_sched.cluster import Cluster
from rlinf_workers import Executor
from rlinf_workers.registry import LAUNCHERS, WEIGHT_LINKS


def make_executor(
    config: ClusterConfig, cluster: Cluster, *, log_folder: Path, worker_timeout_s: float, forks: bool = False
) -> Executor:
    """An executor on the devices of `cluster`; leaving it ends every process.

    Args:
        worker_timeout_s: a worker that is silent for so long is lost.
        forks: workers are forked from the fork server.

    Raises: UserError for a launcher or a weight link that is not there, or options that it does not take.
    """
    settings = {"heartbeat_timeout_s": worker_timeout_s, "pins_slots": config.pin_slots, "forks": forks}
    make_launcher = _checked(config, "launcher", **settings)
    if config.weight_link != "auto":
        _checked(config, "weight_link", edge="", reshard=None)
    elif config.weight_link_options:
        raise UserError("cluster.weight_link_options: auto takes none", hint="name a link with cluster.weight_link")
    return Executor(
        cluster=cluster,
        launcher=make_launcher(**settings, **config.launcher_options),
        log_folder=log_folder,
        environment=worker_environment(config),
        weight_link=config.weight_link,
        weight_link_options=config.weight_link_options,
    )


def _checked(config: ClusterConfig, key: Literal["launcher", "weight_link"], **settings: Any) -> Any:
    """The class that a key names, which takes the run's settings and the recipe's options."""
    name, options = getattr(config, key), getattr(config, f"{key}_options")
    registry = {"launcher": LAUNCHERS, "weight_link": WEIGHT_LINKS}[key]
    try:
        made_by = registry.get(name)
    except AlgosError as error:
        raise UserError(f"cluster.{key}: {error}") from error
    try:
        if twice := sorted(settings.keys() & options.keys()):
            raise TypeError(f"is given {twice[0]!r} by the run")
        inspect.signature(made_by).bind(**settings, **options)
    except TypeError as error:
        hint = f"they are keyword arguments of the constructor of {name}"
        raise UserError(f"cluster.{key}_options: {name} {error}", hint=hint) from error
    return made_by
