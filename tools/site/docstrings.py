"""Extension of griffe: reads the docstrings of this project, which write some sections in one line."""

from __future__ import annotations

import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]

_TITLE = re.compile(r"^(Raises|Returns|Yields|Example|Examples|Note): (?=\S)", re.MULTILINE)
_CODE = re.compile(r"^(\*\*Example:\*\* .*:)\n(?= )", re.MULTILINE)
_RAISES = re.compile(r"(?<=^Raises:\n)(?: {4}.*\n?)+", re.MULTILINE)


class SectionsInOneLine(griffe.Extension):
    """Converts two forms that griffe does not read.

    `Raises: ValueError if ...` becomes a paragraph. In a section `Raises:`, a line that names no exception is indented
    as the continuation of the line above.
    """

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _TITLE.sub(r"**\1:** ", obj.docstring.value)
            text = _CODE.sub(r"\1\n\n", text)
            obj.docstring.value = _RAISES.sub(_with_continuations, text)


def _with_continuations(block: re.Match[str]) -> str:
    return re.sub(r"^ {4}(?=\S)(?![\w.]+(?:, [\w.]+)*: )", " " * 8, block[0], flags=re.MULTILINE)
