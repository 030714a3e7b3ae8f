"""The parts of what `rlinf data` prints: columns, lengths, texts."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlinf.cli.table import aligned, text_width
from rlinf_workers import printable

T = TypeVar("T")

NO_MODEL = "."
"""Stands for the model where none is named; `model.path` may not be empty."""
MAX_CHARACTERS = 1200
"""Of a row on the screen."""
NUM_BARS, BAR_WIDTH = 8, 40


def is_model(path: Path | None) -> bool:
    """Whether a model was named."""
    return path != Path(NO_MODEL).absolute()


def columns_table(values: Mapping[str, Any], uses: Mapping[str, str | None]) -> str:
    """Returns the columns of a row with their types and values.

    Args:
        uses: what is used -> its column, `outer.inner` for one inside another.
    """
    rows = [("column", "type", "used as", "first row")]
    for name, value in values.items():
        use = " and ".join(what for what, column in uses.items() if column and name == _outer(column, values))
        rows.append((str(name), _type(value), use, textwrap.shorten(str(value), 40, placeholder=" ...")))
    return aligned(rows)


def _outer(column: str, values: Mapping[str, Any]) -> str:
    return column if column in values else column.partition(".")[0]


def _type(value: Any) -> str:
    if isinstance(value, list):
        return f"list of {len(value)}"
    return {"str": "text", "int": "number", "float": "number", "dict": "object"}.get(
        type(value).__name__, type(value).__name__
    )


def histogram(lengths: Sequence[int]) -> Iterator[str]:
    """Yields bars of equal width between the shortest and the longest."""
    low, width = min(lengths), max(1, -(-(max(lengths) - min(lengths) + 1) // NUM_BARS))
    counts = Counter((length - low) // width for length in lengths)
    scale, columns = max(counts.values()), min(BAR_WIDTH, text_width() - 40)
    for bar in range(max(counts) + 1):
        begin, count = low + bar * width, counts[bar]
        yield f"  {begin:>8,} to {begin + width - 1:>8,}  {count:>9,}  {'#' * -(-columns * count // scale)}"


def spread(items: Sequence[T], count: int) -> Sequence[T]:
    """Returns some of the items, at equal distances."""
    return items[:: max(1, len(items) // max(1, count))][:count]


def shortened(text: str) -> str:
    """Returns a text as it fits on a screen."""
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ... ({len(text):,} characters)"


def labelled(parts: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yields the lines of the parts of a text behind the labels of the parts; each part begins a line."""
    width = max(len(label) for label, _ in parts)
    for label, text in parts:
        for line in shortened(text).removesuffix("\n").split("\n"):
            yield f"{label:>{width}} | {printable(line)}".rstrip()
