"""JSON lines files: metrics.jsonl, evaluations.jsonl, samples.jsonl.

Each row is written in one piece and flushed, so a killed run loses at most that row; readers skip a truncated last
line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlinf.run_folder.plain_files import create_plain, open_plain


def finite(value: Any) -> Any:
    """Converts a value for JSON: NaN and infinities become None, numbers of torch and numpy become Python's."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Returns strict JSON, without NaN and Infinity."""
    return json.dumps(finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends rows to a file in one write; creates the file with the first row."""
    if rows:
        append_text(path, "".join(f"{to_json(row)}\n" for row in rows))


def append_text(path: Path, text: str) -> None:
    """Appends text to a file in one write; creates the file if needed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with naming(path), open(open_plain(path, flags), "a", encoding="utf-8") as file:
        file.write(text)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a file in order; none if there is no such file. Truncated lines are skipped."""
    return list(iter_rows(path))


def iter_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file as `read_rows`, without holding the file in memory."""
    return (row for _, row in _whole_rows(path))


def keep_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrites the file atomically with the rows for which `keep` is true, bytes unchanged, without truncated lines."""
    text = b"".join(line for line, row in _whole_rows(path) if keep(row))
    if path.exists() and len(text) != path.stat().st_size:
        write_file(path, text)


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file atomically by renaming: readers see either the old or the new content."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with naming(path), open(create_plain(partial), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)
    sync(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to errors that lack it, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(path: Path) -> None:
    """Syncs a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _whole_rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    try:
        descriptor = open_plain(path)
    except FileNotFoundError:
        return
    with open(descriptor, "rb") as file:
        yield from _parsed(file)


def _parsed(lines: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for line in lines:
        if not line.endswith(b"\n"):
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # after a power cut, a file may contain zeros
        if isinstance(row, dict):
            yield line, row
