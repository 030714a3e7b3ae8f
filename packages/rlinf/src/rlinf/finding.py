"""What a look at the machine or at an environment found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    verdict: Verdict
    """`note`: works, but a user should know. `problem`: runs will fail or be much slower than they need be."""
    text: str
    hint: str = ""
    """What to do about it."""
