"""The planning problem of a recipe on GPUs that need not be in this machine, by the spec of its job."""

from __future__ import annotations

from rlinf.config.common import JobConfig
from rlinf.errors import UserError
from rlinf.jobs.spec import job_spec
from rlinf_sched import Problem


def problem_of_recipe(config: JobConfig, *, gpu: str = "H100", env_step_s: float | None = None) -> Problem:
    """The planning problem of a recipe.

    Args:
        gpu: a product for which the planner has a datasheet.
        env_step_s: jobs with environments: seconds of one step of one environment on a core; None: public figures.

    Raises: UserError for a recipe without a number of devices, or with components that have no derived profile.
    """
    return job_spec(config).problem(config, _num_devices(config), gpu=gpu, env_step_s=env_step_s)


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
