"""The files that a config names, checked before any process starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlinf.errors import UserError


def check_model_folder(path: Path) -> None:
    """Whether `path` can be a Hugging Face model folder.

    Raises: UserError when it does not exist, is not a folder, or holds no readable config.json.
    """
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise UserError(
            f"model.path={path}: {what}",
            hint="give a folder that holds a Hugging Face model (config.json, weights, tokenizer)",
        )
    file = path / "config.json"
    if not file.is_file():
        found = sorted(entry.name for entry in path.iterdir())[:5]
        raise UserError(
            f"model.path={path}: the folder holds no config.json (it holds: {', '.join(found) or 'nothing'})",
            hint="give the folder itself, not the one above it",
        )
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise UserError(f"{file}: must hold a JSON object, holds {type(parsed).__name__}")


def iter_jsonl(path: Path, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, one by one; blank lines are passed over.

    Args:
        path: the file.
        fields: keys that every object must hold, with text or a number as value.

    Raises: UserError with file and line for a file that cannot be read, a torn line, a line that is no object, a
        field that is missing.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _row(line, f"{path}:{number}", fields)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}", hint="check task.train_files and task.eval_files"
        ) from error


def _row(line: bytes, place: str, fields: Sequence[str]) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise UserError(
            f"{place}: not a JSON object ({error}); the line begins {line[:60].decode('utf-8', 'replace')!r}"
        ) from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: must be a JSON object with the fields {_listed(fields)}, is a {type(row).__name__}")
    missing = [field for field in fields if field not in row]
    if missing:
        raise UserError(
            f"{place}: no field {_listed(missing)}; the line has {_listed(sorted(map(str, row)))}",
            hint="name the fields with task.prompt_field and task.answer_field",
        )
    for field in fields:
        if isinstance(row[field], bool) or not isinstance(row[field], str | int | float):
            raise UserError(f"{place}: field {field!r} must be text or a number, is {json.dumps(row[field])[:60]}")
    return row


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
