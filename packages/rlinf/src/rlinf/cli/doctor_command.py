"""`rlinf doctor`: what this machine has, what works, what to do about the rest."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
WIDTH = 110


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="what this machine has and what of it works",
        description="Looks at this machine and tries what runs need. Exits with 1 if there is a problem.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--output", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs would go")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rlinf.doctor import as_record, examine

    findings = []
    for finding in examine(args.output):
        findings.append(finding)
        if not args.json:
            print(_lines(finding.subject, MARKS[finding.verdict], finding.text, finding.hint), flush=True)
    if args.json:
        print(json.dumps([as_record(finding) for finding in findings], indent=1, ensure_ascii=False))
    num_problems = sum(finding.verdict == "problem" for finding in findings)
    if not args.json:
        print(f"\n{num_problems or 'no'} problem{'' if num_problems == 1 else 's'} found")
    return 1 if num_problems else 0


def _lines(subject: str, mark: str, text: str, hint: str) -> str:
    indent = " " * 38
    parts = [text, f"-> {hint}"] if hint else [text]
    lines = [
        line
        for part in parts
        for line in textwrap.wrap(part, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    ]
    return f"{mark:<9}{subject:<29}" + f"\n{indent}".join(lines)
