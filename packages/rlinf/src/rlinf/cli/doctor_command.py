"""`rlinf doctor`: what this machine has, what works, what to do about the rest."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf import doctor
from rlinf.doctor import Finding

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
    findings = []
    for finding in doctor.examine(args.output):
        findings.append(finding)
        if not args.json:
            print(_lines(finding), flush=True)
    num_problems = sum(finding.verdict == "problem" for finding in findings)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False))
    else:
        print(f"\n{num_problems or 'no'} problem{'' if num_problems == 1 else 's'} found")
    return 1 if num_problems else 0


def _lines(finding: Finding) -> str:
    indent = " " * 38
    lines = []
    for part in [finding.text, f"-> {finding.hint}"] if finding.hint else [finding.text]:
        lines += textwrap.wrap(part, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return f"{MARKS[finding.verdict]:<9}{finding.subject:<29}" + f"\n{indent}".join(lines)
