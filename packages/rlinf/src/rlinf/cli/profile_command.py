"""`rlinf profile RECIPE`: measures the stages of a recipe on this machine and writes a problem file."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.cli.table import aligned
from rlinf.config.downloads import with_downloads
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import Override, parse_overrides
from rlinf.console.live_line import LiveLine
from rlinf.errors import UserError
from rlinf.jobs.checks import run_checks
from rlinf.machine_load import LoadMeter, OtherLoad

if TYPE_CHECKING:
    from rlinf_sched import Problem
    from rlinf_workers import Measured

MAX_SPREAD = 0.2
"""Relative median deviation of repeats from their median above which a time counts as disturbed."""
MODE = Override(key=("mode",), text="auto")


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "profile",
        help="measure a recipe's stages on this machine",
        description="Runs a recipe's first steps, with workers on all devices and then on separate ones, at several "
        "granularities, and fits the times of its stages. The file is input for rlinf plan FILE --what-if and "
        "rlinf train RECIPE --plan.profile FILE.",
    )
    parser.add_argument("recipe", help="name of a shipped recipe, or path of a YAML file; with overrides as in train")
    parser.add_argument("--output", type=Path, metavar="FILE", help="problem file (default: <name>-profile.json)")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    overrides = parse_overrides(args.overrides)
    config = load_config(args.recipe, [*overrides, MODE])
    output = args.output or Path(f"{config.name}-profile.json")
    if output.suffix != ".json":
        raise UserError(f"--output={output}: a profile is a JSON file; let its name end in .json")
    if not output.parent.is_dir():
        raise UserError(f"--output={output}: there is no folder {output.parent}", hint="make it, or choose another")

    config = with_downloads(config)
    run_checks("config", config)
    with LiveLine().doing("loading torch, then checking the model, the data and the devices"):
        from rlinf import jobs  # imports torch
        from rlinf.run_folder import RunFolder

        job = jobs.prepare(config)
    with tempfile.TemporaryDirectory(prefix="rlinf-profile-") as scratch:
        folder = RunFolder(
            Path(scratch) / "run",
            config_yaml=to_yaml(job.config),
            command=["rlinf", *args.arguments],
            keep_checkpoints=1,
        )
        with folder, LoadMeter() as meter:
            measured = jobs.measure(job, folder)
    notes = disturbances(measured, meter.load)
    output.write_text(with_notes(measured.problem, notes).to_json(), encoding="utf-8")
    print(f"\n{profile_table(measured)}\nprofile: {output}")
    for note in notes:
        print(f"note: {note}")
    return 0


def disturbances(measured: Measured, load: OtherLoad | None) -> list[str]:
    """Returns the reasons why times may differ from those on an idle machine."""
    notes = [load.note] if load is not None and load.note is not None else []
    for (stage, num_ranks), fit in measured.fits.items():
        if fit.spread > MAX_SPREAD:
            notes.append(
                f"repeats of {stage} on {num_ranks} rank{'s' if num_ranks > 1 else ''} differ by {fit.spread:.0%} from "
                "their median, so something disturbed them; measure again when the machine is quiet"
            )
    return notes


def with_notes(problem: Problem, notes: Sequence[str]) -> Problem:
    """Returns the problem with the notes added to the source of each stage's times, which plans show."""
    if not notes:
        return problem
    stages = {
        name: replace(profile, source="; ".join([profile.source, *notes]))
        for name, profile in problem.profiles.stages.items()
    }
    return replace(problem, profiles=replace(problem.profiles, stages=stages))


def profile_table(measured: Measured) -> str:
    """Returns a table of fitted times and errors, with a row per stage, number of ranks and size."""
    rows = [("stage", "ranks", "items", "seconds", "after the last", "steps", "spread", "left-out size")]
    for (stage, num_ranks), fit in measured.fits.items():
        times = [(str(point.num_items), f"{point.seconds:.4f}") for point in fit.points]
        left_out = "-" if fit.left_out is None else f"{fit.left_out:.1%}"
        errors = (f"{fit.step_s:.4f}", str(fit.num_samples), f"{fit.spread:.1%}", left_out)
        rows.append((stage, str(num_ranks), *times[0], *errors))
        rows += [("", "", *time, "", "", "", "") for time in times[1:]]
    return aligned(rows)
