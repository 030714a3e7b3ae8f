"""Fingerprints of the inputs of a run or an evaluation, so that resuming detects changes."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlinf.config.inputs import TOKENIZER_FILES, WEIGHT_FILES
from rlinf.errors import UserError

BLOCK_BYTES, NUM_BLOCKS = 1 << 16, 64
"""The fingerprint of a large file covers this many blocks at equal distances. Training changes every tensor, so weight
files need not be read completely."""
SMALL_FILES = {"config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"}
CODE = "code of "
"""Prefix of the names of code fingerprints."""
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")
WEIGHT_SUFFIXES = (".safetensors", ".bin")


def model_fingerprint(folder: Path) -> str:
    """Returns a digest of a model folder's config, tokenizer and weights; other files are ignored."""

    def counts(file: Path) -> bool:
        return file.name in {*SMALL_FILES, *TOKENIZER_FILES, *WEIGHT_FILES} or file.suffix in WEIGHT_SUFFIXES

    return _digest(folder, sorted(entry for entry in folder.iterdir() if entry.is_file()), counts)


def path_fingerprint(path: Path) -> str:
    """Returns a digest of a file, or of all files below a folder."""
    files = [path] if path.is_file() else sorted(entry for entry in path.rglob("*") if entry.is_file())
    return _digest(path, files, lambda file: True)


def code_fingerprints(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns `code of KEY=module:NAME` -> digest of the module's file, for each import path in a config.

    Args:
        config: of a run whose plug-ins have been imported; text that only looks like an import path is ignored.
    """
    fingerprints: dict[str, str] = {}
    for key, text in _texts(config, ""):
        file = getattr(sys.modules.get(text.partition(":")[0]), "__file__", None)
        if _IMPORT_PATH.fullmatch(text) and file is not None and Path(file).is_file():
            fingerprints[f"{CODE}{key}={text}"] = path_fingerprint(Path(file))
    return fingerprints


def _texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, str):
        yield key, node
    entries = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, value in entries:
        yield from _texts(value, f"{key}.{name}" if key else str(name))


def changed_inputs(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the names of changed inputs; for code see `changed_code`."""
    return [name for name in before if now.get(name) != before[name] and not name.startswith(CODE)]


def changed_code(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the names of plug-ins whose code changed, which may be an intended fix."""
    return [name for name in before if now.get(name) != before[name] and name.startswith(CODE)]


def refuse_changed(names: list[str], what: str, path: Path, hint: str) -> None:
    """Raises: UserError that lists the names, if there are any.

    Args:
        what: "run" or "evaluation".
        path: its folder.
    """
    if names:
        have = "has" if len(names) == 1 else "have"
        raise UserError(
            f"{', '.join(names)} {have} changed since the {what} in {path} began, so that what follows would not go "
            "together with what was before",
            hint=hint,
        )


def _digest(top: Path, files: list[Path], counts: Callable[[Path], bool]) -> str:
    digest = hashlib.sha256()
    for file in filter(counts, files):
        digest.update(f"{file.relative_to(top)} {file.stat().st_size}\n".encode())
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: Path) -> Iterator[bytes]:
    num_bytes = file.stat().st_size
    with file.open("rb") as opened:
        if num_bytes <= BLOCK_BYTES * NUM_BLOCKS or file.suffix not in WEIGHT_SUFFIXES:
            while block := opened.read(BLOCK_BYTES * NUM_BLOCKS):
                yield block
            return
        for i in range(NUM_BLOCKS):
            opened.seek((num_bytes - BLOCK_BYTES) * i // (NUM_BLOCKS - 1))
            yield opened.read(BLOCK_BYTES)
