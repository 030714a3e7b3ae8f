"""`rlinf train RECIPE`: check everything, make the run folder, run the job."""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf.config.devices import check_devices
from rlinf.config.load import load_config, load_for_resume, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.config.schema import JOBS, Config
from rlinf.errors import UserError

OPTIONS = ("--output", "--resume", "--traceback", "--help")


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="run a recipe",
        description="Runs a recipe. Any key of its config can be overridden: --run.num_steps 50 --seed=1.",
        epilog="rlinf config list names the recipes; rlinf config show RECIPE prints one with all its keys.",
    )
    parser.add_argument("recipe", nargs="?", help="name of a shipped recipe, or path of a YAML file; not with --resume")
    parser.add_argument("--output", type=Path, help="the run's folder (default: runs/<name>-<time>)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --output")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    if args.resume == bool(args.recipe):
        raise UserError(
            "give a recipe to start a run, or --resume with --output FOLDER to go on with one",
            hint="rlinf config list names the recipes that come with the package",
        )
    if args.resume and args.output is None:
        raise UserError("--resume needs --output FOLDER, the folder of the run to go on with")
    _refuse_misspelt_options(args.overrides)
    overrides = parse_overrides(args.overrides)
    config = load_for_resume(args.output, overrides) if args.resume else load_config(args.recipe, overrides)
    folder = args.output or _new_folder(config.name)
    if not args.resume:
        _check_empty(folder)
    return _train(config, folder, resume=args.resume, command=["rlinf", *args.arguments])


def _train(config: Config, path: Path, *, resume: bool, command: list[str]) -> int:
    import torch  # only now: everything above answers without it

    from rlinf import jobs
    from rlinf.run_folder import RunFolder

    check_devices(config, num_cpus=len(os.sched_getaffinity(0)), num_gpus=torch.cuda.device_count())
    job = jobs.prepare(config)
    keep = config.run.keep_checkpoints
    open_folder = RunFolder.resume if resume else RunFolder.create
    try:
        folder = open_folder(path, config_yaml=to_yaml(config), command=command, keep_checkpoints=keep)
    except OSError as error:
        raise UserError(
            f"--output={path}: cannot write there: {error.strerror or error}", hint="choose another folder"
        ) from error
    with folder:
        result = jobs.run(job, folder)
    print(f"\n{result.table}\nreport: {result.report_path}")
    return 0


def _refuse_misspelt_options(overrides: Sequence[str]) -> None:
    """`--ouput x` looks like an override; a word that is no key and nearly an option is meant as one."""
    keys = {f"--{name}" for model in JOBS.values() for name in model.model_fields}
    for flag in (argument.partition("=")[0] for argument in overrides):
        close = difflib.get_close_matches(flag, OPTIONS, n=1, cutoff=0.75)
        if close and flag not in keys:
            raise UserError(f"unknown option {flag}; did you mean {close[0]}?", hint="see rlinf train --help")


def _new_folder(name: str) -> Path:
    """runs/<name>-<time>, with a number behind it for runs that start within the same second."""
    first = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], numbered) if not folder.exists())


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"the output folder {folder} exists and is not empty",
            hint="go on with the run in it with --resume, or choose another folder with --output",
        )
