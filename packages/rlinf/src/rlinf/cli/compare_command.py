"""`rlinf compare RUN...`: compares runs, finished or under way."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlinf.cli.main import OLD_NAMES
from rlinf.cli.output_folder import cannot_write
from rlinf.cli.table import aligned
from rlinf.errors import UserError

MAX_DIFFERENCES = 20
"""Keys that are printed; the page has all."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        aliases=[OLD_NAMES["compare"]],
        help="compare runs, finished or under way",
        description="Shows the score of each run before and after training, its steps and times, and the keys of their "
        "configs that differ. For runs whose configs differ in the seed alone it shows the mean of their last scores "
        "with the 95 %% interval of Student's t.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the curves into FILE, whose name ends in .html or .png"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rlinf.report.compare import COLUMNS, compare, write_comparison

    if args.output is not None and args.output.suffix not in (".html", ".png"):
        raise UserError(f"--output={args.output}: its name has to end in .html (a page) or .png (a picture)")
    comparison = compare(args.runs)
    print(aligned([COLUMNS, *(run.row() for run in comparison.runs)]))
    for group in comparison.groups:
        print(f"\n{group.describe()} (95 % interval)")
    if rows := comparison.difference_rows:
        print(f"\n{aligned([('key', *(run.label for run in comparison.runs)), *rows[:MAX_DIFFERENCES]])}")
        if len(rows) > MAX_DIFFERENCES:
            print(f"and {len(rows) - MAX_DIFFERENCES} more keys that differ")
    if args.output is None:
        print("\nfor a page with the curves, add --output compare.html; for a picture, compare.png")
        return 0
    try:
        write_comparison(comparison, args.output)
    except OSError as error:
        raise cannot_write(args.output, error) from error
    print(f"\ncurves: {args.output}")
    return 0
