"""Reads rows of JSON, JSON lines and CSV, each with its place."""

from __future__ import annotations

import csv
import json
import re
import shlex
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.tasks.file_content import encoding_of
from rlinf.tasks.rows import BadRow, Row

MAX_CELL = (1 << 31) - 1
"""Maximum characters of a CSV cell, the limit of Python's reader; tests of programs are long."""
SEPARATORS = (";", "\t", "|")
"""What stands between cells in files that are called CSV."""
MEANT = {
    "Extra data": "a line holds one object and nothing behind it",
    "Expecting property": "JSON needs double quotes",
}
"""Beginning of the parser's message -> what it usually means."""
_SPACE = re.compile(r"\s*")


# -- JSON ----------------------------------------------------------------------------------------------------------


def json_rows(path: Path) -> Iterator[Row | BadRow]:
    """Yields the rows of a file with an object a line, or of a .json file with one array of objects.

    Raises: UserError.
    """
    with path.open("rb") as file:
        head = file.read(1 << 12)
    encoding = encoding_of(head)
    if path.suffix.lower() == ".json" and head.decode(encoding, "ignore").lstrip()[:1] == "[":
        yield from _array_rows(path, encoding)
        return
    decoder = _ObjectDecoder()
    lines = ((number, line) for number, line in enumerate(_lines(path, encoding), start=1) if line.strip())
    for number, (line_number, line) in enumerate(lines, start=1):
        yield decoder.row(line.rstrip(b"\r\n"), number, f"{path}:{line_number}")


def _lines(path: Path, encoding: str) -> Iterator[bytes]:
    """Yields lines in UTF-8 without byte order marks, which concatenated files have in the middle, too."""
    if encoding == "utf-16":
        try:
            with path.open(encoding=encoding) as text:
                yield from (line.removeprefix("\ufeff").encode() for line in text)
        except UnicodeDecodeError as error:
            raise _not_text(path, encoding) from error
        return
    with path.open("rb") as file:
        yield from (line.removeprefix(BOM_UTF8) for line in file)


class _ObjectDecoder:
    """Decodes JSON objects. A key that an object has twice is an error; json would silently use its last value."""

    def __init__(self) -> None:
        self._json = json.JSONDecoder(object_pairs_hook=self._object)
        self._twice: str | None = None

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            self._twice = next(name for name in names if names.count(name) > 1)
        return values

    def decode(self, text: str, begin: int) -> tuple[Any, int]:
        """Returns the value at a place of a text, and where it ends. Raises: ValueError, RecursionError."""
        self._twice = None
        return self._json.raw_decode(text, begin)

    def row(self, line: bytes, number: int, place: str) -> Row | BadRow:
        """Returns the row of a line."""
        self._twice = None
        try:
            values = self._json.decode(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            what = f"not UTF-8 text: {error.reason} at byte {error.start}; save the file as UTF-8"
            return BadRow(number=number, place=place, what=what)
        except (ValueError, RecursionError) as error:
            meant = next((f"; {text}" for begin, text in MEANT.items() if str(error).startswith(begin)), "")
            begin = line[:60].decode("utf-8", "replace")
            what = f"not a JSON object ({error}){meant}; the line begins {begin!r}"
            return BadRow(number=number, place=place, what=what)
        return self.checked(values, number, place)

    def checked(self, values: Any, number: int, place: str) -> Row | BadRow:
        """Returns the row of the value that was decoded last."""
        if self._twice is not None:
            return BadRow(number=number, place=place, what=f"the key {self._twice!r} appears twice in one object")
        if not isinstance(values, dict):
            return BadRow(number=number, place=place, what=f"must be a JSON object, is a {type(values).__name__}")
        return Row(number=number, place=place, values=values)


def _array_rows(path: Path, encoding: str) -> Iterator[Row | BadRow]:
    try:
        text = path.read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        raise _not_text(path, encoding) from error
    decoder, number = _ObjectDecoder(), 0
    at = _behind_space(text, text.index("[") + 1)
    is_end = text[at : at + 1] == "]"
    while not is_end:
        number += 1
        try:
            values, at = decoder.decode(text, at)
            at = _behind_space(text, at)
            if text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("a comma or the end of the array is missing", text, at)
        except (ValueError, RecursionError) as error:
            raise _torn_array(path, text, number, error) from error
        yield decoder.checked(values, number, f"{path}, row {number}")
        is_end = text[at] == "]"
        if not is_end:
            at = _behind_space(text, at + 1)
    rest = _behind_space(text, at + 1)
    if rest < len(text):
        raise UserError(
            f"{path}: after the array of {number} rows stands {text[rest : rest + 20]!r}",
            hint="a .json file holds one array, or an object a line",
        )


def _behind_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None, "it matches nothing too"
    return match.end()


def _torn_array(path: Path, text: str, number: int, error: Exception) -> UserError:
    if not isinstance(error, json.JSONDecodeError):
        return UserError(f"{path}, row {number}: not JSON ({error})", hint="fix the file there")
    is_cut = error.pos >= len(text.rstrip()) or "Unterminated string" in error.msg
    hint = "the file seems to be cut off; download or write it again" if is_cut else "fix the file there"
    return UserError(
        f"{path}:{error.lineno}: row {number} is not JSON: {error.msg}, at column {error.colno}", hint=hint
    )


def _not_text(path: Path, encoding: str) -> UserError:
    """The error for a file with bytes of another encoding; names the first line with one."""
    command = f"iconv -f ISO-8859-1 -t UTF-8 {shlex.quote(path.name)} > NEW{path.suffix}"
    hint = f"save it as UTF-8; a file in a Western European encoding with {command}"
    if encoding == "utf-16":
        return UserError(f"{path}: not UTF-16 text, though it begins as such", hint="save it as UTF-8")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                what = f"{error.reason} at byte {error.start}, {line[error.start : error.start + 1]!r}"
                return UserError(f"{path}:{number}: not UTF-8 text: {what}", hint=hint)
    return UserError(f"{path}: not UTF-8 text", hint=hint)


# -- CSV -----------------------------------------------------------------------------------------------------------


def csv_rows(path: Path) -> Iterator[Row | BadRow]:
    """Yields the rows of a CSV file, whose first line names the columns.

    Raises: UserError.
    """
    csv.field_size_limit(MAX_CELL)
    with path.open("rb") as file:
        encoding = encoding_of(file.read(2))
    first_line = 1
    try:
        with path.open(encoding=encoding, newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next((cells for cells in reader if cells), None)
            if header is None:
                return
            _check_header(path, header)
            number, first_line = 0, reader.line_num + 1
            for cells in reader:
                place, first_line = f"{path}:{first_line}", reader.line_num + 1
                if not cells:
                    continue
                number += 1
                if len(cells) == len(header):
                    yield Row(number=number, place=place, values=dict(zip(header, cells, strict=True)))
                else:
                    what = f"has {len(cells)} cells, the header has {len(header)}"
                    yield BadRow(number=number, place=place, what=what)
    except UnicodeDecodeError as error:
        raise _not_text(path, encoding) from error
    except csv.Error as error:
        raise UserError(
            f"{path}:{first_line}: the row that begins here is not readable as CSV: {error}",
            hint='a cell with quotes stands in quotes, with each of them doubled: "a ""b"""',
        ) from error


def _check_header(path: Path, header: list[str]) -> None:
    """Raises: UserError for duplicate column names, and for a file with another separator."""
    if twice := [name for name in header if name and header.count(name) > 1]:
        raise UserError(f"{path}: the header has the column {twice[0]!r} twice", hint="rename or remove one of them")
    separator = next((other for other in SEPARATORS if len(header) == 1 and other in header[0]), None)
    if separator is not None:
        raise UserError(
            f"{path}: its cells are separated by {separator!r}; CSV has a comma there", hint="save it with commas"
        )
