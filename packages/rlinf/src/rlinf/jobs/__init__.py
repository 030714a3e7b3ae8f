"""Jobs: the training programs behind the recipes. `run` is what `rlinf train` calls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlinf.config.schema import Config
    from rlinf.jobs.loop import JobResult
    from rlinf.run_folder import RunFolder

__all__ = ["check", "run"]


def check(config: Config) -> None:
    """Everything that can be wrong with the inputs and the plan, before a folder or a process exists.

    Raises: UserError.
    """
    from rlinf.jobs.planning import make_plans

    job = _job(config)
    make_plans(job, job.build(Path("not-made-yet")))


def run(config: Config, folder: RunFolder) -> JobResult:
    """Runs the job of a checked config.

    Raises: RunFailed when a worker dies or raises, or a step passes its deadline.
    """
    from rlinf.jobs.loop import TrainingLoop

    return TrainingLoop(_job(config), folder).run()


def _job(config: Config):
    if config.job == "reasoning":
        from rlinf.jobs.reasoning import ReasoningJob

        return ReasoningJob(config)
    from rlinf.jobs.embodied import EmbodiedJob

    return EmbodiedJob(config)
