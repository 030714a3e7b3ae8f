"""The planning problem of a recipe on GPUs that need not be in this machine, by the spec of its job."""

from __future__ import annotations

from dataclasses import replace

from rlinf.config.common import ClusterConfig, JobConfig
from rlinf.errors import UserError
from rlinf.jobs.spec import job_spec
from rlinf.planning.memory import weight_sync_of
from rlinf_sched import Cluster, Problem
from rlinf_sched.derive import gpu_cluster


def problem_of_recipe(config: JobConfig, *, gpu: str = "H100", env_step_s: float | None = None) -> Problem:
    """The planning problem of a recipe.

    Args:
        gpu: a product for which the planner has a datasheet.
        env_step_s: jobs with environments: seconds of one step of one environment on a core; None: public figures.

    Raises: UserError for a recipe without a number of devices, or with components that have no derived profile.
    """
    return job_spec(config).problem(config, _num_devices(config), gpu=gpu, env_step_s=env_step_s)


def planned_gpus(config: ClusterConfig, gpu: str, num_devices: int) -> Cluster:
    """The cluster of a plan, with the rate of the weight sync that a run would have on it.

    Raises: ClusterError for an unknown product.
    """
    cluster = gpu_cluster(gpu, num_devices)
    rate = weight_sync_of(config, range(cluster.num_nodes), on_gpu=True).bytes_per_s
    return cluster if rate is None else replace(cluster, links=replace(cluster.links, sync_bytes_per_s=rate))


def settled_for_plan(config: JobConfig, *, gpu: str = "H100") -> JobConfig:
    """The config with what a plan for these GPUs chooses. Raises: UserError, as `problem_of_recipe`."""
    return job_spec(config).settle_for_plan(config, _num_devices(config), gpu=gpu)


def _num_devices(config: JobConfig) -> int:
    if config.cluster.num_devices == "auto":
        raise UserError(
            "cluster.num_devices=auto: a plan is made for a number of GPUs that need not be in this machine",
            hint="give --cluster.num_devices 64, and --gpu for the product",
        )
    return config.cluster.num_devices
