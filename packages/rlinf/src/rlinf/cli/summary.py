"""`rlinf summary RUN...`: compares finished runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlinf.cli.table import aligned
from rlinf.errors import UserError
from rlinf.run_folder.plain_files import read_plain_json

HINT = "a finished run writes it whole; was it edited?"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "summary",
        help="compare finished runs",
        description="Shows the score of each run before and after training, its steps and times, and its page.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = [("run", "score", "before", "after", "steps", "time", "compute by stage, all ranks")]
    rows += [_row(path) for path in args.runs]
    print(aligned(rows))
    for path in args.runs:
        print(f"report: {path / 'report.html'}")
    return 0


def _row(path: Path) -> tuple[str, ...]:
    file = path / "result.json"
    if not file.is_file():
        what = "holds no result.json" if path.is_dir() else "is not a folder"
        raise UserError(f"{path} {what}", hint="give the folders of runs that have finished")
    try:
        return _cells(path.name, read_plain_json(file))
    except UserError:
        raise  # a ValueError, too
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}", hint=HINT) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: not what a run writes: {error!r}", hint=HINT) from error


def _cells(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    stages = sorted(result["stage_seconds"].items(), key=lambda item: -item[1])
    return (
        name,
        str(result["score"]),
        _show(result["before"], result["score_is_share"]),
        _show(result["after"], result["score_is_share"]),
        str(result["num_steps"]),
        f"{result['training_s']:.0f} s",
        ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in stages),
    )


def _show(value: float | None, is_share: bool) -> str:
    """Formats a value; None means that it was not finite."""
    return "-" if value is None else f"{value:.1%}" if is_share else f"{value:.2f}"
