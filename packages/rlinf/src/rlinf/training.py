"""Runs a config from its checks to its result: what `rlinf train` and `rlinf.train` call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlinf.cli.output_folder import cannot_write
from rlinf.config.common import JobConfig
from rlinf.config.downloads import with_downloads
from rlinf.config.load import to_yaml
from rlinf.console.live_line import LiveLine
from rlinf.errors import RunFailed, UserError
from rlinf.jobs.checks import run_checks
from rlinf.run_folder.folder import resume_command
from rlinf.run_folder.record import Replay
from rlinf.torch_import import import_torch

OnStep = Callable[[int, Mapping[str, float]], None]
"""Called with a step's number, from 0, and its metrics."""


def run_training(
    config: JobConfig,
    path: Path,
    *,
    command: Sequence[str],
    resume: bool = False,
    accept_changed_inputs: bool = False,
    on_step: OnStep | None = None,
    resume_with: str | None = None,
    replay: Replay | None = None,
) -> str:
    """Checks a config, creates the run folder and trains; returns what to tell of the result.

    Args:
        path: the run's folder.
        command: what was called, for the manifest.
        resume: continue the run in the folder.
        accept_changed_inputs: continue although data or a model has changed.
        on_step: called after each step, in this process.
        replay: the run to replay in this new folder.
        resume_with: what to type to resume the run, printed if it is interrupted; None: the command.
    Raises: UserError before anything was written, RunFailed, OSError, KeyboardInterrupt.
    """
    run_checks("train", config)
    config = with_downloads(config)
    run_checks("config", config)
    from rlinf.processes import fork_server

    fork_server.start(config)
    with LiveLine().doing("loading torch, then checking the model, the data and the devices"):
        import_torch()
        from rlinf import jobs
        from rlinf.log_writers.delivery import LogWriters
        from rlinf.run_folder import RunFolder

        job = jobs.prepare(config)
    try:
        folder = RunFolder(
            path,
            resume=resume,
            config_yaml=to_yaml(job.config),
            command=command,
            keep_checkpoints=config.run.keep_checkpoints,
            trace_bytes=config.run.trace_megabytes << 20 if config.run.trace else 0,
            inputs=job.inputs,
            accept_changed_inputs=accept_changed_inputs,
        )
    except OSError as error:
        raise cannot_write(path, error) from error
    go_on = resume_with or resume_command(path)
    try:
        with folder:
            if replay is not None:
                folder.begin_replay(replay)
            run = folder.logged_run(job.config.model_dump(mode="json"))
            with LiveLine().doing("starting the log writers"):
                folder.log_to(LogWriters.begin(job.config.run.loggers, run))
            if on_step is not None:
                folder.call_on_step(on_step)
            return jobs.run(job, folder)
    except UserError:
        folder.discard()
        raise
    except KeyboardInterrupt:
        print(f"go on with: {go_on}", file=sys.stderr)
        raise
    except (OSError, RunFailed):
        if folder.latest_checkpoint() is not None:
            print(f"go on with, once it is mended: {go_on}", file=sys.stderr)
        raise
