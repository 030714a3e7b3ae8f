"""Jobs: the training programs behind the recipes. `run` is what `rlinf train` calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlinf.config.schema import Config
    from rlinf.jobs.base import Job
    from rlinf.machine import Machine
    from rlinf.run_folder import RunFolder
    from rlinf_workers.launcher.interpreter import Interpreter
    from rlinf_workers.profiling import Measured

__all__ = ["prepare", "run", "measure"]


def prepare(config: Config, machine: Machine | None = None) -> Job:
    """The job of a config, with all checked that can be wrong with its inputs, its devices and its plan; nothing is
    written or started. `job.config` has no number left that depends on the machine.

    Args:
        machine: where it will run; None: what its launcher has.

    Raises: UserError.
    """
    from rlinf.config.devices import check_devices, settle
    from rlinf.planning.plans import make_plans
    from rlinf.processes.environments import examine_environments
    from rlinf.processes.executor import check_doors
    from rlinf.processes.machines import machine_of
    from rlinf.run_folder.wandb_sink import check_wandb

    check_wandb(config.run.wandb)
    check_doors(config.cluster)
    environments = examine_environments(config.environments)
    machine = machine or machine_of(config.cluster)
    config = settle(config, check_devices(config, machine))
    job, folder = _job(config, machine, environments), Path("not-made-yet")
    job.environments = environments
    job.check_environments()
    make_plans(job, job.build(folder), folder)
    return job


def run(job: Job, folder: RunFolder) -> str:
    """Runs a prepared job in its folder; returns what to tell of it.

    Raises: RunFailed when a worker dies or raises, or a step passes its deadline.
    """
    from rlinf.loop.training_loop import TrainingLoop
    from rlinf.run_folder.wandb_sink import WandbSink

    if job.config.run.wandb is not None:
        folder.add_sink(WandbSink(job.config.run.wandb, folder.path, job.config.model_dump(mode="json")))
    return TrainingLoop(job, folder).run()


def measure(job: Job, folder: RunFolder) -> Measured:
    """The first steps of a prepared job in mode auto, and what its stages took.

    Raises: as `run`.
    """
    from rlinf.loop.training_loop import TrainingLoop

    return TrainingLoop(job, folder).measure()


def _job(config: Config, machine: Machine, environments: Mapping[str, Interpreter]) -> Job:
    if config.job == "reasoning":
        from rlinf.jobs.reasoning import ReasoningJob

        return ReasoningJob(config, machine)
    from rlinf.jobs.embodied import EmbodiedJob

    return EmbodiedJob(config, machine, environments["env"].path if "env" in environments else None)
