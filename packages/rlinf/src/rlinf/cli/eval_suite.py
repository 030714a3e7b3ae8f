"""`rlinf eval --suite SUITE RUN`: evaluates a robot policy outside its training conditions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlinf.address_space import check_address_space
from rlinf.cli.output_folder import new_folder, resumable_evaluation
from rlinf.config.downloads import with_downloads
from rlinf.config.load import load_suite_eval, load_suite_eval_for_resume
from rlinf.config.overrides import parse_overrides, refuse_misspelt_options
from rlinf.config.suites import SuiteEvalConfig
from rlinf.config.yaml_source import read_file
from rlinf.errors import UserError
from rlinf.run_folder.lock import check_empty

OPTIONS = ("--suite", "--compare", "--output", "--resume", "--traceback", "--help")


def is_meant(args: argparse.Namespace) -> bool:
    """Returns whether the command line names a suite or resumes a suite evaluation."""
    if args.suite is not None or not args.resume or args.output is None:
        return args.suite is not None
    file = args.output / "config.yaml"
    return file.is_file() and "suite" in read_file(file).values


def run(args: argparse.Namespace) -> int:
    refuse_misspelt_options(args.overrides, OPTIONS, set(SuiteEvalConfig.model_fields), "rlinf eval")
    overrides = parse_overrides(args.overrides)
    if args.resume:
        if args.suite is not None or args.benchmarks:
            raise UserError("a resumed evaluation has its suite and its checkpoint already", hint="leave them out")
        config = load_suite_eval_for_resume(args.output, overrides)
    else:
        if len(args.benchmarks) != 1:
            raise UserError(
                f"--suite {args.suite}: give one run's folder, one of its checkpoints, or a recipe",
                hint=f"for example: rlinf eval --suite {args.suite} runs/NAME",
            )
        from rlinf.playing.checkpoint import named_checkpoint

        (place,) = args.benchmarks
        config = load_suite_eval(place, named_checkpoint(place, None), args.suite, overrides)
    path = args.output or new_folder(f"eval-{config.suite.name}-{config.name}")
    if not args.resume:
        check_empty(path)
    return _evaluate(config, path, resume=args.resume, command=["rlinf", *args.arguments])


def _evaluate(config: SuiteEvalConfig, path: Path, *, resume: bool, command: list[str]) -> int:
    check_address_space()
    from rlinf.jobs.checks import check_trained_references

    config = with_downloads(config)
    check_trained_references(config)
    from rlinf.cli.table import aligned
    from rlinf.console.live_line import LiveLine

    line = LiveLine()
    with line.doing("loading torch, then checking the policy, the environments and the devices"):
        from rlinf.playing import suite_run  # imports torch
        from rlinf.playing.suite_scores import COLUMNS, rows

        prepared: Any = suite_run.prepare(config, path)
    with resumable_evaluation(path), line.doing(f"playing {config.suite.num_episodes} episodes of each variant"):
        scores = prepared.run(path, resume=resume, command=command, message=line.message)
    print(f"\n{aligned([COLUMNS, *rows(scores)])}\n\nresult: {path / 'result.json'}\npage: {path / suite_run.PAGE}")
    return 0
