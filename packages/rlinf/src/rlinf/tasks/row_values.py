"""Values of a row: which column has what, and what it may hold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from rlinf.tasks.rows import listed

_CHAT_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")


class RowError(ValueError):
    """An invalid row; `load_problems` adds the place."""


class ColumnError(RowError):
    """A row without a column that is needed."""


def column_of(
    values: Mapping[str, Any], name: str | None, usual: Sequence[str], *, is_needed: bool = True
) -> str | None:
    """Returns the name of a row's column: `name`, or where it is None the first of the usual ones that the row has.

    Raises: RowError where it is needed and absent.
    """
    if name is not None:
        if value_at(values, name) is not ABSENT:
            return name
        if not is_needed:
            return None
        raise ColumnError(f"no field {name!r}; the row has {listed(sorted(map(str, values)))}")
    names = {str(column).casefold(): str(column) for column in reversed(list(values))}
    candidates = [names.get(one, one) for one in usual]
    present = [one for one in candidates if value_at(values, one) is not ABSENT]
    present = [one for one in present if value_at(values, one) is not None] or present
    if is_needed and not present:
        raise ColumnError(absent(values, usual))
    return present[0] if present else None


def absent(values: Mapping[str, Any], usual: Sequence[str]) -> str:
    """Says that a row has none of the usual columns."""
    return f"no field {usual[0]!r} or another usual name of it; the row has {listed(sorted(map(str, values)))}"


def text_of(values: Mapping[str, Any], name: str) -> str:
    """Returns a value as non-empty text.

    Raises: RowError for anything but text and finite numbers.
    """
    value = value_at(values, name)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"field {name!r} must be text or a number, is {json.dumps(value, default=str)[:60]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"field {name!r} is {value}, no finite number")
    text = str(value)
    if not text.strip():
        raise RowError(f"field {name!r} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"field {name!r} holds {text[error.start]!r}, which is half of a character") from None
    return text


def prompt_of(values: Mapping[str, Any], name: str) -> str:
    """As `text_of`, for a prompt, which may not be the text of a chat.

    Raises: RowError.
    """
    text = text_of(values, name)
    if _CHAT_TEXT.match(text):
        raise RowError(
            f"field {name!r} holds a chat as text, which would be a prompt as it stands; save the rows as JSON lines "
            "or parquet, which keep lists, or turn the text into a list"
        )
    return text


ABSENT = object()


def value_at(values: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a column, or of `outer.inner`; `ABSENT` if the row has none."""
    if name in values:
        return values[name]
    outer, dot, inner = name.partition(".")
    below = values.get(outer) if dot else None
    return value_at(below, inner) if isinstance(below, Mapping) else ABSENT


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Returns whether a value is a list, as chats and parts of turns are, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
