"""`rlinf eval --compare A B`: two robot policies, or two finished evaluations, on the same starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlinf.address_space import check_address_space
from rlinf.cli.output_folder import new_folder, resumable_evaluation
from rlinf.config.comparison import ComparisonConfig
from rlinf.config.downloads import with_downloads
from rlinf.config.load import load_comparison, load_comparison_for_resume
from rlinf.config.overrides import Override, parse_overrides, refuse_misspelt_options
from rlinf.config.playing import TrainedConfig
from rlinf.config.protocols import chosen_protocol
from rlinf.config.yaml_source import read_file
from rlinf.errors import UserError
from rlinf.run_folder.lock import check_empty

OPTIONS = ("--compare", "--protocol", "--output", "--resume", "--force", "--traceback", "--help")


def is_meant(args: argparse.Namespace) -> bool:
    """Returns whether the command line names two policies or resumes their comparison."""
    if args.compare is not None or not args.resume or args.output is None:
        return args.compare is not None
    file = args.output / "config.yaml"
    return file.is_file() and "compare" in read_file(file).values


def run(args: argparse.Namespace) -> int:
    if args.benchmarks:
        raise UserError(f"{args.benchmarks[0]!r}: --compare takes two runs, checkpoints, recipes or result folders")
    if args.resume:
        return _resume(args)
    paths = [Path(text) for text in args.compare]
    from rlinf.playing.finished import is_finished

    finished = [is_finished(path) for path in paths]
    if any(finished):
        if not all(finished):
            raise UserError(
                f"--compare {paths[0]} {paths[1]}: one is the folder of a finished evaluation, the other is not",
                hint="give two folders that rlinf play wrote, or two runs, checkpoints or recipes",
            )
        return _compare_finished(args, paths)
    keys = {*TrainedConfig.model_fields, *ComparisonConfig.model_fields}
    refuse_misspelt_options(args.overrides, OPTIONS, keys, "rlinf eval")
    overrides = parse_overrides(args.overrides)
    from rlinf.playing.checkpoint import named_checkpoint

    notes: list[str] = []

    def preset(config: TrainedConfig) -> list[Override]:
        if args.protocol is None:
            return []
        chosen = chosen_protocol(args.protocol, config)
        notes[:] = [chosen.note]
        counts = {"num_episodes": chosen.num_episodes, "first_seed": chosen.first_seed}
        return [
            *chosen.overrides,
            *(Override(key=("compare", name), text=str(value)) for name, value in counts.items()),
        ]

    policies = [(place, named_checkpoint(place, None)) for place in args.compare]
    config = load_comparison(policies, overrides, preset)
    config = config.with_notes([*config.notes, *notes])
    if args.force:
        config = config.model_copy(update={"compare": config.compare.model_copy(update={"force": True})})
    path = args.output or new_folder(f"compare-{config.a.name}-{config.b.name}")
    check_empty(path)
    return _compare(config, path, resume=False, command=["rlinf", *args.arguments])


def _resume(args: argparse.Namespace) -> int:
    if args.compare is not None or args.force or args.protocol or args.overrides:
        raise UserError("a resumed comparison has its policies and settings already", hint="leave them out")
    return _compare(
        load_comparison_for_resume(args.output), args.output, resume=True, command=["rlinf", *args.arguments]
    )


def _compare(config: ComparisonConfig, path: Path, *, resume: bool, command: list[str]) -> int:
    check_address_space()
    from rlinf.jobs.checks import check_trained_references

    sides = {side: with_downloads(getattr(config, side)) for side in ("a", "b")}
    for side in sides.values():
        check_trained_references(side)
    config = config.model_copy(update=sides)
    from rlinf.console.live_line import LiveLine

    line = LiveLine()
    with line.doing("loading torch, then checking the policies, the environments and the devices"):
        from rlinf.playing import comparison_run  # imports torch

        prepared: Any = comparison_run.prepare(config, path)
    with resumable_evaluation(path), line.doing(f"playing {config.compare.num_episodes} episodes with each policy"):
        score = prepared.run(path, resume=resume, command=command, message=line.message)
    return _print(score, prepared.names, path)


def _compare_finished(args: argparse.Namespace, paths: list[Path]) -> int:
    if args.overrides:
        raise UserError(f"{args.overrides[0]}: finished evaluations have their settings already", hint="leave it out")
    from rlinf.playing import finished

    evaluations = [finished.read_finished(path) for path in paths]
    path = args.output or new_folder("compare")
    check_empty(path, can_resume=False)
    with resumable_evaluation(path):
        score = finished.compare(evaluations, path, force=args.force, command=["rlinf", *args.arguments])
    return _print(score, [str(one) for one in paths], path)


def _print(score: Any, names: Any, path: Path) -> int:
    from rlinf.cli.table import aligned
    from rlinf.playing.comparison_scores import FLIP_COLUMNS, TASK_COLUMNS, flip_rows, summary_lines, task_rows

    if rows := task_rows(score):
        print(f"\n{aligned([TASK_COLUMNS, *rows])}")
    if rows := flip_rows(score):
        print(f"\n{aligned([FLIP_COLUMNS, *rows[:MAX_FLIPS]])}")
        if len(rows) > MAX_FLIPS:
            print(f"and {len(rows) - MAX_FLIPS} more starts that differ; result.json has all")
    print("\n" + "\n".join(summary_lines(score, names)))
    print(f"\nresult: {path / 'result.json'}\npage: {path / 'compare.html'}")
    return 0


MAX_FLIPS = 12
"""Flipped starts that are printed."""
