"""Finds and reads the files of a LeRobot dataset's folder.

Datasets are untrusted, so nothing in one may lead out of its folder: no `..` or absolute path in a pattern or a
feature's name, and no symbolic link. Only links of Hugging Face's cache to its own blobs are allowed.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf_envs.errors import EnvError

INFO = "meta/info.json"
_FORMAT = re.compile(r"(0?[1-9])?d?")
"""Allowed format after the colon of a pattern's field: up to nine digits."""


class DatasetFolder:
    """Reads files of the dataset at `path`. Raises: EnvError that names the file and its entry for any problem."""

    def __init__(self, path: Path) -> None:
        self.path = path
        root = path.resolve()
        self._allowed = [root]
        if root.parent.name == "snapshots":
            self._allowed.append(root.parent.parent / "blobs")  # of Hugging Face's cache, whose files are links

    def file(self, relative: str | Path, entry: str) -> Path:
        """Returns the path of a file of the dataset.

        Args:
            entry: the entry that names it, for messages.
        """
        place = self.path / relative
        try:
            real = place.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, or an invalid name
            raise EnvError(f"{entry} names {str(relative)!r}, which is no path: {error}") from error
        if not any(real.is_relative_to(allowed) for allowed in self._allowed):
            raise EnvError(
                f"{entry} names {str(relative)!r}, which is {real}, outside of the dataset's folder {self.path}; a "
                "dataset reads its own files alone"
            )
        return place

    def named(self, info: Mapping[str, Any], key: str, **values: int | str) -> Path:
        """Returns the file that the pattern `key` of `meta/info.json` gives for these values."""
        entry = f"{self.path / INFO}, {key},"
        pattern = self.entry(info, key, INFO)
        try:
            fields = [(name, form) for _, name, form, _ in string.Formatter().parse(pattern) if name is not None]
        except (ValueError, TypeError) as error:
            raise EnvError(f"{entry} is {pattern!r}, which is no pattern of a file: {error}") from error
        for name, form in fields:
            form_is_good = not form if isinstance(values.get(name), str) else _FORMAT.fullmatch(form or "")
            if name not in values or not form_is_good:
                field = f"{{{name}:{form}}}" if form else f"{{{name}}}"
                raise EnvError(
                    f"{entry} is {pattern!r} with the field {field}; allowed: {', '.join(values)}, numbers with up to "
                    "nine digits"
                )
        return self.file(pattern.format(**values), entry)

    def json(self, relative: str) -> dict[str, Any]:
        """Reads the object in a JSON file."""
        file = self._own(relative)
        return _parsed(file.read_text(encoding="utf-8-sig"), str(file))

    def lines(self, relative: str) -> list[dict[str, Any]]:
        """Reads the objects of a JSON lines file."""
        file = self._own(relative)
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # sentences may contain other line breaks
        return [_parsed(line, f"{file}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]

    def _own(self, relative: str) -> Path:
        file = self.file(relative, "the layout of LeRobot")
        if not file.is_file():
            raise EnvError(f"{file} is missing; the dataset is not whole")
        return file

    def table(self, file: Path) -> dict[str, list[Any]]:
        """Reads the columns of a parquet file."""
        if not file.is_file():
            raise EnvError(f"{file} is missing, which {self.path / 'meta'} names; the dataset is not whole")
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise EnvError(
                f"parquet files are read by pyarrow, which is missing ({error}); pip install 'rlinf-envs[lerobot]'"
            ) from error
        try:
            return parquet.read_table(file).to_pydict()
        except (OSError, pyarrow.ArrowException) as error:
            raise EnvError(f"{file} cannot be read as parquet: {error}") from error

    def has(self, relative: str) -> bool:
        return (self.path / relative).is_file()

    def entry(self, holder: Mapping[str, Any], key: str, where: object) -> Any:
        """Returns `holder[key]`; `where` is the file it was read from."""
        if key not in holder:
            raise EnvError(
                f"{self.path / str(where)} has no {key!r}; it has {', '.join(map(str, holder)) or 'nothing'}"
            )
        return holder[key]


def _parsed(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EnvError(f"{place} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise EnvError(f"{place} holds a {type(value).__name__}, not an object")
    return value
