"""The rows of data files, good and bad."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row, unchanged."""

    number: int
    """Row number in the file, from 1, without blank lines."""
    place: str
    """`file.jsonl:12` (the line) or `file.parquet, row 12`."""
    values: Mapping[str, Any]
    folder: Path = Path()
    """What paths in the row are relative to: the folder of its file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that is not a valid problem."""

    number: int
    place: str
    what: str
    """What is wrong with it and what is expected."""

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


def listed(names: Iterable[object]) -> str:
    """Lists names as `'a', 'b'`, or `nothing`."""
    return ", ".join(map(repr, names)) or "nothing"
