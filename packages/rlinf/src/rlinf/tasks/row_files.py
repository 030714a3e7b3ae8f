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

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.hub import CARD, ROW_FORMATS as FORMATS, fetch_dataset, hub_name
from rlinf.tasks.file_content import UNPACK, check_content, unpack_hint
from rlinf.tasks.rows import BadRow, Row, listed
from rlinf.tasks.text_files import csv_rows, json_rows

NEEDS_EXTRA = "install it with `pip install 'rlinf[data]'`"
WRITE_AGAIN = "download or write it again"
PARQUET_BATCH = 1024
"""Rows that are read at once; rows with pictures are large."""
SIDE_FILES = ("dataset_infos.json", "dataset_info.json", "state.json")
"""Files of a folder that describe its data."""


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
        else:
            _check_folder(path)
            yield from _published_rows(path, path, None, None)
        return
    read = READERS.get(path.suffix.lower())
    if not path.exists():
        raise UserError(f"{path}: No such file or directory", hint="check the path of the data file")
    if read is None:
        usual = f"use one of {', '.join(FORMATS)}, a folder with such files, or the name of a data set on the Hub"
        raise UserError(
            f"{path}: {path.suffix or 'a file without an ending'} is no known format of data",
            hint=unpack_hint(path) or ENDINGS.get(path.suffix.lower(), usual),
        )
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty", hint=f"is it the right file? If so, {WRITE_AGAIN}")
    check_content(path)
    for row in read(path):
        yield row if isinstance(row, BadRow) else replace(row, folder=path.parent)


def _check_folder(path: Path) -> None:
    """Raises: UserError for a folder without data, and for one with files of which only some would be read."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")]
    data = [file for file in files if file.suffix in FORMATS and file.name not in SIDE_FILES]
    if (path / "config.json").is_file() or not data:
        what = "a model, no data" if (path / "config.json").is_file() else "no data file"
        packed = next((file for file in files if file.suffix in UNPACK), None)
        usual = f"name a folder with {', '.join(FORMATS)} files"
        hint = usual if packed is None else f"{unpack_hint(packed)}, in {packed.parent}"
        raise UserError(f"{path}: the folder holds {what}", hint=hint)
    endings = Counter(file.suffix.replace(".jsonl", ".json") for file in data)
    if len(endings) > 1 and not (path / CARD).is_file():
        counts = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
        raise UserError(
            f"{path}: the folder holds data files of several formats ({counts}), of which one would be read",
            hint=f"name the files with a pattern, for example '{path / '*'}{data[0].suffix}'",
        )


# -- tables --------------------------------------------------------------------------------------------------------


def _parquet_rows(path: Path) -> Iterator[Row | BadRow]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(f"{path}: reading parquet needs the package pyarrow", hint=NEEDS_EXTRA) from error
    try:
        number = 0
        with ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=PARQUET_BATCH):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number=number, place=f"{path}, row {number}", values=values)
    except ArrowException as error:
        raise UserError(f"{path}: not readable as parquet: {str(error).splitlines()[0]}", hint=WRITE_AGAIN) from error


def _check_columns(path: Path, names: Sequence[str]) -> None:
    """Raises: UserError for two columns of one name, of which a row would have the last one."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path}: has the column {twice[0]!r} twice", hint="rename or remove one of them")


def _arrow_rows(path: Path) -> Iterator[Row | BadRow]:
    rows = _loaded(path, lambda datasets: datasets.Dataset.from_file(str(path)))
    yield from _numbered(rows, path, path.parent)


def _dataset_rows(path: Path) -> Iterator[Row | BadRow]:
    """Rows of a folder that `Dataset.save_to_disk` wrote."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if (entry / "dataset_info.json").is_file())
        raise UserError(
            f"{path}: holds a dataset for each of several splits ({listed(splits)})",
            hint=f"name one of them, for example {path / (splits[-1] if splits else 'test')}",
        )
    yield from _numbered(_loaded(path, lambda datasets: datasets.load_from_disk(str(path))), path, path)


def _published_rows(folder: Path, path: Path, subset: str | None, split: str | None) -> Iterator[Row | BadRow]:
    """Rows of a folder laid out as data sets on the Hub are: its card or the names of its files tell the splits.

    Args:
        path: what the user wrote, for messages.
    """
    try:
        loaded = _loaded(path, lambda datasets: datasets.load_dataset(str(folder), subset, split=split))
    except UserError:
        if folder == path:
            _check_files(folder)
        raise
    if isinstance(loaded, dict):
        if len(loaded) > 1:
            files = sorted(entry.name for entry in folder.rglob("*") if entry.suffix in FORMATS)
            example = f"{path}[{next(iter(loaded))}]" if hub_name(path) else folder / (files or ["FILE"])[0]
            raise UserError(
                f"{path}: holds several splits: {', '.join(loaded)}", hint=f"name one of them, for example {example}"
            )
        loaded = next(iter(loaded.values()))
    yield from _numbered(loaded, path, folder)


def _check_files(folder: Path) -> None:
    """Raises: UserError for the first file of a folder with a row that cannot be read."""
    for file in sorted(file for file in folder.rglob("*") if file.suffix in FORMATS and file.name not in SIDE_FILES):
        for row in _file_rows(file):
            if isinstance(row, BadRow):
                raise UserError(str(row), hint="fix the file")


def _loaded(path: Path, load: Callable[[Any], Any]) -> Any:
    """Calls a function of the `datasets` library, with its errors as UserError."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{path}: reading it needs the package datasets", hint=NEEDS_EXTRA) from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the errors are raised as well
    try:
        return load(datasets)
    except Exception as error:  # a damaged file makes the library raise various errors, in turn caused by others
        cause = error.__cause__ or error
        text = " ".join(str(cause).split())[:300]
        raise UserError(f"{path}: datasets cannot load it: {type(cause).__name__}: {text}", hint=WRITE_AGAIN) from error


def _numbered(rows: Any, path: Path, folder: Path) -> Iterator[Row | BadRow]:
    """The rows of a `datasets.Dataset`, with pictures as their files have them."""
    _check_columns(path, rows.column_names)
    for name, feature in rows.features.items():
        if (stored := _stored_feature(feature)) is not feature:
            rows = rows.cast_column(name, stored)
    for number, values in enumerate(rows, start=1):
        yield Row(number=number, place=f"{path}, row {number}", values=values, folder=folder)


def _stored_feature(feature: Any) -> Any:
    """The feature of a column whose pictures are not decoded; the same one where it has none."""
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(mode=feature.mode, decode=False)
    if isinstance(feature, Mapping):
        inner = {name: _stored_feature(one) for name, one in feature.items()}
        return feature if all(inner[name] is one for name, one in feature.items()) else inner
    if (element := getattr(feature, "feature", None)) is not None and (
        stored := _stored_feature(element)
    ) is not element:
        feature = copy(feature)
        feature.feature = stored
    return feature


READERS: dict[str, Callable[[Path], Iterator[Row | BadRow]]] = {
    ".jsonl": json_rows,
    ".json": json_rows,
    ".csv": csv_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}
ENDINGS = {
    ".ndjson": "rename it so that it ends in .jsonl",
    ".tsv": "save it with commas between the cells, as .csv",
    ".xlsx": "save the sheet as .csv",
}
"""Ending of a file that is not read -> what to do with it."""
