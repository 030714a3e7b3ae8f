"""Tables on the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from rlinf_workers import printable

WIDE = 110
"""Text width if the output is not a terminal."""


def terminal_width() -> int | None:
    """Returns the width of the terminal in columns; None if the output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def text_width() -> int:
    """Returns the width at which text is wrapped."""
    return min(WIDE, terminal_width() or WIDE)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as aligned columns; the first row is the header. If the terminal is too narrow, each row becomes a
    block with a line per column."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    width = terminal_width()
    if width is None or len(rows) < 2 or max(map(len, lines)) <= width:
        return "\n".join(lines)
    head, *body = rows
    label = max(map(len, head))
    blocks = (
        "\n".join(f"{name:<{label}}  {cell}".rstrip() for name, cell in zip(head, row, strict=True)) for row in body
    )
    return "\n\n".join(blocks)


def hanging(name: str, text: str, column: int) -> str:
    """Returns a name followed by text that starts at a column and is wrapped with a hanging indent."""
    if terminal_width() is None:
        return f"{name:<{column}}{text}"
    indent = " " * column
    lines = textwrap.wrap(text, max(30, text_width() - column), break_long_words=False, break_on_hyphens=False) or [""]
    return f"{name:<{column}}" + f"\n{indent}".join(lines)


def wrapped(text: str, *, indent: int) -> list[str]:
    """Returns a text as indented lines; one line if the output is not a terminal."""
    space = " " * indent
    if terminal_width() is None:
        return [f"{space}{text}"] if text else []
    return textwrap.wrap(text, text_width(), initial_indent=space, subsequent_indent=space)
