"""Reads rows of data files of all formats, each with its place.

    .jsonl .json     an object a line; a .json file may be one array of objects
    .csv             a header, then a row a line (GPQA is published so)
    .parquet         needs pyarrow
    .arrow           needs datasets
    a folder         as `Dataset.save_to_disk` writes it, or with data files; needs datasets
    a name           a data set on the Hugging Face Hub, ORG/NAME[@REVISION][:SUBSET][[SPLIT]]; needs datasets
    a pattern        every file that matches, `data/train-*.parquet`, in the order of their names

An unreadable row is returned as a `BadRow`, and the caller decides; an unreadable file is an error.
"""

from __future__ import annotations

import csv
import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.hub import ROW_FORMATS as FORMATS, fetch_dataset, hub_name

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
    """Yields the rows of a file, a folder, a data set on the Hub, or all files that match a pattern.

    Raises: UserError for what is missing, unreadable or of another format, and for a missing package, with the extra to
        install.
    """
    name = hub_name(path)
    if name is not None:
        yield from _published_rows(fetch_dataset(name, key=""), path, name.subset, name.split)
        return
    for file in matching(path):
        try:
            yield from _file_rows(file)
        except OSError as error:
            raise UserError(f"{file}: {error.strerror or error}", hint="check the path of the data file") from error


def matching(path: Path) -> list[Path]:
    """Returns the files that match a pattern; a path without one stands for itself, whether it exists or not."""
    if path.exists() or not any(sign in str(path) for sign in "*?["):
        return [path]
    files = sorted(Path(file) for file in glob(str(path), recursive=True))
    if not files:
        raise UserError(f"{path}: no file matches", hint="check the pattern of the data files")
    return files


def _file_rows(path: Path) -> Iterator[Row | BadRow]:
    if path.is_dir():
        if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
            yield from _dataset_rows(path)
        elif (path / "config.json").is_file() or not any(entry.suffix in FORMATS for entry in path.rglob("*")):
            what = "a model, no data" if (path / "config.json").is_file() else "no data file"
            raise UserError(f"{path}: the folder holds {what}", hint=f"name a folder with {', '.join(FORMATS)} files")
        else:
            yield from _published_rows(path, path, None, None)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".arrow":
        yield from _arrow_rows(path)
    elif path.suffix == ".csv":
        yield from _csv_rows(path)
    elif path.suffix in FORMATS:
        yield from _json_rows(path)
    elif not path.exists():
        raise UserError(f"{path}: No such file or directory", hint="check the path of the data file")
    else:
        raise UserError(
            f"{path}: {path.suffix or 'a file without an ending'} is no known format of data",
            hint=f"use one of {', '.join(FORMATS)}, a folder with such files, or the name of a data set on the Hub",
        )


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


def _arrow_rows(path: Path) -> Iterator[Row | BadRow]:
    if not path.exists():
        raise FileNotFoundError(2, "No such file or directory")
    rows = _loaded(path, lambda datasets: datasets.Dataset.from_file(str(path)))
    yield from _numbered(rows, path)


def _dataset_rows(path: Path) -> Iterator[Row | BadRow]:
    """Rows of a folder that `Dataset.save_to_disk` wrote."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if (entry / "dataset_info.json").is_file())
        raise UserError(
            f"{path}: holds a dataset for each of several splits ({listed(splits)})",
            hint=f"name one of them, for example {path / (splits[-1] if splits else 'test')}",
        )
    yield from _numbered(_loaded(path, lambda datasets: datasets.load_from_disk(str(path))), path)


def _published_rows(folder: Path, path: Path, subset: str | None, split: str | None) -> Iterator[Row | BadRow]:
    """Rows of a folder laid out as data sets on the Hub are: its card or the names of its files tell the splits.

    Args:
        path: what the user wrote, for messages.
    """
    loaded = _loaded(path, lambda datasets: datasets.load_dataset(str(folder), subset, split=split))
    if isinstance(loaded, dict):
        if len(loaded) > 1:
            files = sorted(entry.name for entry in folder.rglob("*") if entry.suffix in FORMATS)
            example = f"{path}[{next(iter(loaded))}]" if hub_name(path) else folder / (files or ["FILE"])[0]
            raise UserError(
                f"{path}: holds several splits: {', '.join(loaded)}", hint=f"name one of them, for example {example}"
            )
        loaded = next(iter(loaded.values()))
    yield from _numbered(loaded, path)


def _loaded(path: Path, load: Callable[[Any], Any]) -> Any:
    """Calls a function of the `datasets` library, with its errors as UserError."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{path}: reading it needs the package datasets", hint=NEEDS_EXTRA) from error
    datasets.disable_progress_bars()
    try:
        return load(datasets)
    except Exception as error:  # a damaged file makes the library raise various errors, in turn caused by others
        cause = error.__cause__ or error
        text = " ".join(str(cause).split())[:300]
        raise UserError(f"{path}: datasets cannot load it: {type(cause).__name__}: {text}") from error


def _numbered(rows: Iterable[Mapping[str, Any]], path: Path) -> Iterator[Row | BadRow]:
    for number, values in enumerate(rows, start=1):
        yield Row(number=number, place=f"{path}, row {number}", values=values)
