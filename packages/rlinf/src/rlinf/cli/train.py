"""`rlinf train RECIPE`: checks everything, creates the run folder and runs the job."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rlinf.cli.output_folder import cannot_write, new_folder
from rlinf.config.common import JobConfig
from rlinf.config.downloads import with_downloads
from rlinf.config.load import load_config, load_for_resume, to_yaml
from rlinf.config.overrides import parse_overrides, refuse_misspelt_options
from rlinf.config.schema import SHIPPED
from rlinf.errors import RunFailed, UserError
from rlinf.jobs.checks import run_checks
from rlinf.loop.ending import how_to_go_on
from rlinf.run_folder.folder import resume_command
from rlinf.run_folder.lock import check_empty, check_free

OPTIONS = ("--output", "--resume", "--accept-changed-inputs", "--traceback", "--help")


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="run a recipe",
        description="Runs a recipe. Any key of its config can be overridden: --run.num_steps 50 --seed=1.",
        epilog="rlinf config list names the recipes; rlinf config show RECIPE prints one with all its keys.",
    )
    parser.add_argument("recipe", nargs="?", help="name of a shipped recipe, or path of a YAML file; not with --resume")
    parser.add_argument("--output", type=Path, help="the run's folder (default: runs/<name>-<time>)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --output")
    parser.add_argument(
        "--accept-changed-inputs",
        action="store_true",
        help="with --resume: continue although data or a model has changed since the run began",
    )
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    if args.resume == bool(args.recipe):
        raise UserError(
            "give a recipe to start a run, or --resume with --output FOLDER to go on with one",
            hint="rlinf config list names the recipes that come with the package",
        )
    if args.accept_changed_inputs and not args.resume:
        raise UserError("--accept-changed-inputs is for --resume: a new run takes its inputs as they are")
    if args.resume and args.output is None:
        raise UserError("--resume needs --output FOLDER, the folder of the run to go on with")
    keys = {name for model in SHIPPED for name in model.model_fields}
    refuse_misspelt_options(args.overrides, OPTIONS, keys, "rlinf train")
    overrides = parse_overrides(args.overrides)
    config = load_for_resume(args.output, overrides) if args.resume else load_config(args.recipe, overrides)
    folder = args.output or new_folder(config.name)
    check_free(folder)
    if not args.resume:
        check_empty(folder)
    elif ended := how_to_go_on(config.run, folder):
        print(ended)
        return 0
    command = ["rlinf", *args.arguments]
    return _train(config, folder, resume=args.resume, accept=args.accept_changed_inputs, command=command)


def _train(config: JobConfig, path: Path, *, resume: bool, accept: bool, command: list[str]) -> int:
    config = with_downloads(config)
    run_checks("config", config)
    from rlinf.processes import fork_server

    fork_server.start(config)
    from rlinf import jobs  # imports torch
    from rlinf.run_folder import RunFolder

    job = jobs.prepare(config)
    trace_bytes = config.run.trace_megabytes << 20 if config.run.trace else 0
    try:
        folder = RunFolder(
            path,
            resume=resume,
            config_yaml=to_yaml(job.config),
            command=command,
            keep_checkpoints=config.run.keep_checkpoints,
            trace_bytes=trace_bytes,
            inputs=job.inputs,
            accept_changed_inputs=accept,
        )
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        with folder:
            result = jobs.run(job, folder)
    except UserError:
        folder.discard()
        raise
    except KeyboardInterrupt:
        print(f"go on with: {resume_command(path)}", file=sys.stderr)
        raise
    except (OSError, RunFailed):
        if folder.latest_checkpoint() is not None:
            print(f"go on with, once it is mended: {resume_command(path)}", file=sys.stderr)
        raise
    print(f"\n{result}")
    return 0
