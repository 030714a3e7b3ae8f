"""The files that a config names, checked before any process starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlinf.errors import UserError

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""A model folder of transformers holds one of these."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""And one of these; without any, transformers may make up an empty tokenizer instead of complaining."""


def check_model_folder(path: Path, *, key: str = "model.path") -> None:
    """Whether `path`, which the config calls `key`, can be a Hugging Face model folder.

    Raises: UserError when it does not exist, is not a folder, or lacks a readable config.json, weights or a tokenizer.
    """
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise UserError(
            f"{key}={path}: {what}",
            hint="give a folder that holds a Hugging Face model (config.json, weights, tokenizer)",
        )
    names = sorted(entry.name for entry in path.iterdir())
    for what, files in (("config.json", ("config.json",)), ("weights", WEIGHT_FILES), ("tokenizer", TOKENIZER_FILES)):
        if not any((path / name).is_file() for name in files):
            looked_for = "" if what == "config.json" else f"; looked for {', '.join(files)}"
            more = ", ..." if len(names) > 5 else ""
            raise UserError(
                f"{key}={path}: the folder holds no {what} (it holds: {', '.join(names[:5]) or 'nothing'}{more})",
                hint=f"give the folder itself, not the one above it{looked_for}",
            )
    _check_model_config(path / "config.json")


def _check_model_config(file: Path) -> None:
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise UserError(f"{file}: must hold a JSON object, holds {type(parsed).__name__}")
    if not isinstance(parsed.get("model_type"), str):
        raise UserError(
            f"{file}: has no model_type, which says the architecture", hint="is it a model of transformers?"
        )


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
                    yield _row(line.rstrip(b"\r\n"), f"{path}:{number}", fields)
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
