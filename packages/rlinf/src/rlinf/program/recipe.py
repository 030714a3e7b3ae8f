"""Shared by both programs: loads the job of a recipe, creates its workers in this process, parses the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from rlinf import jobs
from rlinf.cli.output_folder import new_folder
from rlinf.config.common import JobConfig
from rlinf.config.devices import device_kind
from rlinf.config.downloads import with_downloads
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.errors import RlinfError, UserError
from rlinf.jobs.base import Job
from rlinf.jobs.checks import run_checks
from rlinf.run_folder.rows import to_json
from rlinf_workers import InProcessWorkers

Train = Callable[[JobConfig, Path], Iterator[dict[str, float]]]


def make_workers(config: JobConfig, folder: Path) -> tuple[Job, InProcessWorkers]:
    """Checks a config and returns its job, and the workers of its training flow in this process.

    Args:
        folder: the job writes the files that workers load into it.
    Raises: UserError.
    """
    config = with_downloads(config)
    run_checks("config", config)
    job = jobs.prepare(config)
    torch.set_num_threads(job.config.cluster.threads_per_device)
    flow = job.build(folder).train
    if flow.max_staleness:
        raise UserError(
            f"algorithm.max_staleness={flow.max_staleness}: steps in one process do not overlap",
            hint="use --algorithm.max_staleness 0, or rlinf train",
        )
    job.write_inputs(folder)
    device = device_kind(job.config.cluster, job.machine)
    return job, InProcessWorkers(flow, f"{device}:0")


def main(train: Train, job: str, arguments: Sequence[str]) -> int:
    """`python -m rlinf.program.JOB RECIPE [overrides]`: trains, and prints the metrics of each step as JSON."""
    try:
        if not arguments or arguments[0].startswith("-"):
            raise UserError(f"usage: python -m rlinf.program.{job} RECIPE [--key value ...]")
        config = load_config(arguments[0], parse_overrides(arguments[1:]))
        if config.job != job:
            raise UserError(f"{arguments[0]} is a recipe of the {config.job} job", hint=f"rlinf.program.{config.job}")
        folder = new_folder(config.name)
        for step, metrics in enumerate(train(config, folder)):
            print(to_json({"step": step, "metrics": metrics}), flush=True)
        print(f"model: {folder / 'model'}", file=sys.stderr)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
