"""`rlinf train RECIPE`: checks everything, creates the run folder and runs the job."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlinf.cli.output_folder import new_folder
from rlinf.config.load import load_config, load_for_resume
from rlinf.config.overrides import parse_overrides, refuse_misspelt_options
from rlinf.config.schema import SHIPPED
from rlinf.errors import UserError
from rlinf.loop.ending import how_to_go_on
from rlinf.run_folder.lock import check_empty, check_free
from rlinf.training import run_training

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
    result = run_training(
        config,
        folder,
        command=["rlinf", *args.arguments],
        resume=args.resume,
        accept_changed_inputs=args.accept_changed_inputs,
    )
    print(f"\n{result}")
    return 0
