"""`rlinf report RUN`: writes a run's report as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="write a run's report as one HTML page",
        description="Writes the report of a run, finished or not, as one self-contained HTML page.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the page (default: report.html in the run's folder)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rlinf.report import write_report

    print(write_report(args.run_folder, args.output))
    return 0
