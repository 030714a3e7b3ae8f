"""Reads rows of data files of all formats, each with its place.

    .jsonl .json     an object a line; a .json file may be one array of objects
    .csv             a header, then a row a line (GPQA is published so)
    .parquet         needs pyarrow
    a folder         a Hugging Face dataset as `Dataset.save_to_disk` writes it; needs datasets

An unreadable row is returned as a `BadRow`, and the caller decides; an unreadable file is an error.
"""

from __future__ import annotations

import csv
import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.errors import UserError

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
MAX_CELL = (1 << 31) - 1
"""Maximum characters of a CSV cell, the limit of Python's reader; tests of programs are long."""
NEEDS_EXTRA = "install it with `pip install 'rlinf[data]'`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row, unchanged."""

    number: int
    """Row number in the file, from 1, without blank lines."""
    place: str
    """`file.jsonl:12` (the line) or `file.parquet, row 12`."""
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that is not a valid problem."""

    number: int
    place: str
    what: str
    """What is wrong with it and what is expected."""

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


def read_rows(path: Path) -> Iterator[Row | BadRow]:
    """Yields the rows of a file or a dataset folder.

    Raises: UserError for a file that is missing, unreadable or of another format, and for a missing package, with the
        extra to install.
    """
    try:
        if path.is_dir():
            yield from _dataset_rows(path)
        elif path.suffix == ".parquet":
            yield from _parquet_rows(path)
        elif path.suffix == ".csv":
            yield from _csv_rows(path)
        elif path.suffix in FORMATS:
            yield from _json_rows(path)
        elif not path.exists():
            raise UserError(f"{path}: No such file or directory", hint="check the path of the data file")
        else:
            raise UserError(
                f"{path}: {path.suffix or 'a file without an ending'} is no known format of data",
                hint=f"use one of {', '.join(FORMATS)}, or a folder that Dataset.save_to_disk wrote",
            )
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", hint="check the path of the data file") from error


def listed(names: Any) -> str:
    """Lists names as `'a', 'b'`, or `nothing`."""
    return ", ".join(map(repr, names)) or "nothing"


# -- text ----------------------------------------------------------------------------------------------------------


def _json_rows(path: Path) -> Iterator[Row | BadRow]:
    with path.open("rb") as file:
        head = file.read(1 << 12)
    try:
        is_array = path.suffix == ".json" and head.decode(_encoding(head), "ignore").lstrip()[:1] == "["
        if is_array:
            yield from _array_rows(path, _encoding(head))
            return
        lines = ((number, line) for number, line in enumerate(_lines(path, _encoding(head)), start=1) if line.strip())
        for number, (line_number, line) in enumerate(lines, start=1):
            yield _json_row(line.rstrip(b"\r\n"), number, f"{path}:{line_number}")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not {error.encoding} text: {error.reason} at byte {error.start}") from error


def _encoding(head: bytes) -> str:
    """Returns the encoding by the byte order mark that Windows editors write."""
    return "utf-16" if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig"


def _lines(path: Path, encoding: str) -> Iterator[bytes]:
    """Yields lines in UTF-8 without byte order marks, which concatenated files have in the middle, too."""
    if encoding == "utf-16":
        with path.open(encoding=encoding) as text:
            yield from (line.removeprefix("\ufeff").encode() for line in text)
        return
    with path.open("rb") as file:
        yield from (line.removeprefix(BOM_UTF8) for line in file)


def _json_row(line: bytes, number: int, place: str) -> Row | BadRow:
    try:
        values = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        return BadRow(number=number, place=place, what=f"not UTF-8 text: {error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        begin = line[:60].decode("utf-8", "replace")
        return BadRow(number=number, place=place, what=f"not a JSON object ({error}); the line begins {begin!r}")
    return _checked(values, number, place)


def _array_rows(path: Path, encoding: str) -> Iterator[Row | BadRow]:
    try:
        values = json.loads(path.read_text(encoding=encoding), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: begins like a JSON array and is none: {error}") from error
    for number, value in enumerate(values, start=1):
        yield _checked(value, number, f"{path}, row {number}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises: ValueError for a duplicate key, of which json would silently use the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return values


def _checked(values: Any, number: int, place: str) -> Row | BadRow:
    if not isinstance(values, dict):
        return BadRow(number=number, place=place, what=f"must be a JSON object, is a {type(values).__name__}")
    return Row(number=number, place=place, values=values)


def _csv_rows(path: Path) -> Iterator[Row | BadRow]:
    csv.field_size_limit(MAX_CELL)
    with path.open("rb") as file:
        encoding = _encoding(file.read(2))
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
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not readable as CSV in {encoding.upper()[:6].rstrip('-')}: {error}") from error


def _check_header(path: Path, header: list[str]) -> None:
    """Raises: UserError for duplicate column names, and for a file with another separator."""
    if twice := [name for name in header if name and header.count(name) > 1]:
        raise UserError(f"{path}: the header has the column {twice[0]!r} twice", hint="rename or remove one of them")
    separator = next((other for other in (";", "\t") if len(header) == 1 and other in header[0]), None)
    if separator is not None:
        raise UserError(
            f"{path}: its cells are separated by {separator!r}; CSV has a comma there", hint="save it with commas"
        )


# -- tables --------------------------------------------------------------------------------------------------------


def _parquet_rows(path: Path) -> Iterator[Row | BadRow]:
    if not path.exists():
        raise FileNotFoundError(2, "No such file or directory")
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(f"{path}: reading parquet needs the package pyarrow", hint=NEEDS_EXTRA) from error
    try:
        number = 0
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number=number, place=f"{path}, row {number}", values=values)
    except ArrowException as error:
        raise UserError(f"{path}: not readable as parquet: {str(error).splitlines()[0]}") from error


def _dataset_rows(path: Path) -> Iterator[Row | BadRow]:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if (entry / "dataset_info.json").is_file())
        raise UserError(
            f"{path}: holds a dataset for each of several splits ({listed(splits)})",
            hint=f"name one of them, for example {path / (splits[-1] if splits else 'test')}",
        )
    if not (path / "dataset_info.json").is_file():
        files = sorted(entry.name for entry in path.iterdir() if entry.suffix in FORMATS)
        raise UserError(
            f"{path}: not a dataset that Dataset.save_to_disk wrote; the folder has no dataset_info.json",
            hint=f"name a file in it, for example {path / files[0]}" if files else "name a file",
        )
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise UserError(f"{path}: reading it needs the package datasets", hint=NEEDS_EXTRA) from error
    try:
        rows: Any = load_from_disk(str(path))
    except Exception as error:  # a damaged folder makes the library raise various errors
        raise UserError(f"{path}: datasets cannot load it: {type(error).__name__}: {error}") from error
    for number, values in enumerate(rows, start=1):
        yield Row(number=number, place=f"{path}, row {number}", values=values)
