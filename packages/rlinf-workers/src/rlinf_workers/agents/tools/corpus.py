"""The documents of a local corpus: a JSON-lines or parquet file, or a folder of such files and of texts.

A row has `text` (or `contents`), and may have `title` and `id` (or `_id`, `docid`): the names that BEIR, Pyserini and
the corpora of search agents use. A text file (.txt, .md) is one document, whose title is its path in the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlinf_workers.agents.tools.base import ToolUnavailable

if TYPE_CHECKING:
    import numpy as np

TEXT_KEYS, TITLE_KEYS, ID_KEYS = ("text", "contents"), ("title",), ("id", "_id", "docid")
SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")


class Document(NamedTuple):
    """One document, or a passage of one."""

    name: str
    """The id of its row, or else its place: "corpus.jsonl:7", "notes/a.md"."""
    title: str
    text: str


def best(scores: np.ndarray, top_k: int) -> list[int]:
    """Indices of the highest scores, in descending order; equal ones in the order of their indices."""
    import numpy as np

    place = max(len(scores) - top_k, 0)
    candidates = np.flatnonzero(scores >= np.partition(scores, place)[place])
    return candidates[np.argsort(-scores[candidates], kind="stable")][:top_k].tolist()


def missing(path: str | Path) -> str:
    """What is wrong with the path of a corpus that does not exist."""
    return f"there is no such file or folder in {Path(path).absolute().parent}"


def read_documents(path: str, *, passage_characters: int | None, max_bytes: int) -> list[Document]:
    """All documents, in the order of the files' names and of their rows.

    Args:
        passage_characters: longer texts are split into passages of at most this length, at ends of lines or words.
        max_bytes: limit of all texts together, as UTF-8.

    Raises:
        ToolUnavailable: there are none, one cannot be read, or all together are too large; the message names the place.
    """
    documents: list[Document] = []
    num_bytes = 0
    for name, title, text in _documents(Path(path)):
        num_bytes += len(text.encode("utf-8", "replace"))
        if num_bytes > max_bytes:
            raise ToolUnavailable(
                f"the corpus {path} has more than {max_bytes} bytes; raise max_bytes to have it in memory"
            )
        pieces = passages(text, passage_characters) if passage_characters else [text]
        documents += (Document(name, title, piece) for piece in pieces)
    if not documents:
        raise ToolUnavailable(f"the corpus {path} has no documents; it may have files of {', '.join(SUFFIXES)}")
    return documents


def passages(text: str, length: int) -> list[str]:
    """The text in pieces of at most `length` characters, which end at a line, else at a word."""
    pieces: list[str] = []
    while len(text) > length:
        end = max(text.rfind("\n", 0, length + 1), 0) or max(text.rfind(" ", 0, length + 1), 0) or length
        pieces.append(text[:end].strip())
        text = text[end:].lstrip()
    return [piece for piece in (*pieces, text) if piece]


def _documents(path: Path) -> Iterator[Document]:
    try:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            for file in files:
                yield from _of_file(file, str(file.relative_to(path)))
        elif path.is_file() and path.suffix in SUFFIXES:
            yield from _of_file(path, path.name)
        else:
            problem = f"it is none of {', '.join(SUFFIXES)}" if path.exists() else missing(path)
            raise ToolUnavailable(f"the corpus {path} cannot be read: {problem}")
    except OSError as error:
        raise ToolUnavailable(f"the corpus {path} cannot be read: {error}") from error


def _of_file(file: Path, name: str) -> Iterator[Document]:
    if file.suffix == ".parquet":
        yield from _of_parquet(file, name)
        return
    try:
        if file.suffix == ".jsonl":
            yield from _of_lines(file, name)
        else:
            yield Document(name, name, file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ToolUnavailable(f"{file} is not UTF-8: {error}") from error


def _of_lines(file: Path, name: str) -> Iterator[Document]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ToolUnavailable(f"{file}:{number}: not a line of JSON: {error}") from error
            if not isinstance(row, dict):
                raise ToolUnavailable(f"{file}:{number}: a row must be an object, not {type(row).__name__}")
            yield _of_row(row, f"{file}:{number}", f"{name}:{number}")


def _of_parquet(file: Path, name: str) -> Iterator[Document]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ToolUnavailable(f"{file}: parquet needs pyarrow: pip install pyarrow ({error})") from error
    number = 0
    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield _of_row(row, f"{file}, row {number}", f"{name}:{number}")
    except ArrowException as error:
        raise ToolUnavailable(f"{file} cannot be read: {error}") from error


def _of_row(row: Mapping[Any, Any], place: str, name: str) -> Document:
    text, title, own_name = (
        next((row[key] for key in keys if row.get(key) is not None), None) for keys in (TEXT_KEYS, TITLE_KEYS, ID_KEYS)
    )
    if not isinstance(text, str):
        problem = f"has the text {text!r}" if text is not None else f"has only the keys {sorted(map(str, row))}"
        raise ToolUnavailable(f"{place}: a row needs a text as `text` or `contents`, this one {problem}")
    if title is not None and not isinstance(title, str):
        raise ToolUnavailable(f"{place}: the title {title!r} is no text")
    return Document(name if own_name is None else str(own_name), title or "", text)
