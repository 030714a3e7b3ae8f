"""Prints findings on the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rlinf.cli.table import text_width
from rlinf.finding import Finding

MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def print_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Prints each finding when it arrives; returns all of them."""
    seen = []
    for finding in findings:
        seen.append(finding)
        print(finding_lines(finding), flush=True)
    return seen


def finding_lines(finding: Finding) -> str:
    """Returns a finding as wrapped text, with its hint below."""
    indent = " " * 38
    room = max(30, text_width() - len(indent))
    lines = []
    for part in [finding.text, f"-> {finding.hint}"] if finding.hint else [finding.text]:
        lines += textwrap.wrap(part, room, break_long_words=False, break_on_hyphens=False)
    return f"{MARKS[finding.verdict]:<9}{finding.subject:<29}" + f"\n{indent}".join(lines)
