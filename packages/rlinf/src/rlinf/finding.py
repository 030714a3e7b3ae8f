"""Result of checking a machine or a venv."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    subject: str
    verdict: Verdict
    """`note`: works with a limitation. `problem`: runs will fail or be much slower than necessary."""
    text: str
    hint: str = ""
    """How to fix it."""
