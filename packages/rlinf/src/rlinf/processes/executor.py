"""The executor of a run or an evaluation, with the launcher and the weight link that the config names."""

from __future__ import annotations

from pathlib import Path

from rlinf.config.common import ClusterConfig
from rlinf.doors import named_class
from rlinf.errors import UserError
from rlinf.processes.environment import worker_environment
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
    make_launcher = named_class(LAUNCHERS, config.launcher, config.launcher_options, at="cluster.launcher", **settings)
    if config.weight_link != "auto":
        options = config.weight_link_options
        named_class(WEIGHT_LINKS, config.weight_link, options, at="cluster.weight_link", edge="", reshard=None)
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
