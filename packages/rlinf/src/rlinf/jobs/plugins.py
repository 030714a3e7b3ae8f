"""The jobs that a recipe may name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf.plugin_checks import spec_of
from rlinf_workers.plugins import Plugins

if TYPE_CHECKING:
    from rlinf.config.common import JobConfig
    from rlinf.jobs.spec import JobSpec

JOBS: Plugins[JobSpec] = Plugins(
    "job",
    {
        "reasoning": "rlinf.jobs.reasoning.spec:SPEC",
        "embodied": "rlinf.jobs.embodied.spec:SPEC",
    },
    base="rlinf.jobs.spec:JobSpec",
)


def job_spec(config: JobConfig) -> JobSpec:
    """The spec of a config's job. Raises: UserError."""
    return named_job(config.job)


def named_job(name: str) -> JobSpec:
    """The spec of a job by its name or import path. Raises: UserError."""
    return spec_of(JOBS, name, at="job")
